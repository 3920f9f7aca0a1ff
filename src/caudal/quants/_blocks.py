"""Turns a per-block decoder over a structured dtype into a checked `QuantType`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caudal.quants import QuantType

Blocks = NDArray[Any]  # [blocks] of a structured dtype, one record a stored block
Floats = NDArray[np.float32]  # [blocks, block_size]
Codes = NDArray[np.integer[Any]]  # small integers, uint8 or int8

_CHUNK = 1 << 16  # numbers decoded at once: the temporaries of a chunk stay in the L2 cache


def block_type(
    name: str,
    ggml_id: int,
    block_size: int,
    layout: np.dtype[Any],
    decode: Callable[[Blocks], Floats],
    encode: Callable[[Floats], Blocks] | None = None,
) -> QuantType:
    """A `QuantType` whose blocks are records of `layout`.

    Its `dequantize` and `quantize` raise ValueError for a length that does not fill whole blocks, and
    `quantize` for numbers that are not finite.
    """
    block_bytes = layout.itemsize
    step = max(1, _CHUNK // block_size)

    def dequantize(data: NDArray[np.uint8]) -> NDArray[np.float32]:
        if data.dtype != np.uint8:
            raise ValueError(f"{name} data must be bytes (uint8), not {data.dtype}")
        if data.size % block_bytes:
            raise ValueError(f"{data.size} bytes are not whole {name} blocks of {block_bytes} bytes")
        blocks = np.ascontiguousarray(data).reshape(-1).view(layout)
        out = np.empty((len(blocks), block_size), np.float32)
        # A damaged scale may be infinite or NaN; such blocks decode to what IEEE 754 says, without a warning.
        with np.errstate(invalid="ignore", over="ignore"):
            for i in range(0, len(blocks), step):
                out[i : i + step] = decode(blocks[i : i + step])
        return out.reshape(-1)

    def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
        assert encode is not None
        if values.size % block_size:
            raise ValueError(f"{values.size} numbers do not fill {name} blocks of {block_size}")
        rows = np.ascontiguousarray(values, np.float32).reshape(-1, block_size)
        out = np.empty(len(rows), layout)
        # Scales beyond the range of F16 become infinite, as in ggml.
        with np.errstate(over="ignore", divide="ignore"):
            for i in range(0, len(rows), step):
                if not np.isfinite(rows[i : i + step]).all():
                    raise ValueError(f"cannot quantize to {name}: some numbers are infinite or NaN")
                out[i : i + step] = encode(rows[i : i + step])
        return out.view(np.uint8)

    return QuantType(name, ggml_id, block_size, block_bytes, dequantize, quantize if encode else None)


def nibbles(packed: Codes) -> Codes:
    """[..., n] bytes -> [..., 2, n]: the low four bits of all, then the high four bits of all."""
    return np.stack((packed & 15, packed >> 4), axis=-2)


def bit_pairs(packed: Codes) -> Codes:
    """[..., n] bytes -> [..., 4, n]: bits 0-1 of all, then bits 2-3, 4-5 and 6-7."""
    return np.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2)


def single_bits(packed: Codes) -> Codes:
    """[..., n] bytes -> [..., 8, n]: bit 0 of all, then bit 1, ... and bit 7."""
    return np.stack([packed >> shift & 1 for shift in range(8)], axis=-2)
