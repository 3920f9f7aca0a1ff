"""Caudal: one inference engine for open-weight language models. Importing it does no work."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from caudal.config import EngineConfig
    from caudal.core import SamplingParams
    from caudal.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]

_LAZY = {"LLM": "caudal.llm", "EngineConfig": "caudal.config", "SamplingParams": "caudal.core"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'caudal' has no attribute {name!r}")
