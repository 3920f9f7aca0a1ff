"""Rotary positions (Su et al. 2021) and their scaling schemes: all become frequencies and one factor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from caudal.graph.program import RopeStyle

RopeScaling = Literal["none", "linear", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The first `dim` numbers of a head are rotated in pairs; pair i by position * base^(-2 i / dim).

    Llama 3's scaling is no scheme here: its files bring the divisors of the frequencies in a tensor.
    """

    base: float
    dim: int  # even
    style: RopeStyle
    scaling: RopeScaling = "none"
    factor: float = 1.0  # how many times longer the context is than in training
    original_context_length: int = 0  # tokens, in training; yarn only, and so are all below
    ext_factor: float = 1.0  # 0: interpolate all frequencies, 1: YaRN's mix
    attn_factor: float = 1.0  # extra factor of sine and cosine
    beta_fast: float = 32.0  # pairs that turn more often over the original context keep their frequency
    beta_slow: float = 1.0  # pairs that turn less often are interpolated
    log_multiplier: float = 0.0  # divides by the mscale that it gives; 0: no division

    def inv_freq(self) -> tuple[float, ...]:
        """Radians per position for each of the dim / 2 pairs, rounded to float32."""
        frequencies = self.base ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        if self.scaling == "linear":
            frequencies = frequencies / self.factor
        elif self.scaling == "yarn":
            keep = self.ext_factor * self._yarn_ramp()
            frequencies = frequencies * keep + frequencies / self.factor * (1 - keep)
        return tuple(float(f) for f in frequencies.astype(np.float32))

    def mscale(self) -> float:
        """The factor of sine and cosine, which scales q and k (YaRN's temperature)."""
        if self.scaling != "yarn" or self.ext_factor == 0:
            return self.attn_factor
        divisor = _yarn_mscale(self.factor, self.log_multiplier) if self.log_multiplier else 1.0
        return self.attn_factor * _yarn_mscale(self.factor, 1.0) / divisor

    def _yarn_ramp(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """For each pair 1 (keeps its frequency) to 0 (interpolated); section 3.2 of Peng et al. 2023."""

        def pair_that_turns(times: float) -> float:
            return self.dim * math.log(self.original_context_length / (times * 2 * math.pi)) / (2 * math.log(self.base))

        low = max(0, math.floor(pair_that_turns(self.beta_fast)))
        high = min(self.dim - 1, math.ceil(pair_that_turns(self.beta_slow)))
        ramp = (np.arange(self.dim // 2, dtype=np.float64) - low) / max(0.001, high - low)
        return 1 - np.clip(ramp, 0, 1)


def _yarn_mscale(factor: float, multiplier: float) -> float:
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0
