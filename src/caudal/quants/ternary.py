"""The T types: 256 numbers -1, 0 or 1 with one F16 scale (https://github.com/ggml-org/llama.cpp/pull/8151)."""

from __future__ import annotations

import numpy as np

from caudal.quants._blocks import Blocks, Codes, Floats, bit_pairs, block_type

_TQ1_0 = np.dtype([("q32", "u1", 32), ("q16", "u1", 16), ("q4", "u1", 4), ("d", "<f2")])
_TQ2_0 = np.dtype([("qs", "u1", 64), ("d", "<f2")])


def _trits(packed: Codes, count: int) -> Codes:
    """[blocks, n] bytes -> [blocks, count * n]: the first trit of all bytes, then the second, ...

    A byte is the fraction 0.t1 t2 t3 t4 t5 in base 3, scaled to 256 and rounded up: times 3^i modulo 256 leaves
    the fraction after i trits, whose first trit is three times it, above the point.
    """
    powers = np.array([3**i for i in range(count)], np.uint8)[:, None]
    fractions = packed[:, None, :] * powers  # modulo 256
    return (fractions.astype(np.uint16) * 3 >> 8).reshape(len(packed), -1)


def _scaled(blocks: Blocks, codes: Codes) -> Floats:
    return blocks["d"].astype(np.float32)[:, None] * (codes.astype(np.float32) - 1)


def _decode_tq1_0(blocks: Blocks) -> Floats:
    """160 numbers in 32 bytes, 80 in 16, and 16 in 4 bytes of only four trits."""
    parts = (_trits(blocks["q32"], 5), _trits(blocks["q16"], 5), _trits(blocks["q4"], 4))
    return _scaled(blocks, np.concatenate(parts, axis=1))


def _decode_tq2_0(blocks: Blocks) -> Floats:
    return _scaled(blocks, bit_pairs(blocks["qs"].reshape(-1, 2, 32)).reshape(-1, 256))


TYPES = (
    block_type("tq1_0", 34, 256, _TQ1_0, _decode_tq1_0),
    block_type("tq2_0", 35, 256, _TQ2_0, _decode_tq2_0),
)
