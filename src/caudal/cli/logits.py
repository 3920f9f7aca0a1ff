"""`caudal logits`: what the model computes, for comparison with other engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from caudal.cli.support.options import IntList, engine_options, model_argument, take
from caudal.config import EngineConfig
from caudal.core import InvalidRequestError, UnsupportedModelError

if TYPE_CHECKING:
    from caudal.loader import ExecutorKind


@click.command(short_help="Write the logits of a token sequence to a file.")
@model_argument
@click.option("--tokens", type=IntList(0), required=True, help="Token ids, separated by commas.")
@click.option("--all", "all_positions", is_flag=True, help="Logits of all positions, not only the last.")
@click.option(
    "--executor",
    type=click.Choice(("native", "reference", "pytorch")),
    default="native",
    show_default=True,
    help="What computes.",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File to write (.npy).")
@engine_options("num_threads", "kv_type", "max_num_batched_tokens", "isa")
def command(
    model: str,
    tokens: tuple[int, ...],
    all_positions: bool,
    executor: ExecutorKind | Literal["pytorch"],
    out: Path,
    **settings: Any,
) -> None:
    """Compute a sequence of token ids and write its raw logits as a float32 numpy array.

    The array is [vocabulary], the logits after the last token, or with --all [tokens, vocabulary].

    \b
    Examples:
      caudal logits smollm2:135m --tokens 504,1573,33059 --out logits.npy
      caudal logits model.gguf --tokens 1,2,3 --all --executor reference --out all.npy
    """
    import numpy as np

    from caudal.cli.support.models import open_model
    from caudal.executors.driver import run_tokens
    from caudal.loader import open_executor

    if executor == "pytorch":
        raise UnsupportedModelError("the pytorch executor is not part of this build; use native or reference")
    config = take(EngineConfig, settings)
    runner, _ = open_executor(open_model(model), config, executor)
    try:
        if outside := [token for token in tokens if token >= runner.vocab_size]:
            raise InvalidRequestError(f"--tokens has {outside[0]}; token ids go from 0 to {runner.vocab_size - 1}")
        logits = run_tokens(runner, tokens, chunk_sizes=(config.max_num_batched_tokens,), all_logits=all_positions)
    finally:
        runner.close()
    with out.open("wb") as file:  # np.save would append .npy to another name
        np.save(file, logits if all_positions else logits[-1])
