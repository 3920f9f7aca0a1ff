"""The block types of early ggml: 32 numbers with one F16 scale `d`, and a minimum `m` in the `_1` types.

Numbers i and i + 16 share a byte (low and high four bits); a fifth bit lies apart in `qh`, bit i of a
little-endian u32 for number i. The quantizers take for each block the scale that ggml's reference takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from caudal.quants._blocks import Blocks, Codes, Floats, block_type, nibbles

_Q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
_Q5_0 = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
_Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
_Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])


def _f32(blocks: Blocks, name: str) -> Floats:
    """A scalar field of each block, as a column [blocks, 1]."""
    return blocks[name].astype(np.float32)[:, None]


def _four_bits(blocks: Blocks) -> Codes:
    return nibbles(blocks["qs"]).reshape(-1, 32)


def _five_bits(blocks: Blocks) -> Codes:
    return _four_bits(blocks) | np.unpackbits(blocks["qh"], axis=-1, bitorder="little") << 4


def _decode_q4_0(blocks: Blocks) -> Floats:
    return _f32(blocks, "d") * (_four_bits(blocks).astype(np.float32) - 8)


def _decode_q4_1(blocks: Blocks) -> Floats:
    return _f32(blocks, "d") * _four_bits(blocks) + _f32(blocks, "m")


def _decode_q5_0(blocks: Blocks) -> Floats:
    return _f32(blocks, "d") * (_five_bits(blocks).astype(np.float32) - 16)


def _decode_q5_1(blocks: Blocks) -> Floats:
    return _f32(blocks, "d") * _five_bits(blocks) + _f32(blocks, "m")


def _decode_q8_0(blocks: Blocks) -> Floats:
    return _f32(blocks, "d") * blocks["qs"]


def _inverse(d: Floats) -> Floats:
    """1 / d, and 0 where d is 0 or so small that 1 / d is infinite (stored as F16 such a scale is 0 anyway)."""
    inverse = 1 / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _signed_scale(rows: Floats, most_negative: int) -> Floats:
    """[blocks, 1]: the scale that maps the number of largest magnitude to `most_negative`."""
    largest = np.take_along_axis(rows, np.abs(rows).argmax(axis=1, keepdims=True), axis=1)
    return largest / np.float32(most_negative)


def _pack_signed(rows: Floats, layout: np.dtype[Any], half: int) -> tuple[Blocks, Codes]:
    """Blocks with their scales set, and the codes 0 .. 2 * half - 1 that stand for -half .. half - 1."""
    d = _signed_scale(rows, -half)
    q = (rows * _inverse(d) + np.float32(half + 0.5)).astype(np.uint8)  # truncates: a sum is never negative
    blocks = np.zeros(len(rows), layout)
    blocks["d"] = d[:, 0]
    return blocks, np.minimum(q, 2 * half - 1)


def _pack_affine(rows: Floats, layout: np.dtype[Any], top: int) -> tuple[Blocks, Codes]:
    """Blocks with scale and minimum set, and the codes 0 .. top."""
    low = rows.min(axis=1, keepdims=True)
    d = (rows.max(axis=1, keepdims=True) - low) / np.float32(top)
    q = ((rows - low) * _inverse(d) + np.float32(0.5)).astype(np.uint8)
    blocks = np.zeros(len(rows), layout)
    blocks["d"] = d[:, 0]
    blocks["m"] = low[:, 0]
    return blocks, np.minimum(q, top)


def _store_codes(blocks: Blocks, q: Codes) -> Blocks:
    blocks["qs"] = q[:, :16] & 15 | q[:, 16:] << 4
    if "qh" in (blocks.dtype.names or ()):
        blocks["qh"] = np.packbits(q >> 4, axis=-1, bitorder="little")
    return blocks


def _encode_q4_0(rows: Floats) -> Blocks:
    return _store_codes(*_pack_signed(rows, _Q4_0, 8))


def _encode_q4_1(rows: Floats) -> Blocks:
    return _store_codes(*_pack_affine(rows, _Q4_1, 15))


def _encode_q5_0(rows: Floats) -> Blocks:
    return _store_codes(*_pack_signed(rows, _Q5_0, 16))


def _encode_q5_1(rows: Floats) -> Blocks:
    return _store_codes(*_pack_affine(rows, _Q5_1, 31))


def _encode_q8_0(rows: Floats) -> Blocks:
    d = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    scaled = rows * _inverse(d)
    magnitude = np.floor(np.abs(scaled))
    magnitude += np.abs(scaled) - magnitude >= 0.5  # halves go away from zero, as C's roundf does
    blocks = np.zeros(len(rows), _Q8_0)
    blocks["d"] = d[:, 0]
    blocks["qs"] = np.copysign(magnitude, scaled)
    return blocks


TYPES = (
    block_type("q4_0", 2, 32, _Q4_0, _decode_q4_0, _encode_q4_0),
    block_type("q4_1", 3, 32, _Q4_1, _decode_q4_1, _encode_q4_1),
    block_type("q5_0", 6, 32, _Q5_0, _decode_q5_0, _encode_q5_0),
    block_type("q5_1", 7, 32, _Q5_1, _decode_q5_1, _encode_q5_1),
    block_type("q8_0", 8, 32, _Q8_0, _decode_q8_0, _encode_q8_0),
)
