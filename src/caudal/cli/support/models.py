"""From a MODEL on the command line to something that runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from caudal.config import EngineConfig
    from caudal.formats import Checkpoint
    from caudal.llm import LLM
    from caudal.text.tokenizer import Tokenizer

LOADING_DELAY = 0.5  # seconds; small models load faster than a bar is worth


def fetch(model: str) -> Path:
    """The file that MODEL means; what is not on this machine yet is fetched, with a progress bar.

    Raises ModelNotFoundError or DownloadError.
    """
    from caudal.cli.support.output import progress
    from caudal.store import Store

    with progress(f"Fetching {model}", size=True, say=True) as show_progress:
        return Store.default().fetch(model, show_progress)


def open_model(name: str) -> Checkpoint:
    """Open what MODEL means. Raises also InvalidModelFileError or UnsupportedModelError."""
    from caudal.formats import open_checkpoint

    return open_checkpoint(fetch(name))


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Raises UnsupportedModelError for a kind that Caudal does not have."""
    from caudal.text.tokenizer import Tokenizer

    return Tokenizer.from_gguf(checkpoint.metadata)


def open_llm(name: str, config: EngineConfig) -> LLM:
    """A running model; the bars show what takes long. Raises what finding, opening and planning it raise."""
    from caudal.cli.support.output import progress, remark
    from caudal.llm import LLM

    path = fetch(name)
    with progress(f"Loading {display_name(name)}", size=True, delay=LOADING_DELAY) as show_progress:
        llm = LLM(path, progress=show_progress, **asdict(config))
    if llm.remark:
        remark(f"{display_name(name)}: {llm.remark}")
    return llm


def display_name(model: str) -> str:
    """What a MODEL is called: a file by its name without the ending, others as they are."""
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name if path.is_dir() else model
