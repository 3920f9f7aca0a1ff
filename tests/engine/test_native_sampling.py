"""The native sampler against the numpy reference, parameter by parameter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from caudal import _native
from caudal.core import SamplingParams
from caudal.engine.native_sampling import NativeSampler
from caudal.engine.sampling import ReferenceSampler, SamplerRow

VOCAB, IDS = 1000, 990

CASES = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=5),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9),
    SamplingParams(temperature=1.5, min_p=0.02, logprobs=0),
    SamplingParams(typical_p=0.5),
    SamplingParams(top_n_sigma=1.0),
    SamplingParams(top_k=1),
    SamplingParams(top_p=0.01),
    SamplingParams(repetition_penalty=1.3, temperature=0),
    SamplingParams(presence_penalty=1.5, frequency_penalty=-0.5, temperature=0.5),
    SamplingParams(logit_bias=((3, 100.0), (980, -100.0)), temperature=0),
    SamplingParams(allowed_token_ids=(5, 17, 900)),
    SamplingParams(bad_token_ids=tuple(range(0, 500))),
    SamplingParams(min_tokens=10, logprobs=20),
    SamplingParams(
        temperature=0.9, top_k=100, top_p=0.95, min_p=0.001, typical_p=0.97, top_n_sigma=2.5, repetition_penalty=1.1
    ),
]


@pytest.fixture(scope="module", params=["reference", "auto"])
def native(request: pytest.FixtureRequest) -> NativeSampler:
    return NativeSampler(_native.ThreadPool(2, False), request.param, IDS)


def make_rows(rng: np.random.Generator, params: SamplingParams, n: int) -> list[SamplerRow]:
    return [
        SamplerRow(params, int(rng.integers(2**63)), rng.integers(0, IDS, rng.integers(1, 60)).tolist(), 1, (7, 8))
        for _ in range(n)
    ]


@pytest.mark.parametrize("params", CASES, ids=lambda p: ",".join(f"{k}" for k in describe(p)) or "default")
def test_equals_the_reference(native: NativeSampler, params: SamplingParams) -> None:
    """The same tokens from the same uniform numbers. Float against double rounding may move a boundary now and then."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (200, VOCAB)).astype(np.float32)
    logits[:, IDS:] = 1e9  # padding of the head is never chosen
    rows = make_rows(rng, params, len(logits))
    expected = ReferenceSampler(IDS).sample(logits, rows)
    found = native.sample(logits, rows)
    same = [a.token_id == b.token_id for a, b in zip(expected, found, strict=True)]
    assert np.mean(same) >= (1.0 if params.temperature == 0 else 0.98)
    for a, b in zip(expected, found, strict=True):
        assert a.error is None
        assert b.error is None
        assert (a.logprobs is None) == (b.logprobs is None)
        if a.token_id == b.token_id and a.logprobs and b.logprobs:
            assert b.logprobs.chosen.rank == a.logprobs.chosen.rank
            assert b.logprobs.chosen.logprob == pytest.approx(a.logprobs.chosen.logprob, abs=2e-5)
            assert [t.token_id for t in b.logprobs.top] == [t.token_id for t in a.logprobs.top]
            assert [t.logprob for t in b.logprobs.top] == pytest.approx([t.logprob for t in a.logprobs.top], abs=2e-5)


def describe(params: SamplingParams) -> list[str]:
    default = SamplingParams()
    return [name for name in SamplingParams.__dataclass_fields__ if getattr(params, name) != getattr(default, name)]


def test_history_grows_with_the_sequence(native: NativeSampler) -> None:
    """Penalties see the tokens of earlier steps; the same row object comes back each step."""
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [10, 11, 12]] = [1.0, 0.9, 0.8]
    row = SamplerRow(SamplingParams(temperature=0, presence_penalty=0.5), 0, [1], 1, ())
    for expected in (10, 11, 12, 10):
        token = native.sample(logits, [row])[0].token_id
        assert token == expected
        row.token_ids.append(token)


def test_a_bad_row_does_not_touch_the_others(native: NativeSampler) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (4, VOCAB)).astype(np.float32)
    rows = make_rows(rng, SamplingParams(logprobs=2), 4)
    alone = [native.sample(logits[i : i + 1], [replace(rows[i], state=None)])[0] for i in range(4)]
    logits[1, 5] = np.nan
    rows[2].params = replace(rows[2].params, allowed_token_ids=(3,), bad_token_ids=(3,))
    found = native.sample(logits, rows)
    assert found[0] == alone[0]
    assert found[3] == alone[3]
    assert found[1].error is not None
    assert "finite" in found[1].error
    assert found[2].error is not None
    assert "excludes" in found[2].error


def test_prompt_logprobs(native: NativeSampler) -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 3, (6, VOCAB)).astype(np.float32)
    ids, tops = rng.integers(0, IDS, 6).tolist(), [0, 1, 2, 3, 20, 0]
    expected = ReferenceSampler(IDS).token_logprobs(logits, ids, tops)
    found = native.token_logprobs(logits, ids, tops)
    for a, b in zip(expected, found, strict=True):
        assert (b.chosen.token_id, b.chosen.rank) == (a.chosen.token_id, a.chosen.rank)
        assert b.chosen.logprob == pytest.approx(a.chosen.logprob, abs=2e-5)
        assert [t.token_id for t in b.top] == [t.token_id for t in a.top]


def test_bad_arguments() -> None:
    sampler = _native.BatchSampler(_native.ThreadPool(1, False), "auto", IDS)
    logits = np.zeros((2, VOCAB), np.float32)
    with pytest.raises(ValueError, match="fit"):
        sampler.sample(logits, [], [])
    with pytest.raises(ValueError, match="out of range"):
        sampler.logprobs(logits, [1, IDS], [0, 0])
    with pytest.raises(ValueError, match="out of range"):
        sampler.logprobs(logits, [1, 2], [0, -1])
    assert sampler.sample(logits[:0], [], []) == []
