"""`caudal serve`: the OpenAI-compatible server."""

from __future__ import annotations

import sys
from typing import Any

import click

from caudal.cli.support.options import engine_options, server_options, take
from caudal.cli.support.output import remark
from caudal.config import EngineConfig, ServerConfig


@click.command(short_help="Serve a model over an OpenAI-compatible API.")
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@server_options
@engine_options()
def command(models: tuple[str, ...], **settings: Any) -> None:
    """Serve MODEL over HTTP; without MODEL the default one, which is fetched on first use.

    /health answers 200 as soon as requests are served. SIGTERM lets running requests finish and then exits with 0.

    \b
    Examples:
      caudal serve smollm2:135m
      caudal serve model.gguf --port 8080 --threads 4 --ctx 4096 --kv-cache-memory 512MiB --kv-type q8
      caudal serve smollm2:135m --host 0.0.0.0 --api-key SECRET
    """
    if len(models) > 1:
        raise click.UsageError(f"one model for each server; start another one for {' and '.join(models[1:])}")
