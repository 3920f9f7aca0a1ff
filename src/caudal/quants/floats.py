"""Plain numbers: F32, F16, BF16 and F64, and the integer types that a few models use for tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from caudal.quants import QuantType


def _plain(name: str, ggml_id: int, dtype: str) -> QuantType:
    """A type whose stored numbers numpy knows; conversion is numpy's (round to nearest even)."""
    stored: np.dtype[Any] = np.dtype(dtype)

    def dequantize(data: NDArray[np.uint8]) -> NDArray[np.float32]:
        # F16 keeps infinities and NaN; an F64 too large for F32 becomes infinite.
        with np.errstate(over="ignore", invalid="ignore"):
            return _numbers(data, name, stored).astype(np.float32)

    def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(values, np.float32).reshape(-1).astype(stored).view(np.uint8)

    return QuantType(name, ggml_id, 1, stored.itemsize, dequantize, quantize if stored.kind == "f" else None)


def _numbers(data: NDArray[np.uint8], name: str, stored: np.dtype[Any]) -> NDArray[Any]:
    if data.dtype != np.uint8:
        raise ValueError(f"{name} data must be bytes (uint8), not {data.dtype}")
    if data.size % stored.itemsize:
        raise ValueError(f"{data.size} bytes are not whole {name} numbers of {stored.itemsize} bytes")
    return np.ascontiguousarray(data).reshape(-1).view(stored)


def _bf16_to_f32(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (_numbers(data, "bf16", np.dtype("<u2")).astype("<u4") << 16).view("<f4").astype(np.float32, copy=False)


def _f32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    # Half of the last kept bit, less one when that bit is 0: ties go to even. The sum cannot wrap: the largest
    # pattern that is not a NaN is 0xFF800000.
    rounded = np.where(is_nan, 0, bits) + (0x7FFF + (bits >> 16 & 1))
    return np.where(is_nan, bits >> 16 | 0x40, rounded >> 16).astype("<u2").view(np.uint8)  # 0x40 keeps a NaN a NaN


TYPES = (
    _plain("f32", 0, "<f4"),
    _plain("f16", 1, "<f2"),
    _plain("i8", 24, "<i1"),
    _plain("i16", 25, "<i2"),
    _plain("i32", 26, "<i4"),
    _plain("i64", 27, "<i8"),
    _plain("f64", 28, "<f8"),
    QuantType("bf16", 30, 1, 2, _bf16_to_f32, _f32_to_bf16),
)
