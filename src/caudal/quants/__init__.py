"""QuantType registry: how each tensor type is stored, and its plain numpy decoder (the reference for all).

A family of types is one file in this folder with a `TYPES` tuple; nothing else is edited. Files whose name
begins with an underscore hold what families share.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class QuantType:
    """A tensor type: blocks of `block_size` numbers in `block_bytes` bytes."""

    name: str  # lower case, as in "q4_1"
    ggml_id: int  # number in GGUF files
    block_size: int
    block_bytes: int
    dequantize: Callable[[NDArray[np.uint8]], NDArray[np.float32]]  # [blocks * bytes] -> [blocks * size]
    quantize: Callable[[NDArray[np.float32]], NDArray[np.uint8]] | None = None  # the inverse, where written

    def num_bytes(self, num_elements: int) -> int:
        """Bytes of `num_elements` numbers; they must fill whole blocks (ValueError otherwise)."""
        if num_elements % self.block_size:
            raise ValueError(f"{num_elements} elements do not fill blocks of {self.block_size} ({self.name})")
        return num_elements // self.block_size * self.block_bytes

    @property
    def bits_per_weight(self) -> float:
        return self.block_bytes * 8 / self.block_size


@cache
def _registry() -> dict[int, QuantType]:
    """All types by ggml id, gathered from the `TYPES` of every file in this folder."""
    types: dict[int, QuantType] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("_"):
            continue
        for quant_type in importlib.import_module(f"{__name__}.{module.name}").TYPES:
            if quant_type.ggml_id in types:
                raise ValueError(f"two quantization types have the ggml id {quant_type.ggml_id}")
            types[quant_type.ggml_id] = quant_type
    return types


def all_types() -> list[QuantType]:
    """Every known type, by ggml id."""
    return [t for _, t in sorted(_registry().items())]


def by_ggml_id(ggml_id: int) -> QuantType | None:
    return _registry().get(ggml_id)


def by_name(name: str) -> QuantType | None:
    return next((t for t in _registry().values() if t.name == name.lower()), None)
