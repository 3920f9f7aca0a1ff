"""The I types: codes are indices into a table of values instead of the values.

The table of the 4-bit types is denser near zero, where weights are; it belongs to the format
(https://github.com/ggml-org/llama.cpp/pull/5590, IQ4_XS: pull/5747).
"""

from __future__ import annotations

import numpy as np

from caudal.quants._blocks import Blocks, Floats, block_type, nibbles

_IQ4_NL = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
_IQ4_XS = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)])

_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _decode_iq4_nl(blocks: Blocks) -> Floats:
    return blocks["d"].astype(np.float32)[:, None] * _VALUES[nibbles(blocks["qs"]).reshape(-1, 32)]


def _decode_iq4_xs(blocks: Blocks) -> Floats:
    """Eight groups of 32 with 6-bit scales, offset 32: group i has its low four bits in half a byte of
    `scales_l` and its upper two in bits 2i and 2i + 1 of `scales_h`."""
    low = np.stack((blocks["scales_l"] & 15, blocks["scales_l"] >> 4), axis=-1).reshape(-1, 8)
    high = blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | high << 4).astype(np.float32) - 32
    d = (blocks["d"].astype(np.float32)[:, None] * scales)[..., None]
    return (d * _VALUES[nibbles(blocks["qs"].reshape(-1, 8, 16)).reshape(-1, 8, 32)]).reshape(-1, 256)


TYPES = (
    block_type("iq4_nl", 20, 32, _IQ4_NL, _decode_iq4_nl),
    block_type("iq4_xs", 23, 256, _IQ4_XS, _decode_iq4_xs),
)
