"""`caudal list`: the models in the store."""

from __future__ import annotations

from dataclasses import asdict

import click

from caudal.cli.support.options import json_option
from caudal.cli.support.output import print_json, print_table
from caudal.config import format_size


@click.command(short_help="List models that are here or can be fetched.")
@json_option
def command(as_json: bool) -> None:
    """List the models in the store, and those that `caudal pull` knows by name.

    \b
    Examples:
      caudal list
      caudal list --json
    """
    from caudal.store import Store, catalog

    stored = Store.default().models()
    names = {model.name for model in stored}
    known = [entry for entry in catalog() if entry.name not in names]
    if as_json:
        here = [asdict(model) | {"path": str(model.path), "fetched": True} for model in stored]
        print_json(here + [asdict(entry) | {"fetched": False} for entry in known])
        return
    rows = [(model.name, format_size(model.size), model.date[:10], model.source) for model in stored]
    rows += [(entry.name, format_size(entry.size), "not fetched", entry.source) for entry in known]
    print_table(("model", "size", "fetched", "source"), rows)
