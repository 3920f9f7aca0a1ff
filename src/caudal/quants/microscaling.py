"""MXFP4: 32 four-bit floats (E2M1) with a power of two as their scale.

Specification: OCP Microscaling Formats (MX) 1.0. ggml's layout: numbers i and i + 16 share a byte. Its scale
byte 255 is 2^128 like any other, not NaN.
"""

from __future__ import annotations

import numpy as np

from caudal.quants._blocks import Blocks, Floats, block_type, nibbles

_MXFP4 = np.dtype([("e", "u1"), ("qs", "u1", 16)])

# Twice the values of E2M1, which are whole numbers; the sign is the highest bit, and minus zero becomes zero.
_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _decode_mxfp4(blocks: Blocks) -> Floats:
    exponent = blocks["e"].astype(np.int32) - 128  # the bias is 127; one more because the values are doubled
    return np.ldexp(_TWICE_E2M1[nibbles(blocks["qs"]).reshape(-1, 32)], exponent[:, None])


TYPES = (block_type("mxfp4", 39, 32, _MXFP4, _decode_mxfp4),)
