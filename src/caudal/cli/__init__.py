"""The command line: one file per command, each with a `command`; a new file here is a new command.

Command files import only click and `cli.support` at the top: `caudal --help` reads all of them. What a
command needs to do its work it imports when it runs.
"""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

import click

from caudal import __version__
from caudal.cli.support.errors import EXIT_CODES, report_error
from caudal.core import CaudalError

ALIASES = {"ls": "list"}

_EXIT_CODE_HELP = "\n".join(f"  {code:<4}{meaning}" for code, meaning in EXIT_CODES.items())


class CommandFolder(click.Group):
    """A group whose commands are the modules of this package, imported when asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"{__name__}.{name}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean '{near[0]}'?", ctx) from error


@click.group(
    cls=CommandFolder,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=f"""\b
MODEL is a GGUF file, a store name such as smollm2:135m, or pypi:PACKAGE.
`caudal COMMAND --help` has examples.

\b
Exit codes:
{_EXIT_CODE_HELP}
""",
)
@click.version_option(__version__, prog_name="caudal", message="%(prog)s %(version)s")
def group() -> None:
    """Run, chat with, serve and measure open-weight language models.

    \b
    Examples:
      caudal chat
      caudal run smollm2:135m "Why is the sky blue?"
      caudal serve smollm2:135m --port 8000
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors are printed as one message."""
    _replace_closed_streams()
    try:
        result: object = group.main(list(arguments), prog_name="caudal", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError as error:
        return report_error(error)
    except (CaudalError, OSError, MemoryError) as error:
        return report_error(error)
    return result if isinstance(result, int) else 0


def _replace_closed_streams() -> None:
    """Standard streams that the caller has closed become empty ones, for which no command needs a case of its own."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (open as long as the process)
