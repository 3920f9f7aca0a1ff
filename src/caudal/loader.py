"""From a model file to a running engine: the one place that knows the parts of both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from caudal.config import EngineConfig
    from caudal.engine.sampling import Sampler
    from caudal.engine.worker import AsyncEngine
    from caudal.executors.base import Executor
    from caudal.formats import Checkpoint
    from caudal.text.chat import ChatTemplate
    from caudal.text.tokenizer import Tokenizer

ExecutorKind = Literal["native", "reference"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to answer. `engine.close()` frees it."""

    path: Path
    name: str  # as the file calls itself
    architecture: str
    num_bytes: int  # of the tensors in the file
    engine: AsyncEngine
    tokenizer: Tokenizer
    chat_template: ChatTemplate


def load(
    path: Path,
    config: EngineConfig,
    *,
    executor: ExecutorKind = "native",
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Open a model file, plan and fill the executor, and start an engine.

    `progress` is called with the bytes of weights done and in all. Raises InvalidSettingError,
    ModelNotFoundError, InvalidModelFileError, UnsupportedModelError and InsufficientMemoryError.
    """
    from caudal.engine.engine import Engine, validate_config
    from caudal.engine.worker import AsyncEngine
    from caudal.formats import open_checkpoint
    from caudal.text.chat import ChatTemplate
    from caudal.text.tokenizer import Tokenizer

    # First what is quick, so that what cannot work is refused at once.
    validate_config(config)
    checkpoint = open_checkpoint(path)
    metadata = checkpoint.metadata
    tokenizer = Tokenizer.from_gguf(metadata)
    chat_template = ChatTemplate.from_gguf(metadata)
    running, sampler = open_executor(
        checkpoint, config, executor, progress=progress, num_token_ids=tokenizer.vocab_size
    )
    try:
        engine = Engine(running, tokenizer, config, sampler)
    except BaseException:
        running.close()
        raise
    return LoadedModel(
        path=path,
        name=str(metadata.get("general.name") or path.stem),
        architecture=str(metadata["general.architecture"]),
        num_bytes=checkpoint.num_bytes,
        engine=AsyncEngine(engine),
        tokenizer=tokenizer,
        chat_template=chat_template,
    )


def open_executor(
    checkpoint: Checkpoint,
    config: EngineConfig,
    kind: ExecutorKind = "native",
    *,
    progress: Callable[[int, int], None] | None = None,
    num_token_ids: int | None = None,
) -> tuple[Executor, Sampler]:
    """An executor filled with a checkpoint, and the sampler that goes with it.

    `num_token_ids`: of the tokenizer, which the sampler never exceeds; default: as many as there are logits.
    `progress` and errors as for `load`.
    """
    from caudal.engine.engine import validate_config

    validate_config(config)
    if kind == "reference":
        from caudal.engine.sampling import ReferenceSampler
        from caudal.executors.reference import ReferenceExecutor

        reference = ReferenceExecutor(checkpoint, max_model_len=config.max_model_len)
        return reference, ReferenceSampler(num_token_ids or reference.vocab_size)
    from caudal.engine.native_sampling import NativeSampler
    from caudal.executors.native import NativeExecutor

    native = NativeExecutor(checkpoint, config, progress=progress)
    return native, NativeSampler(native.pool, native.isa, num_token_ids or native.vocab_size)
