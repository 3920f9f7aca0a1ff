"""The native sampler against the numpy reference, parameter by parameter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caudal import _native
from caudal.core import SamplingParams
from caudal.engine.native_sampling import NativeSampler
from caudal.engine.sampling import NOT_FINITE, ReferenceSampler, SamplerRow, num_candidates
from caudal.executors.base import asked_for, whole_rows

if TYPE_CHECKING:
    from caudal.core import Batch
    from caudal.executors.base import Logits

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
    expected = ReferenceSampler(IDS).sample(whole_rows(logits), rows)
    found = native.sample(whole_rows(logits), rows)
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


def test_masks(native: NativeSampler) -> None:
    """Another one each step; tokens that have no bit are not allowed."""
    rng = np.random.default_rng(5)
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_k=20, logprobs=2)):
        rows = make_rows(rng, params, 50)
        for words in (-(-IDS // 32), 3):
            logits = rng.normal(0, 3, (50, VOCAB)).astype(np.float32)
            for row in rows:
                row.mask = rng.integers(1, 2**32, words, np.uint32) & rng.integers(1, 2**32, words, np.uint32)
            expected = ReferenceSampler(IDS).sample(whole_rows(logits), rows)
            found = native.sample(whole_rows(logits), rows)
            for row, a, b in zip(rows, expected, found, strict=True):
                assert row.mask is not None
                assert row.mask[b.token_id // 32] >> (b.token_id % 32) & 1
                assert b.token_id == a.token_id
        for row in rows:
            row.mask = np.zeros(4, np.uint32)
        assert all(token.error for token in native.sample(whole_rows(logits), rows))


def test_history_grows_with_the_sequence(native: NativeSampler) -> None:
    """Penalties see the tokens of earlier steps; the same row object comes back each step."""
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [10, 11, 12]] = [1.0, 0.9, 0.8]
    row = SamplerRow(SamplingParams(temperature=0, presence_penalty=0.5), 0, [1], 1, ())
    for expected in (10, 11, 12, 10):
        token = native.sample(whole_rows(logits), [row])[0].token_id
        assert token == expected
        row.token_ids.append(token)


def test_a_bad_row_does_not_touch_the_others(native: NativeSampler) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (4, VOCAB)).astype(np.float32)
    rows = make_rows(rng, SamplingParams(logprobs=2), 4)
    alone = [native.sample(whole_rows(logits[i : i + 1]), [replace(rows[i], state=None)])[0] for i in range(4)]
    logits[1, 5] = np.nan
    rows[2].params = replace(rows[2].params, allowed_token_ids=(3,), bad_token_ids=(3,))
    found = native.sample(whole_rows(logits), rows)
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
    expected = ReferenceSampler(IDS).token_logprobs(whole_rows(logits), ids, tops)
    found = native.token_logprobs(whole_rows(logits), ids, tops)
    for a, b in zip(expected, found, strict=True):
        assert (b.chosen.token_id, b.chosen.rank) == (a.chosen.token_id, a.chosen.rank)
        assert b.chosen.logprob == pytest.approx(a.chosen.logprob, abs=2e-5)
        assert [t.token_id for t in b.top] == [t.token_id for t in a.top]


def test_bad_arguments() -> None:
    sampler = _native.BatchSampler(_native.ThreadPool(1, False), "auto", IDS)
    logits = np.zeros((2, VOCAB), np.float32)
    index, no_ids, no_values, no_sums = (
        np.arange(2, dtype=np.int32),
        *(np.zeros((2, 0), t) for t in ("i4", "f4")),
        np.zeros(2),
    )
    with pytest.raises(ValueError, match="fit"):
        sampler.sample(logits, index, no_ids, no_values, no_sums, [], [])
    with pytest.raises(ValueError, match="out of range"):
        sampler.logprobs(logits, index, [1, IDS], [0, 0])
    with pytest.raises(ValueError, match="out of range"):
        sampler.logprobs(logits, index, [1, 2], [0, -1])
    with pytest.raises(ValueError, match="out of range"):
        sampler.logprobs(logits, np.array([0, 2], np.int32), [1, 2], [0, 0])
    assert sampler.sample(logits, index[:0], no_ids[:0], no_values[:0], no_sums[:0], [], []) == []


# ------------------------------------------------------------------------------------------- candidates

SUFFICE = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(1, 60),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    typical_p=st.sampled_from([1.0, 0.8, 0.2]),
    logprobs=st.sampled_from([None, 0, 1, 5, 20]),
)


def candidates_of(logits: np.ndarray, rows: list[SamplerRow], extra: int = 0) -> Logits:
    """What an executor gives for the rows: no more than they ask for, but for `extra`."""
    counts = [num_candidates(row.params, IDS) for row in rows]
    batch = SimpleNamespace(
        num_candidates=np.array([k + extra if k else 0 for k in counts], np.int32),
        log_sums=np.array([row.params.logprobs is not None for row in rows]),
    )
    return asked_for(logits, cast("Batch", batch), IDS)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    params=st.lists(SUFFICE, min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    levels=st.sampled_from([2, 9, 2**20]),
    extra=st.integers(0, 3),
)
def test_candidates_give_what_whole_rows_give(
    native: NativeSampler, params: list[SamplingParams], seed: int, levels: int, extra: int
) -> None:
    """Few levels: many equal logits."""
    rng = np.random.default_rng(seed)
    logits = (rng.integers(0, levels, (len(params), VOCAB)) * (12.0 / levels)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, 5] = 0.0  # at least one is finite
    logits[:, IDS:] = 1e9
    rows = [row for p in params for row in make_rows(rng, p, 1)]
    fewer = candidates_of(logits, rows, extra)
    for sampler in (native, ReferenceSampler(IDS)):
        whole = sampler.sample(whole_rows(logits), [replace(row, state=None) for row in rows])
        found = sampler.sample(fewer, [replace(row, state=None) for row in rows])
        for a, b in zip(whole, found, strict=True):
            assert (b.token_id, b.error) == (a.token_id, a.error)
            assert (b.logprobs is None) == (a.logprobs is None)
            if a.logprobs and b.logprobs:
                assert b.logprobs.chosen.rank == a.logprobs.chosen.rank
                # The sums come from numpy here; the executor's own are compared bit by bit elsewhere.
                assert b.logprobs.chosen.logprob == pytest.approx(a.logprobs.chosen.logprob, abs=2e-5)
                assert [t.token_id for t in b.logprobs.top] == [t.token_id for t in a.logprobs.top]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_candidates_of_a_row_that_is_not_finite(native: NativeSampler, bad: float) -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, :IDS] = bad if bad < 0 else 0.0
    logits[0, 17] = bad
    rows = make_rows(np.random.default_rng(0), SamplingParams(temperature=0, logprobs=1), 2)
    for sampler in (native, ReferenceSampler(IDS)):
        found = sampler.sample(candidates_of(logits, rows), rows)
        assert found[0].error == NOT_FINITE
        assert (found[1].token_id, found[1].error) == (0, None)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=IDS),
        SamplingParams(top_k=5, top_n_sigma=1.0),
        SamplingParams(top_k=5, repetition_penalty=1.1),
        SamplingParams(top_k=5, presence_penalty=0.1),
        SamplingParams(top_k=5, frequency_penalty=0.1),
        SamplingParams(top_k=5, logit_bias=((1, 1.0),)),
        SamplingParams(top_k=5, bad_token_ids=(1,)),
        SamplingParams(top_k=5, allowed_token_ids=(1,)),
        SamplingParams(top_k=5, logprobs=20),
        SamplingParams(top_k=5, min_tokens=100),
    ],
    ids=lambda p: ",".join(describe(p)),
)
def test_too_few_candidates_are_refused(native: NativeSampler, params: SamplingParams) -> None:
    """Rather than a token that all logits would not give."""
    logits = np.random.default_rng(3).normal(0, 3, (1, VOCAB)).astype(np.float32)
    fewer = asked_for(
        logits, cast("Batch", SimpleNamespace(num_candidates=np.array([5], np.int32), log_sums=None)), IDS
    )
    for sampler in (native, ReferenceSampler(IDS)):
        with pytest.raises(ValueError, match="candidates"):
            sampler.sample(fewer, make_rows(np.random.default_rng(0), params, 1))
