"""Bytes on disk -> Checkpoint: metadata and tensors as views of the mapped file, nothing copied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from caudal.quants import QuantType


@dataclass(frozen=True, slots=True)
class HostTensor:
    """One stored tensor: raw bytes of whole quantization blocks, rows one after another."""

    name: str
    shape: tuple[int, ...]  # row-major: the last dimension is contiguous (GGUF's `ne` reversed)
    quant_type: QuantType
    data: NDArray[np.uint8]  # [num_bytes], a read-only view of the mapped file

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def to_float32(self) -> NDArray[np.float32]:
        """Dequantized copy, of shape `shape`."""
        return self.quant_type.dequantize(self.data).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model. Tensor names are GGUF's, whatever the format on disk."""

    path: Path
    format: Literal["gguf", "hf"]
    # GGUF key-values: bool, int, float, str, and lists of these; for Hugging Face folders the content of config.json
    metadata: Mapping[str, object]
    tensors: Mapping[str, HostTensor]
    files: tuple[Path, ...] = field(default=())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.data.nbytes for t in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of all files. Raises OSError when one is no longer there."""
        return sum(path.stat().st_size for path in self.files)


@dataclass(frozen=True, slots=True)
class TypeUse:
    """How much of a model is stored in one tensor type."""

    quant_type: QuantType
    num_tensors: int
    num_elements: int
    num_bytes: int


def quantization_mix(checkpoint: Checkpoint) -> list[TypeUse]:
    """Which tensor types the model uses, the one with the most bytes first."""
    groups: dict[str, list[HostTensor]] = {}
    for tensor in checkpoint.tensors.values():
        groups.setdefault(tensor.quant_type.name, []).append(tensor)
    uses = [
        TypeUse(g[0].quant_type, len(g), sum(t.num_elements for t in g), sum(t.data.nbytes for t in g))
        for g in groups.values()
    ]
    return sorted(uses, key=lambda use: -use.num_bytes)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file (the first of its splits) by content, not by name.

    Raises ModelNotFoundError, InvalidModelFileError or UnsupportedModelError.
    """
    from caudal.formats.gguf import open_gguf

    return open_gguf(path)
