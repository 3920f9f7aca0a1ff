"""`caudal perplexity`: how well a model predicts a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from caudal.cli.support.options import engine_options, json_option, model_argument, take
from caudal.cli.support.output import print_json, progress
from caudal.config import EngineConfig
from caudal.core import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from caudal.executors.base import Executor
    from caudal.loader import ExecutorKind


@click.command(short_help="Measure how well a model predicts a text.")
@model_argument
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-c", "--context", default=512, show_default=True, help="Tokens in each chunk.")
@click.option("--chunks", type=click.IntRange(1), help="Compute at most that many; default: all.")
@click.option(
    "--executor", type=click.Choice(("native", "reference")), default="native", show_default=True, help="What computes."
)
@engine_options("num_threads", "kv_type", "max_num_batched_tokens", "isa")
@json_option
def command(
    model: str, file: Path, context: int, chunks: int | None, executor: ExecutorKind, as_json: bool, **settings: Any
) -> None:
    """Perplexity of the text in FILE, counted as llama-perplexity does.

    The text is cut into chunks of --context tokens, each computed afresh; the predictions in the second half
    of a chunk count. A begin token is put in front of each chunk only if the model wants one.

    \b
    Examples:
      caudal perplexity smollm2:135m book.txt
      caudal perplexity model.gguf book.txt -c 1024 --json
    """
    import math

    from caudal.cli.support.models import open_model, open_tokenizer
    from caudal.loader import open_executor

    if context < 4:
        raise click.BadParameter("must be at least 4", param_hint="-c")
    checkpoint = open_model(model)
    tokenizer = open_tokenizer(checkpoint)
    text = file.read_bytes().decode("utf-8", errors="replace")
    token_ids = tokenizer.encode(text)
    num_chunks = len(token_ids) // context
    if num_chunks == 0:
        raise InvalidRequestError(f"{file} has {len(token_ids)} tokens; at least {context} are needed (-c)")
    num_chunks = min(num_chunks, chunks or num_chunks)
    config = take(EngineConfig, settings | {"max_model_len": context})
    runner, _ = open_executor(checkpoint, config, executor)
    losses: list[NDArray[np.float64]] = []
    try:
        with progress("chunks") as show_progress:
            for start in range(0, num_chunks * context, context):
                chunk = token_ids[start : start + context]
                if tokenizer.add_bos and tokenizer.bos_id is not None:
                    chunk = [tokenizer.bos_id, *chunk[1:]]
                losses.append(chunk_losses(runner, chunk, config.max_num_batched_tokens))
                show_progress(len(losses), num_chunks)
    finally:
        runner.close()
    mean, error = summarize(losses)
    perplexity = math.exp(mean)
    result = {
        "perplexity": perplexity,
        "error": perplexity * error,
        "nll": mean,
        "chunks": num_chunks,
        "context": context,
        "tokens": sum(len(chunk) for chunk in losses),
    }
    if as_json:
        print_json(result)
    else:
        print(f"perplexity {perplexity:.4f} +/- {perplexity * error:.4f} ({num_chunks} chunks of {context} tokens)")


def chunk_losses(executor: Executor, token_ids: Sequence[int], step_tokens: int) -> NDArray[np.float64]:
    """Negative log-likelihoods (nats) of the tokens in the second half of a chunk, computed from its start.

    token_ids: [n]; returns [n - n // 2 - 1]: positions n // 2 .. n - 2 predict their next tokens.
    """
    import numpy as np

    from caudal.executors.driver import sequence_batch

    first, last = len(token_ids) // 2, len(token_ids) - 1
    block_size = executor.kv_layout.block_size
    table = range(-(-len(token_ids) // block_size))
    losses: list[NDArray[np.float64]] = []
    for start in range(0, last, step_tokens):
        end = min(start + step_tokens, last)
        rows = range(max(first, start) - start, end - start)
        logits = executor.run(sequence_batch(token_ids[start:end], start, table, block_size, rows)).full
        targets = np.asarray(token_ids[start + 1 : end + 1])[rows.start :]
        # One row at a time in float64: the whole would take several times the memory of the model.
        losses.append(
            np.array([_loss(row.astype(np.float64), target) for row, target in zip(logits, targets, strict=True)])
        )
    return np.concatenate(losses)


def _loss(logits: NDArray[np.float64], target: int) -> float:
    import numpy as np

    peak = logits.max()
    return float(peak + np.log(np.exp(logits - peak).sum()) - logits[target])


def summarize(losses: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """Mean of all losses and its standard error."""
    import numpy as np

    values = np.concatenate(losses)
    return float(values.mean()), float(values.std() / np.sqrt(max(len(values) - 1, 1)))
