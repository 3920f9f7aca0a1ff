"""Metadata to ModelConfig, and the rotary frequencies."""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudal.core import CaudalError, InvalidModelFileError, UnsupportedModelError
from caudal.models import build_program
from caudal.models.config import ModelConfig
from caudal.models.rope import RopeConfig
from tiny import arrays, checkpoint, metadata, model


def config(arch: str = "llama", **changes: object) -> ModelConfig:
    return build_program(model(arch, **changes))[0]


def test_all_keys():
    c = config(attention__sliding_window=12)
    assert c == ModelConfig(
        arch="llama",
        n_layers=2,
        d_model=24,
        d_ff=40,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        v_head_dim=8,
        vocab_size=64,
        norm_eps=1e-5,
        context_length=256,
        rope=RopeConfig(10000.0, 8, "norm"),
        window=12,
    )


def test_defaults():
    read = ModelConfig.from_gguf(
        metadata(
            attention__key_length=None,
            attention__value_length=None,
            attention__head_count_kv=None,
            rope__freq_base=None,
        ),
        model().tensors,
        "norm",
    )
    assert (read.head_dim, read.v_head_dim, read.n_kv_heads, read.rope.base, read.rope.dim) == (6, 6, 4, 10000.0, 6)


def test_rope_style_follows_the_architecture():
    styles = {arch: config(arch).rope.style for arch in ("llama", "mistral", "qwen2", "qwen3")}
    assert styles == {"llama": "norm", "mistral": "norm", "qwen2": "neox", "qwen3": "neox"}


def test_equal_values_for_all_layers():
    c = config(attention__head_count_kv=[2, 2], feed_forward_length=[40, 40])
    assert (c.n_kv_heads, c.d_ff) == (2, 40)


REFUSED = {
    "different kv heads": ({"attention.head_count_kv": [2, 1]}, UnsupportedModelError, "head_count_kv has 2 different"),
    "experts": ({"expert_count": 8}, UnsupportedModelError, "expert_count is 8: mixture of experts"),
    "scaled residual": ({"residual_scale": 0.5}, UnsupportedModelError, "residual_scale"),
    "bidirectional": ({"attention.causal": False}, UnsupportedModelError, r"attention\.causal"),
    "longrope": ({"rope.scaling.type": "longrope"}, UnsupportedModelError, "'longrope' is not supported.*yarn"),
    "no layers": ({"block_count": 0}, InvalidModelFileError, "block_count is 0"),
    "too many layers": ({"block_count": 4_000_000_000}, InvalidModelFileError, "block_count"),
    "more layers than tensors": ({"block_count": 1000}, InvalidModelFileError, "block_count is 1000"),
    "missing": ({"embedding_length": None}, InvalidModelFileError, r"lack llama\.embedding_length"),
    "negative": ({"attention.head_count": -4}, InvalidModelFileError, "head_count is -4"),
    "text for a size": ({"context_length": "long"}, InvalidModelFileError, "context_length is 'long'"),
    "float for a size": ({"context_length": 256.0}, InvalidModelFileError, "context_length"),
    "bool for a size": ({"context_length": True}, InvalidModelFileError, "context_length"),
    "eps not finite": ({"attention.layer_norm_rms_epsilon": math.nan}, InvalidModelFileError, "epsilon is nan"),
    "groups": ({"attention.head_count_kv": 3}, InvalidModelFileError, "attn_k.weight|groups"),
    "head size": ({"attention.key_length": 10}, InvalidModelFileError, r"attn_q\.weight .*ask for \[40, 24\]"),
    "enormous head": ({"attention.key_length": 1 << 24}, InvalidModelFileError, "key_length is 16777216"),
    "rope base": ({"rope.freq_base": 1.0}, InvalidModelFileError, "freq_base"),
    "odd rope": ({"rope.dimension_count": 7}, InvalidModelFileError, "dimension_count is 7"),
    "rope beyond head": ({"rope.dimension_count": 10}, InvalidModelFileError, "dimension_count is 10"),
    "rope factor": ({"rope.scaling.factor": -2.0}, InvalidModelFileError, "factor is -2"),
    "rope type": ({"rope.scaling.type": 3}, InvalidModelFileError, "type is 3"),
    "yarn beta": ({"rope.scaling.type": "yarn", "rope.scaling.yarn_beta_slow": 0.0}, InvalidModelFileError, "YaRN"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refused(fault: str):
    changes, error, message = REFUSED[fault]
    with pytest.raises(error, match=message):
        config(**{name.replace(".", "__"): value for name, value in changes.items()})


@pytest.mark.parametrize(
    "key",
    [
        "logit_scale",
        "residual_scale",
        "embedding_scale",
        "attention.scale",
        "attention.clamp_kqv",
        "attention.max_alibi_bias",
        "attention.temperature_scale",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ],
)
def test_numbers_that_change_the_results_are_never_overlooked(key: str):
    with pytest.raises(UnsupportedModelError, match=rf"llama\.{key} is 0.25"):
        config(**{key.replace(".", "__"): 0.25})


KEYS = [
    *(name.removeprefix("llama.") for name in metadata() if name.startswith("llama.")),
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "attention.sliding_window",
]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 64),
    st.floats(width=32),
    st.sampled_from(["", "yarn", "linear", "none"]),
    st.lists(st.integers(0, 40), max_size=3),
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4))
def test_any_metadata_is_accepted_or_refused_with_a_typed_error(changes: dict[str, object]):
    opened = checkpoint(arrays(), metadata(**{key.replace(".", "__"): value for key, value in changes.items()}))
    with suppress(CaudalError):
        build_program(opened)


# ------------------------------------------------------------------------------------------------ rope


def test_plain_frequencies():
    rope = RopeConfig(500000.0, 16, "norm")
    expected = [np.float32(500000.0 ** (-2 * i / 16)) for i in range(8)]
    assert rope.inv_freq() == tuple(map(float, expected))
    assert rope.mscale() == 1.0


def test_partial_rotation():
    c = config(rope__dimension_count=6)
    assert c.rope.inv_freq() == RopeConfig(10000.0, 6, "norm").inv_freq()
    assert len(c.rope.inv_freq()) == 3


@pytest.mark.parametrize("key", ["rope__scaling__factor", "rope__scale_linear"])
def test_linear_scaling(key: str):
    c = config(**{key: 4.0})
    assert c.rope.scaling == "linear"
    np.testing.assert_allclose(np.array(c.rope.inv_freq()) * 4, RopeConfig(10000.0, 8, "norm").inv_freq(), rtol=1e-7)


def test_scaling_none_ignores_the_factor():
    assert config(rope__scaling__type="none", rope__scaling__factor=4.0).rope == RopeConfig(10000.0, 8, "norm")


def yarn(**changes: float) -> RopeConfig:
    return RopeConfig(1e6, 128, "neox", "yarn", 4.0, original_context_length=32768, **changes)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones():
    """By the wavelength of each pair, as section 3.2 of Peng et al. (2023) defines it."""
    plain = np.array(RopeConfig(1e6, 128, "neox").inv_freq())
    ratio = np.array(yarn().inv_freq()) / plain
    turns = 32768 * plain / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > 40], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 0.8], 0.25, rtol=1e-6)
    between = ratio[(turns < 30) & (turns > 1.1)]
    assert np.all(np.diff(between) < 0)
    assert np.all((between > 0.25) & (between < 1))
    # The ramp is linear in the pair's number.
    keep = (between - 0.25) / 0.75
    np.testing.assert_allclose(np.diff(keep), np.diff(keep)[0], rtol=1e-4)


def test_yarn_temperature():
    assert yarn().mscale() == pytest.approx(0.1 * math.log(4) + 1)
    assert yarn(attn_factor=2.0).mscale() == pytest.approx(2 * (0.1 * math.log(4) + 1))
    assert yarn(log_multiplier=1.0).mscale() == pytest.approx(1.0)
    assert yarn(ext_factor=0.0, attn_factor=1.5).mscale() == 1.5


def test_yarn_without_mix_is_linear():
    plain = np.array(RopeConfig(1e6, 128, "neox").inv_freq())
    np.testing.assert_allclose(np.array(yarn(ext_factor=0.0).inv_freq()) * 4, plain, rtol=1e-6)


def test_yarn_from_metadata():
    scaling = {
        "type": "yarn",
        "factor": 8.0,
        "original_context_length": 64,
        "yarn_ext_factor": -1.0,
        "yarn_attn_factor": 0.5,
        "yarn_beta_fast": 16.0,
        "yarn_beta_slow": 2.0,
        "yarn_log_multiplier": 0.7,
    }
    c = config(**{f"rope__scaling__{name}": value for name, value in scaling.items()})
    assert c.rope == RopeConfig(10000.0, 8, "norm", "yarn", 8.0, 64, 1.0, 0.5, 16.0, 2.0, 0.7)
    assert config(rope__scaling__type="yarn", rope__scaling__factor=2.0).rope.original_context_length == 256
