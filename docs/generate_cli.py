"""Writes docs/cli.md from the commands' own help: python docs/generate_cli.py"""

from __future__ import annotations

from pathlib import Path

import click

from caudal.cli import ALIASES, group

INTRODUCTION = """# The command line

Written by `python docs/generate_cli.py` from `caudal COMMAND --help`; a test compares the two.
"""


def help_text(command: click.Command, name: str, parent: click.Context | None) -> str:
    # The info names have to be those of the installed command, wherever this runs.
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, terminal_width=100)
    return context.get_help().rstrip()


def cli_reference() -> str:
    parent = group.make_context("caudal", ["version"], terminal_width=100)
    parts = [INTRODUCTION, f"```text\n{help_text(group, 'caudal', None)}\n```\n"]
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        assert command is not None
        aliases = "".join(f", `{alias}`" for alias, target in ALIASES.items() if target == name)
        parts.append(f"## {name}{aliases}\n\n```text\n{help_text(command, name, parent)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(cli_reference())
