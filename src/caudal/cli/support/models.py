"""From a MODEL on the command line to something that runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from caudal.config import EngineConfig
    from caudal.executors.base import Executor
    from caudal.formats import Checkpoint


def open_model(name: str) -> Checkpoint:
    """Open a path, or what the store has under that name. Raises ModelNotFoundError and what opening raises."""
    from caudal.formats import open_checkpoint

    return open_checkpoint(Path(name))


def open_executor(checkpoint: Checkpoint, kind: str, config: EngineConfig) -> Executor:
    """An executor for one sequence at a time, without an engine."""
    if kind == "reference":
        from caudal.executors.reference import ReferenceExecutor

        return ReferenceExecutor(checkpoint, max_model_len=config.max_model_len)
    raise NotImplementedError
