"""`caudal version`."""

from __future__ import annotations

import click

from caudal import __version__
from caudal.cli.support.options import json_option
from caudal.cli.support.output import print_json


@click.command(short_help="Show versions and what this machine offers.")
@json_option
def command(as_json: bool) -> None:
    """Show versions and what this machine offers.

    \b
    Examples:
      caudal version
      caudal version --json
    """
    import platform

    from caudal import _native
    from caudal.executors.system import usable_cpus

    facts = {
        "caudal": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": usable_cpus(),
        "isa": [name for name in _native.instruction_sets() if name != "auto"],
    }
    if as_json:
        print_json(facts)
    else:
        texts = {name: ", ".join(value) if isinstance(value, list) else value for name, value in facts.items()}
        print("\n".join(f"{name:<8}{text}" for name, text in texts.items()))
