"""`caudal rm`: delete models from the store."""

from __future__ import annotations

import click

from caudal.config import format_size


@click.command(short_help="Delete models from the store.")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
def command(models: tuple[str, ...]) -> None:
    """Delete models from the store. Files outside the store are never touched.

    \b
    Examples:
      caudal rm smollm2:135m
    """
    from caudal.store import Store

    store = Store.default()
    for name in models:
        removed = store.remove(name)
        print(f"Deleted {removed.name} ({format_size(removed.size)}).")
