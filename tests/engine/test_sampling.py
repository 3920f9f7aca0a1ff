"""The sampler: each step against its definition, distributions, independence of the batch; limits of parameters."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudal.core import InvalidRequestError, SamplingParams
from caudal.engine import sampling
from caudal.engine.sampling import ReferenceSampler, SamplerRow, philox4x32, uniform, validate
from caudal.executors.base import whole_rows

V = 50


def row(seed: int = 0, tokens: tuple[int, ...] = (1, 2, 3), num_prompt: int = 2, **params: object) -> SamplerRow:
    return SamplerRow(SamplingParams(**params), seed, list(tokens), num_prompt, end_token_ids=(0,))


def logits(seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, V).astype(np.float32)


def draws(x: np.ndarray, count: int, **params: object) -> Counter[int]:
    """How often each token is drawn, with another seed each time."""
    sampler = ReferenceSampler(len(x))
    rows = [row(seed=seed, **params) for seed in range(count)]
    tokens = sampler.sample(whole_rows(np.broadcast_to(x, (count, len(x)))), rows)
    assert all(token.error is None for token in tokens)
    return Counter(token.token_id for token in tokens)


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x.astype(np.float64) - x.max())
    return p / p.sum()


def assert_support(found: Counter[int], want: set[int]) -> None:
    assert set(found) == want


# ------------------------------------------------------------------------------------------ randomness


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [  # known answers of Random123 (Salmon et al. 2011)
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, 2**128 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0_A4093822,
            0x03707344_13198A2E_85A308D3_243F6A88,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(key: int, counter: int, words: tuple[int, ...]) -> None:
    assert philox4x32(key, counter) == words


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    numbers = np.array([uniform(seed, position) for seed in range(40) for position in range(250)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.abs(np.histogram(numbers, 20, (0, 1))[0] - 500).max() < 5 * math.sqrt(500)
    assert len(set(numbers.tolist())) == len(numbers)


def test_tokens_follow_the_distribution() -> None:
    x = logits(1, 1.5)
    count = 20_000
    found = draws(x, count, temperature=1.0)
    p = softmax(x)
    for token in range(V):
        assert abs(found[token] - count * p[token]) < 5 * math.sqrt(count * p[token] + 1)


def test_a_row_does_not_depend_on_the_others() -> None:
    sampler = ReferenceSampler(V)
    xs = np.stack([logits(i) for i in range(20)])
    rows = [row(seed=i, temperature=1.0, top_p=0.9, tokens=(1,) * (1 + i), num_prompt=1) for i in range(20)]
    together = sampler.sample(whole_rows(xs), rows)
    order = [7, 3, 19, 0, 11]
    assert [together[i] for i in order] == sampler.sample(whole_rows(xs[order]), [rows[i] for i in order])
    for i in range(20):
        assert sampler.sample(whole_rows(xs[i : i + 1]), [rows[i]]) == [together[i]]


def test_the_position_changes_the_number_and_nothing_else_does() -> None:
    a, b = row(seed=5, tokens=(1, 2)), row(seed=5, tokens=(9, 9))
    assert uniform(a.seed, a.position) == uniform(b.seed, b.position)
    assert uniform(5, 2) != uniform(5, 3) != uniform(6, 3)


# ------------------------------------------------------------------------------------------ single steps


def test_greedy_takes_the_largest_and_of_equal_ones_the_first() -> None:
    x = np.zeros(V, np.float32)
    x[[7, 11]] = 2
    assert draws(x, 3, temperature=0.0) == {7: 3}
    assert draws(x, 3, temperature=1e-6) == {7: 3}


def test_temperature_sharpens() -> None:
    x = logits(2)
    best = int(x.argmax())
    assert draws(x, 500, temperature=0.3)[best] > draws(x, 500, temperature=1.0)[best] > 0
    assert draws(x, 50, temperature=0.0001) == {best: 50}


@pytest.mark.parametrize("k", [1, 2, 5, 49, 50, 1000])
def test_top_k(k: int) -> None:
    x = logits(3, 0.1)
    assert_support(draws(x, 3000, temperature=1.0, top_k=k), set(np.argsort(-x)[:k].tolist()))


def test_top_k_of_equal_logits_keeps_the_lower_ids() -> None:
    assert_support(draws(np.zeros(V, np.float32), 500, temperature=1.0, top_k=3), {0, 1, 2})


def test_top_k_off() -> None:
    assert len(draws(np.zeros(V, np.float32), 3000, temperature=1.0, top_k=0)) == V
    assert len(draws(np.zeros(V, np.float32), 3000, temperature=1.0, top_k=-1)) == V


@pytest.mark.parametrize(("top_p", "count"), [(1e-9, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3)])
def test_top_p(top_p: float, count: int) -> None:
    x = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert_support(draws(x, 2000, temperature=1.0, top_p=top_p), set(range(count)))


def test_top_p_counts_after_top_k() -> None:
    x = np.log(np.array([0.4, 0.2, 0.2, 0.2], np.float32))
    assert_support(draws(x, 500, temperature=1.0, top_p=0.6), {0, 1})
    assert_support(draws(x, 500, temperature=1.0, top_p=0.6, top_k=2), {0})  # 0.4 of the 0.6 left


def test_min_p() -> None:
    x = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert_support(draws(x, 2000, temperature=1.0, min_p=0.25), {0, 1, 2})
    assert_support(draws(x, 500, temperature=1.0, min_p=1.0), {0})


def test_typical_p_prefers_expected_surprise_over_the_most_likely() -> None:
    p = np.array([0.3] + [0.1] * 7)
    entropy = -(p * np.log(p)).sum()
    distance = np.abs(-np.log(p) - entropy)
    assert distance[0] > 2 * distance[1]
    assert_support(draws(np.log(p).astype(np.float32), 2000, temperature=1.0, typical_p=0.35), {1, 2, 3, 4})


def test_top_n_sigma_does_not_depend_on_the_temperature() -> None:
    x = logits(5)
    want = set(np.flatnonzero(x >= x.max() - 1.5 * x.std()).tolist())
    for temperature in (1.0, 2.0):
        assert_support(draws(x, 4000, temperature=temperature, top_n_sigma=1.5), want)


def test_repetition_penalty_over_prompt_and_output() -> None:
    x = np.zeros(V, np.float32)
    x[[1, 2, 3, 4]] = [4.0, 3.9, 3.8, 3.0]
    assert draws(x, 1, temperature=0.0, repetition_penalty=1.5) == {4: 1}
    negative = np.full(V, -10, np.float32)
    negative[[1, 5]] = [-1.0, -1.2]
    assert draws(negative, 1, temperature=0.0, repetition_penalty=1.5) == {5: 1}


def test_frequency_and_presence_penalties_over_output_only() -> None:
    x = np.zeros(V, np.float32)
    x[[1, 3, 4]] = [2.0, 2.9, 2.5]
    found = draws(x, 1, temperature=0.0, presence_penalty=0.5)  # output: 3
    assert found == {4: 1}
    sampler = ReferenceSampler(V)
    twice = row(tokens=(1, 1, 1, 3, 3), num_prompt=3, temperature=0.0, frequency_penalty=0.3)
    assert sampler.sample(whole_rows(x[None]), [twice])[0].token_id == 4
    once = row(tokens=(1, 1, 1, 3), num_prompt=3, temperature=0.0, frequency_penalty=0.3)
    assert sampler.sample(whole_rows(x[None]), [once])[0].token_id == 3


def test_bias_and_exclusions() -> None:
    x = logits(6)
    order = np.argsort(-x).tolist()
    assert draws(x, 1, temperature=0.0, logit_bias=((order[9], 100.0),)) == {order[9]: 1}
    assert draws(x, 1, temperature=0.0, logit_bias=((order[0], -100.0),)) == {order[1]: 1}
    assert draws(x, 1, temperature=0.0, bad_token_ids=(order[0], order[1])) == {order[2]: 1}
    assert draws(x, 1, temperature=0.0, allowed_token_ids=(order[20], order[7])) == {order[7]: 1}
    both = draws(x, 1, temperature=0.0, allowed_token_ids=(order[7], order[20]), bad_token_ids=(order[7],))
    assert both == {order[20]: 1}


def test_a_bias_does_not_bring_excluded_tokens_back() -> None:
    x = logits(7)
    assert draws(x, 20, temperature=1.0, bad_token_ids=(4,), logit_bias=((4, 100.0),))[4] == 0


def test_min_tokens_excludes_end_tokens() -> None:
    x = logits(8)
    x[0] = 50
    sampler = ReferenceSampler(V)
    early = row(tokens=(1, 2, 3, 4), num_prompt=2, temperature=0.0, min_tokens=3)
    late = row(tokens=(1, 2, 3, 4, 5), num_prompt=2, temperature=0.0, min_tokens=3)
    assert sampler.sample(whole_rows(np.stack([x, x])), [early, late])[0].token_id != 0
    assert sampler.sample(whole_rows(np.stack([x, x])), [early, late])[1].token_id == 0


def test_bad_rows_do_not_touch_good_ones() -> None:
    xs = np.stack([logits(i) for i in range(5)])
    xs[1, 3], xs[2, 3], xs[3] = np.nan, np.inf, -np.inf
    rows = [row(temperature=1.0) for _ in range(4)] + [row(allowed_token_ids=(4,), bad_token_ids=(4,))]
    tokens = ReferenceSampler(V).sample(whole_rows(xs), rows)
    assert tokens[0].error is None
    assert ["not finite" in str(token.error) for token in tokens[1:4]] == [True] * 3
    assert "excludes every token" in str(tokens[4].error)


def test_padding_of_the_vocabulary_takes_no_part() -> None:
    x = np.zeros((1, V + 14), np.float32)
    x[0, V:] = np.nan
    token = ReferenceSampler(V).sample(whole_rows(x), [row(temperature=1.0, logprobs=20)])[0]
    assert token.error is None
    assert token.token_id < V
    assert token.logprobs is not None
    assert token.logprobs.chosen.logprob == pytest.approx(-math.log(V))


def test_logits_are_left_as_they_are() -> None:
    x = logits(9)[None].copy()
    before = x.copy()
    ReferenceSampler(V).sample(
        whole_rows(x), [row(temperature=0.7, repetition_penalty=1.3, bad_token_ids=(1,), logprobs=2)]
    )
    assert np.array_equal(x, before)


# ----------------------------------------------------------------------------------------------- logprobs


def test_logprobs_come_from_the_raw_logits() -> None:
    x = logits(10)
    log_p = np.log(softmax(x))
    token = ReferenceSampler(V).sample(
        whole_rows(x[None]), [row(temperature=0.0, logit_bias=((17, 100.0),), logprobs=4, repetition_penalty=2.0)]
    )[0]
    assert token.token_id == 17
    assert token.logprobs is not None
    assert token.logprobs.chosen.logprob == pytest.approx(log_p[17])
    assert token.logprobs.chosen.rank == 1 + int((x > x[17]).sum())
    assert [t.token_id for t in token.logprobs.top] == np.argsort(-x)[:4].tolist()


def test_ranks_of_equal_logits_follow_the_ids() -> None:
    x = np.zeros((1, V), np.float32)
    x[0, 9] = 1
    [entry] = ReferenceSampler(V).token_logprobs(whole_rows(x), [2], [4])
    assert [t.token_id for t in entry.top] == [9, 0, 1, 2]
    assert (entry.chosen.token_id, entry.chosen.rank) == (2, 4)


def test_no_top_logprobs() -> None:
    [entry] = ReferenceSampler(V).token_logprobs(whole_rows(logits()[None]), [3], [0])
    assert entry.top == ()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    scale=st.sampled_from([0.0, 0.1, 3.0, 50.0]),
    temperature=st.floats(0, 2),
    top_k=st.integers(-1, 60),
    top_p=st.floats(1e-6, 1),
    min_p=st.floats(0, 1),
    typical_p=st.floats(1e-6, 1),
    top_n_sigma=st.floats(0, 5),
    repetition_penalty=st.floats(0.01, 10),
    penalty=st.floats(-2, 2),
)
def test_every_combination_gives_a_token(seed: int, scale: float, penalty: float, **params: float) -> None:
    x = logits(seed % 97, scale)
    x[5:9] = -np.inf
    r = row(seed, presence_penalty=penalty, frequency_penalty=penalty, logprobs=5, **params)
    validate(r.params, V, 100)
    with np.errstate(all="raise", under="ignore"):
        token = ReferenceSampler(V).sample(whole_rows(x[None]), [r])[0]
    assert token.error is None
    assert 0 <= token.token_id < V
    assert x[token.token_id] > -np.inf
    assert token.logprobs is not None
    assert all(a.logprob >= b.logprob for a, b in pairwise(token.logprobs.top))


# ----------------------------------------------------------------------------------------------- limits

NAN, INF = float("nan"), float("inf")
WRONG = [
    *[("n", v) for v in (0, -1, sampling.MAX_N + 1, 1_000_000, 10**400, 1.0, True)],
    *[("max_tokens", v) for v in (0, -5, -(10**400), 1.5, NAN)],
    *[("min_tokens", v) for v in (-1, 1000, NAN)],
    *[("temperature", v) for v in (-0.1, 2.1, NAN, INF, "1")],
    *[("top_k", v) for v in (-2, 1.0, NAN)],
    *[("top_p", v) for v in (0.0, -0.1, 1.1, NAN)],
    *[("min_p", v) for v in (-0.1, 1.1, NAN)],
    *[("typical_p", v) for v in (0.0, 1.1, NAN)],
    *[("top_n_sigma", v) for v in (-1.0, NAN, INF)],
    *[("repetition_penalty", v) for v in (0.0, 1e-308, 0.009, -1.0, 101.0, 10**400, NAN, INF)],
    *[("presence_penalty", v) for v in (-2.1, 2.1, NAN)],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, NAN)],
    *[("seed", v) for v in (2**63, -(2**63) - 1, 1.5)],
    *[
        (name, v)
        for name in ("stop", "stop_token_ids", "bad_token_ids", "logit_bias")
        for v in (None, "the", 5, {1: 1.0})
    ],
    *[("logit_bias", v) for v in ((5,), ((1, 2.0, 3.0),), ("ab",))],
    *[("allowed_token_ids", v) for v in ("the", 5)],
    *[("stop", v) for v in (("",), ("x",) * 17, ("x" * 1025,), (5,))],
    *[("stop_token_ids", v) for v in ((-1,), (V,), (1.0,), (1,) * 129)],
    *[("logit_bias", v) for v in (((V, 1.0),), ((-1, 1.0),), ((1, 101.0),), ((1, NAN),), ((1, -INF),))],
    ("logit_bias", tuple((0, 1.0) for _ in range(1025))),
    *[("allowed_token_ids", v) for v in ((), (V,), (-1,), (1,) * (V + 1))],
    *[("bad_token_ids", v) for v in ((V,), (-1,), (1,) * 1025)],
    *[("logprobs", v) for v in (-1, 21, 10**5000, 1.0)],
    *[("prompt_logprobs", v) for v in (-1, 21, 10**400)],
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda v: f"{v!r:.20}" if v != 10**5000 else "huge")
def test_values_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        validate(replace(SamplingParams(), **{name: value}), V, 100)
    assert caught.value.param == name


def test_contradictions_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        validate(SamplingParams(min_tokens=5, max_tokens=4), V, 100)
    with pytest.raises(InvalidRequestError, match="leaves no token"):
        validate(SamplingParams(allowed_token_ids=(1, 2), bad_token_ids=(2, 1)), V, 100)
    with pytest.raises(InvalidRequestError, match="detokenize"):
        validate(SamplingParams(stop=("x",), detokenize=False), V, 100)


def test_the_edges_of_the_ranges_are_allowed() -> None:
    validate(SamplingParams(), V, 100)
    validate(
        SamplingParams(
            n=sampling.MAX_N,
            max_tokens=10**9,
            min_tokens=100,
            temperature=2,
            top_k=-1,
            top_p=1,
            min_p=1,
            typical_p=1e-9,
            repetition_penalty=0.01,
            presence_penalty=-2,
            frequency_penalty=2,
            seed=-(2**63),
            stop=("x" * 1024,) * 16,
            stop_token_ids=(0, V - 1),
            logit_bias=((0, -100.0), (V - 1, 100.0)),
            allowed_token_ids=tuple(range(V)),
            bad_token_ids=tuple(range(V - 1)),
            logprobs=20,
            prompt_logprobs=0,
        ),
        V,
        100,
    )
