"""The 1-, 2- and 3-bit I types: a code names a vector of 4 or 8 numbers in a codebook; signs lie apart.

Super-blocks of 256 numbers with an F16 scale `d`, which is multiplied by a small scale for each 16 or 32. The
types whose signs take 7 bits for 8 numbers leave out the eighth: their number is even. Layouts: ggml
(https://github.com/ggml-org/llama.cpp/pull/4773 and the pulls named below).
"""

from __future__ import annotations

import numpy as np

from caudal.quants import _codebooks as codebooks
from caudal.quants._blocks import Blocks, Codes, Floats, block_type

_IQ1_S = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)])
_IQ1_M = np.dtype([("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)])
_IQ2_XXS = np.dtype([("d", "<f2"), ("groups", [("codes", "u1", 4), ("signs_scale", "<u4")], 8)])
_IQ2_XS = np.dtype([("d", "<f2"), ("codes_signs", "<u2", 32), ("scales", "u1", 8)])
_IQ2_S = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)])
_IQ3_XXS = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("signs_scale", "<u4", 8)])
_IQ3_S = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)])

_IQ1_DELTA = np.float32(0.125)  # all vectors of a group are moved by this, up or down


def _even_signs() -> Codes:
    """[128]: seven sign bits with the eighth added that makes their number even."""
    seven = np.arange(128, dtype=np.uint8)
    parity = seven ^ seven >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return seven | (parity & 1) << 7


_EVEN_SIGNS = _even_signs()


def _signs(sign_bytes: Codes) -> Floats:
    """[..., n] bytes, one for 8 numbers -> [..., n, 8] of 1 and -1; bit i set makes number i negative."""
    bits = np.unpackbits(sign_bytes.astype(np.uint8)[..., None], axis=-1, bitorder="little")
    return 1 - 2 * bits.astype(np.float32)


def _signs_and_scale(packed: Codes) -> tuple[Floats, Floats]:
    """[blocks, 8] u32: four times 7 sign bits, and a scale of 4 bits on top -> signs [blocks, 8, 32], scales + 1/2."""
    sevens = packed[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    return _signs(_EVEN_SIGNS[sevens]).reshape(-1, 8, 32), (packed >> 28).astype(np.float32) + np.float32(0.5)


def _low_high(packed: Codes) -> Codes:
    """[blocks, n] bytes -> [blocks, 2n]: of each byte the low four bits, then the high four."""
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1)


def _apply(blocks: Blocks, scales: Floats, numbers: Floats) -> Floats:
    """`d` times one scale for each equal group of the 256 numbers."""
    d = blocks["d"].astype(np.float32)[:, None] * scales
    return (d[..., None] * numbers.reshape(len(blocks), d.shape[1], -1)).reshape(-1, 256)


def _decode_iq2_xxs(blocks: Blocks) -> Floats:
    signs, scales = _signs_and_scale(blocks["groups"]["signs_scale"])
    vectors = codebooks.IQ2_XXS.vectors[blocks["groups"]["codes"]].reshape(-1, 8, 32)
    return _apply(blocks, scales * np.float32(0.25), vectors * signs)


def _decode_iq2_xs(blocks: Blocks) -> Floats:
    """Nine bits of code and seven of signs in a u16 (pull/4856); a scale for each 16 numbers."""
    packed = blocks["codes_signs"]
    vectors = codebooks.IQ2_XS.vectors[packed & 511]
    scales = (_low_high(blocks["scales"]) + np.float32(0.5)) * np.float32(0.25)
    return _apply(blocks, scales, vectors * _signs(_EVEN_SIGNS[packed >> 9]))


def _decode_iq2_s(blocks: Blocks) -> Floats:
    """Ten bits of code: eight in `qs`, two in `qh`; all eight signs (pull/5721)."""
    high = np.stack([blocks["qh"] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1).reshape(-1, 32)
    vectors = codebooks.IQ2_S.vectors[blocks["qs"] | high.astype(np.uint16) << 8]
    scales = (_low_high(blocks["scales"]) + np.float32(0.5)) * np.float32(0.25)
    return _apply(blocks, scales, vectors * _signs(blocks["signs"]))


def _decode_iq3_xxs(blocks: Blocks) -> Floats:
    """A code for 4 numbers, signs and scales as in IQ2_XXS (pull/5196)."""
    signs, scales = _signs_and_scale(blocks["signs_scale"])
    vectors = codebooks.IQ3_XXS.vectors[blocks["qs"]].reshape(-1, 8, 32)
    return _apply(blocks, scales * np.float32(0.5), vectors * signs)


def _decode_iq3_s(blocks: Blocks) -> Floats:
    """Nine bits of code for 4 numbers, the ninth in `qh`; all signs; odd scales 1 to 31 (pull/5676)."""
    high = np.unpackbits(blocks["qh"], axis=-1, bitorder="little")
    vectors = codebooks.IQ3_S.vectors[blocks["qs"] | high.astype(np.uint16) << 8].reshape(-1, 32, 8)
    scales = 1 + 2 * _low_high(blocks["scales"]).astype(np.float32)
    return _apply(blocks, scales, vectors * _signs(blocks["signs"]))


def _decode_iq1_s(blocks: Blocks) -> Floats:
    """Of each u16 in `qh`: three more bits for each of four codes, a scale of 3 bits, and the sign of the shift
    (pull/5453)."""
    qh = blocks["qh"]
    high = (qh[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 32)
    vectors = codebooks.IQ1.vectors[blocks["qs"] | high << 8].reshape(-1, 8, 32)
    delta = np.where(qh & 0x8000, -_IQ1_DELTA, _IQ1_DELTA).astype(np.float32)
    scales = 2 * (qh >> 12 & 7).astype(np.float32) + 1
    return _apply(blocks, scales, vectors.astype(np.float32) + delta[..., None])


def _decode_iq1_m(blocks: Blocks) -> Floats:
    """As IQ1_S, with a scale for each 16 numbers and a shift for each 8. The F16 `d` is in the top four bits of
    the four `scales`, lowest part first; each of these has four scales of 3 bits below (pull/6302)."""
    parts = blocks["scales"]
    d = (parts >> 12 << np.array([0, 4, 8, 12], np.uint16)).sum(axis=-1, dtype=np.uint16).view(np.float16)
    scales = 2 * (parts[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).astype(np.float32).reshape(-1, 16) + 1
    qh = _low_high(blocks["qh"])
    vectors = codebooks.IQ1.vectors[blocks["qs"] | (qh & 7).astype(np.uint16) << 8]
    numbers = vectors + np.where(qh & 8, -_IQ1_DELTA, _IQ1_DELTA)[..., None]
    groups = (d.astype(np.float32)[:, None] * scales)[..., None]
    return (groups * numbers.reshape(-1, 16, 16)).reshape(-1, 256)


TYPES = (
    block_type("iq2_xxs", 16, 256, _IQ2_XXS, _decode_iq2_xxs),
    block_type("iq2_xs", 17, 256, _IQ2_XS, _decode_iq2_xs),
    block_type("iq3_xxs", 18, 256, _IQ3_XXS, _decode_iq3_xxs),
    block_type("iq1_s", 19, 256, _IQ1_S, _decode_iq1_s),
    block_type("iq3_s", 21, 256, _IQ3_S, _decode_iq3_s),
    block_type("iq2_s", 22, 256, _IQ2_S, _decode_iq2_s),
    block_type("iq1_m", 29, 256, _IQ1_M, _decode_iq1_m),
)
