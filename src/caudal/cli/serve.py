"""`caudal serve`: the OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from caudal.cli.support.options import engine_options, server_options, take
from caudal.cli.support.output import progress, remark
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

    from caudal.api.server import serve
    from caudal.api.service import ModelDetails, ServedModel
    from caudal.cli.support.models import LOADING_DELAY, display_name, fetch
    from caudal.loader import load as load_model
    from caudal.store import default_model
    from caudal.text.grammar import GrammarCompiler

    name = models[0] if models else default_model()
    server_config = take(ServerConfig, settings)
    engine_config = take(EngineConfig, settings)

    def load() -> ServedModel:
        path, config = fetch(name), engine_config
        if config.draft_model is not None:
            config = replace(config, draft_model=str(fetch(config.draft_model)))
        with progress(f"Loading {display_name(name)}", size=True, delay=LOADING_DELAY) as show_progress:
            loaded = load_model(path, config, progress=show_progress)
        if loaded.remark:
            remark(f"{display_name(name)}: {loaded.remark}")
        return ServedModel(
            name=server_config.served_model_name or display_name(name),
            engine=loaded.engine,
            tokenizer=loaded.tokenizer,
            chat_template=loaded.chat_template,
            max_model_len=loaded.engine.max_model_len,
            grammars=GrammarCompiler(loaded.tokenizer),
            details=ModelDetails(loaded.architecture, loaded.quantization, engine_config.max_num_seqs),
        )

    serve(load, server_config, remark)
