"""A model's hyper-parameters in one vocabulary, whatever file they came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from caudal.core import InvalidModelFileError, UnsupportedModelError
from caudal.formats import HostTensor
from caudal.graph.program import RopeStyle
from caudal.models.rope import RopeConfig

# Far above any model. They keep what is computed from a broken file's numbers small until its tensors refute them.
_MAX_WIDTH = 1 << 24
_MAX_HEAD = 1 << 14
_MAX_TOKENS = (1 << 31) - 1

# Keys that would change the results if they were overlooked: the value that means "not used", and what it is.
_UNSUPPORTED: Mapping[str, tuple[float, str]] = {
    "expert_count": (0, "mixture of experts"),
    "logit_scale": (1, "scaled logits"),
    "residual_scale": (1, "a scaled residual stream"),
    "embedding_scale": (1, "scaled embeddings"),
    "attention.scale": (0, "an attention scale of its own"),
    "attention.clamp_kqv": (0, "clamped q, k and v"),
    "attention.max_alibi_bias": (0, "ALiBi positions"),
    "attention.temperature_scale": (0, "attention temperature by position"),
    "attention.causal": (1, "attention to later tokens"),
    "attn_logit_softcapping": (0, "capped attention scores"),
    "final_logit_softcapping": (0, "capped logits"),
    "nextn_predict_layers": (0, "layers that predict several tokens"),
    "use_parallel_residual": (0, "a parallel residual stream"),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes are counts of numbers (d_*, *_dim), layers, heads or tokens."""

    arch: str
    n_layers: int
    d_model: int
    d_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's vocabulary
    norm_eps: float
    context_length: int
    rope: RopeConfig
    window: int = 0  # sliding window of attention; 0: none

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, object], tensors: Mapping[str, HostTensor], rope_style: RopeStyle
    ) -> ModelConfig:
        """From GGUF key-values. Raises InvalidModelFileError for missing or impossible values, and
        UnsupportedModelError for options that Caudal does not have.
        """
        m = _Metadata(metadata)
        for key, (neutral, what) in _UNSUPPORTED.items():
            if (value := m.number(key, neutral)) != neutral:
                raise UnsupportedModelError(
                    f"{m.arch}.{key} is {value:g}: {what} is not supported yet for {m.arch!r} models"
                )
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise InvalidModelFileError(
                "there is no matrix token_embd.weight: the file does not hold the weights of a language model"
            )
        n_layers = m.size("block_count")
        if n_layers > len(tensors):
            raise InvalidModelFileError(f"{m.arch}.block_count is {n_layers}, but the file has {len(tensors)} tensors")
        d_model, n_heads = m.size("embedding_length"), m.size("attention.head_count")
        head_dim = m.size("attention.key_length", d_model // n_heads, maximum=_MAX_HEAD)
        context_length = m.size("context_length", maximum=_MAX_TOKENS)
        return cls(
            arch=m.arch,
            n_layers=n_layers,
            d_model=d_model,
            d_ff=m.size("feed_forward_length"),
            n_heads=n_heads,
            n_kv_heads=m.size("attention.head_count_kv", n_heads),
            head_dim=head_dim,
            v_head_dim=m.size("attention.value_length", head_dim, maximum=_MAX_HEAD),
            vocab_size=embedding.shape[0],
            norm_eps=m.number("attention.layer_norm_rms_epsilon"),
            context_length=context_length,
            rope=_rope_from_gguf(m, head_dim, context_length, rope_style),
            window=m.size("attention.sliding_window", 0, minimum=0, maximum=_MAX_TOKENS),
        )


def _rope_from_gguf(m: _Metadata, head_dim: int, context_length: int, style: RopeStyle) -> RopeConfig:
    base, dim = m.number("rope.freq_base", 10000.0), m.size("rope.dimension_count", head_dim)
    if not base > 1:
        raise InvalidModelFileError(f"{m.arch}.rope.freq_base is {base}; it must be above 1")
    if dim % 2 or dim > head_dim:
        raise InvalidModelFileError(
            f"{m.arch}.rope.dimension_count is {dim}; it must be even and at most the head size {head_dim}"
        )
    factor = m.number("rope.scaling.factor", m.number("rope.scale_linear", 0.0)) or 1.0
    scaling = m.text("rope.scaling.type", "linear")
    if scaling == "none" or (scaling == "linear" and factor == 1):
        return RopeConfig(base, dim, style)
    if scaling not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{m.arch}.rope.scaling.type {scaling!r} is not supported; supported are none, linear, yarn and "
            "llama3 (as a rope_freqs tensor)"
        )
    if not factor >= 0.001:
        raise InvalidModelFileError(f"{m.arch}.rope.scaling.factor is {factor}; it must be at least 0.001")
    if scaling == "linear":
        return RopeConfig(base, dim, style, "linear", factor)
    ext_factor = m.number("rope.scaling.yarn_ext_factor", 1.0)
    rope = RopeConfig(
        base,
        dim,
        style,
        "yarn",
        factor,
        original_context_length=m.size("rope.scaling.original_context_length", context_length, maximum=_MAX_TOKENS),
        ext_factor=ext_factor if ext_factor >= 0 else 1.0,  # negative: the default
        attn_factor=m.number("rope.scaling.yarn_attn_factor", m.number("rope.scaling.attn_factor", 1.0)),
        beta_fast=m.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=m.number("rope.scaling.yarn_beta_slow", 1.0),
        log_multiplier=m.number("rope.scaling.yarn_log_multiplier", 0.0),
    )
    if min(rope.beta_fast, rope.beta_slow) <= 0 or rope.log_multiplier < 0:
        raise InvalidModelFileError(f"the YaRN betas and log multiplier in {m.arch}.rope.scaling must be positive")
    return rope


class _Metadata:
    """Checked access to the keys of one architecture; keys are given without its name in front."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.arch = str(metadata.get("general.architecture"))

    def _get(self, key: str, default: object) -> object:
        value = self._metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise InvalidModelFileError(f"the metadata lack {self.arch}.{key}")
        if not isinstance(value, list):
            return value
        values = {*cast("list[object]", value)}  # one for each layer
        if len(values) != 1:
            raise UnsupportedModelError(
                f"{self.arch}.{key} has {len(values)} different values over the layers; one for all is supported so far"
            )
        return values.pop()

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            raise InvalidModelFileError(f"{self.arch}.{key} is {value!r}; it must be a finite number")
        return float(value)

    def size(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_WIDTH) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise InvalidModelFileError(
                f"{self.arch}.{key} is {value!r}; it must be a whole number from {minimum} to {maximum}"
            )
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise InvalidModelFileError(f"{self.arch}.{key} is {value!r}; it must be a text")
        return value
