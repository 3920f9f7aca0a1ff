"""From a model file to a running engine: the one place that knows the parts of both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from caudal.config import EngineConfig
    from caudal.engine.sampling import Sampler
    from caudal.engine.worker import AsyncEngine
    from caudal.executors.base import Executor
    from caudal.formats import Checkpoint
    from caudal.text.chat import ChatTemplate
    from caudal.text.tokenizer import Tokenizer

ExecutorKind = Literal["native", "reference"]
_MIN_DRAFT_CACHE = 16 << 20  # bytes


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
    quantization: str = ""  # the type of most of these bytes, as Q4_K
    remark: str = ""  # for people, where the executor does not use memory in the usual way


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
    from caudal.formats import open_checkpoint, quantization_mix
    from caudal.text.chat import ChatTemplate
    from caudal.text.tokenizer import Tokenizer

    # First what is quick, so that what cannot work is refused at once.
    validate_config(config)
    checkpoint = open_checkpoint(path)
    draft = None if config.draft_model is None else _open_draft(Path(config.draft_model), checkpoint)
    metadata = checkpoint.metadata
    tokenizer = Tokenizer.from_gguf(metadata)
    chat_template = ChatTemplate.from_gguf(metadata)
    running, sampler = open_executor(
        checkpoint,
        config,
        executor,
        progress=progress,
        num_token_ids=tokenizer.vocab_size,
        reserve=0 if draft is None else draft.num_bytes + max(draft.num_bytes, _MIN_DRAFT_CACHE),
    )
    drafting: Executor | None = None
    try:
        if draft is not None:
            drafting = _draft_executor(draft, config, running, tokenizer.vocab_size)
        engine = Engine(running, tokenizer, config, sampler, draft_executor=drafting)
    except BaseException:
        running.close()
        if drafting is not None:
            drafting.close()
        raise
    return LoadedModel(
        path=path,
        name=str(metadata.get("general.name") or path.stem),
        architecture=str(metadata["general.architecture"]),
        num_bytes=checkpoint.num_bytes,
        engine=AsyncEngine(engine),
        tokenizer=tokenizer,
        chat_template=chat_template,
        quantization=quantization_mix(checkpoint)[0].quant_type.name,
        remark=running.remark,
    )


def open_executor(
    checkpoint: Checkpoint,
    config: EngineConfig,
    kind: ExecutorKind = "native",
    *,
    progress: Callable[[int, int], None] | None = None,
    num_token_ids: int | None = None,
    reserve: int = 0,
) -> tuple[Executor, Sampler]:
    """An executor filled with a checkpoint, and the sampler that goes with it.

    `num_token_ids`: of the tokenizer, beyond which no token is chosen; default: as many as there are logits.
    `reserve`: bytes of memory that others will take.
    `progress` and errors as for `load`.
    """
    from caudal.engine.engine import validate_config

    validate_config(config)
    if kind == "reference":
        from caudal.engine.sampling import ReferenceSampler
        from caudal.executors.reference import ReferenceExecutor

        reference = ReferenceExecutor(checkpoint, max_model_len=config.max_model_len, num_token_ids=num_token_ids)
        return reference, ReferenceSampler(num_token_ids or reference.vocab_size)
    from caudal.engine.native_sampling import NativeSampler
    from caudal.executors.native import NativeExecutor

    native = NativeExecutor(checkpoint, config, progress=progress, num_token_ids=num_token_ids, reserve=reserve)
    return native, NativeSampler(native.pool, native.isa, num_token_ids or native.vocab_size)


def _open_draft(path: Path, checkpoint: Checkpoint) -> Checkpoint:
    """The draft model's file, if its token ids mean the same as the model's."""
    from caudal.core import UnsupportedModelError
    from caudal.formats import open_checkpoint

    draft = open_checkpoint(path)
    key = "tokenizer.ggml.tokens"
    theirs, ours = (list(cast("Sequence[object]", c.metadata.get(key) or ())) for c in (draft, checkpoint))
    if theirs != ours:
        first = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), None)
        where = f"token {first} differs" if first is not None else f"{len(theirs)} tokens, not {len(ours)}"
        raise UnsupportedModelError(
            f"{path.name} cannot be the draft model of {checkpoint.path.name}, as it has another vocabulary ({where}); "
            "use a smaller model of the same family"
        )
    return draft


def _draft_executor(draft: Checkpoint, config: EngineConfig, running: Executor, num_token_ids: int) -> Executor:
    """An executor on the threads of the other one, with as much memory for its cache as its weights take. Sequences
    that do not fit there get no drafts."""
    from caudal.executors.native import NativeExecutor

    if not isinstance(running, NativeExecutor):
        from caudal.executors.reference import ReferenceExecutor

        return ReferenceExecutor(draft, num_token_ids=num_token_ids)
    layout = running.kv_layout
    return NativeExecutor(
        draft,
        replace(config, max_model_len=0, kv_cache_memory=max(draft.num_bytes, _MIN_DRAFT_CACHE)),
        pool=running.pool,
        num_token_ids=num_token_ids,
        reserve=layout.num_blocks * layout.block_bytes,
    )
