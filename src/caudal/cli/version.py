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
    import os
    import platform

    facts = {
        "caudal": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
    }
    if as_json:
        print_json(facts)
    else:
        print("\n".join(f"{name:<8}{value}" for name, value in facts.items()))
