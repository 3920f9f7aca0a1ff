"""The K types: super-blocks of 256 numbers in groups of 16 or 32, each group with its own few-bit scale.

A super-block holds one F16 scale `d` of the group scales (and `dmin` of the group minima where there are
minima). Layouts: ggml's k-quants (https://github.com/ggml-org/llama.cpp/pull/1684).
"""

from __future__ import annotations

import numpy as np

from caudal.quants._blocks import Blocks, Codes, Floats, bit_pairs, block_type, nibbles, single_bits

_Q2_K = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
_Q3_K = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
_Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
_Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
_Q6_K = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])


def _times(blocks: Blocks, name: str, factors: Codes) -> Floats:
    """The F16 field `name` of each block times its group factors: [blocks, groups, 1]."""
    return (blocks[name].astype(np.float32)[:, None] * factors)[..., None]


def _decode_q2_k(blocks: Blocks) -> Floats:
    """Each byte of `scales` is a group of 16: scale in the low bits, minimum in the high bits."""
    q = bit_pairs(blocks["qs"].reshape(-1, 2, 32)).reshape(-1, 16, 16)
    scale = _times(blocks, "d", blocks["scales"] & 15)
    minimum = _times(blocks, "dmin", blocks["scales"] >> 4)
    return (scale * q - minimum).reshape(-1, 256)


def _decode_q3_k(blocks: Blocks) -> Floats:
    """Three-bit numbers -4 .. 3; a clear bit in `hmask` takes 4 off. Sixteen 6-bit scales, offset 32.

    Bytes 0-7 of `scales` hold the low four bits of scales 0-7 and, in their upper half, 8-15; bytes 8-11
    hold the upper two bits of scales 0-3, 4-7, 8-11 and 12-15.
    """
    low = nibbles(blocks["scales"][:, :8]).reshape(-1, 16)
    high = bit_pairs(blocks["scales"][:, 8:]).reshape(-1, 16)
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    q = bit_pairs(blocks["qs"].reshape(-1, 2, 32)).reshape(-1, 16, 16)
    high_bit = single_bits(blocks["hmask"]).reshape(-1, 16, 16)
    numbers = (q | high_bit << 2).astype(np.int8) - np.int8(4)
    return (_times(blocks, "d", scales) * numbers).reshape(-1, 256)


def _scales_and_minima(packed: Codes) -> tuple[Codes, Codes]:
    """[blocks, 12] bytes -> eight 6-bit scales and eight 6-bit minima.

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low six bits. Bytes 8-11 hold the low four bits of
    scales (low half) and minima (high half) 4-7, whose upper two bits are on top of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1)
    return scales, minima


def _affine_groups(blocks: Blocks, q: Codes) -> Floats:
    """Codes [blocks, 8, 32] with the scales and minima of Q4_K and Q5_K."""
    scales, minima = _scales_and_minima(blocks["scales"])
    return (_times(blocks, "d", scales) * q - _times(blocks, "dmin", minima)).reshape(-1, 256)


def _decode_q4_k(blocks: Blocks) -> Floats:
    return _affine_groups(blocks, nibbles(blocks["qs"].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _decode_q5_k(blocks: Blocks) -> Floats:
    low = nibbles(blocks["qs"].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _affine_groups(blocks, low | single_bits(blocks["qh"]) << 4)


def _decode_q6_k(blocks: Blocks) -> Floats:
    """Six-bit numbers -32 .. 31 in groups of 16 with int8 scales; halves of 128 numbers lie one after another."""
    low = nibbles(blocks["ql"].reshape(-1, 2, 64)).reshape(-1, 16, 16)
    high = bit_pairs(blocks["qh"].reshape(-1, 2, 32)).reshape(-1, 16, 16)
    numbers = (low | high << 4).astype(np.int8) - np.int8(32)
    return (_times(blocks, "d", blocks["scales"]) * numbers).reshape(-1, 256)


TYPES = (
    block_type("q2_k", 10, 256, _Q2_K, _decode_q2_k),
    block_type("q3_k", 11, 256, _Q3_K, _decode_q3_k),
    block_type("q4_k", 12, 256, _Q4_K, _decode_q4_k),
    block_type("q5_k", 13, 256, _Q5_K, _decode_q5_k),
    block_type("q6_k", 14, 256, _Q6_K, _decode_q6_k),
)
