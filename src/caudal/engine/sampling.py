"""From logits to tokens: the limits of SamplingParams, the Sampler protocol and its numpy reference.

The steps, in order; a neutral parameter switches a step off:

1. Log-probabilities, where asked for, come from the raw logits (log-softmax, before any other step). Ranks count
   from 1, equal logits by token id.
2. Tokens outside `allowed_token_ids` and a grammar's mask, in `bad_token_ids`, and end tokens before `min_tokens` are
   excluded.
3. `logit_bias` is added.
4. Penalties: repetition (Keskar et al. 2019) over prompt and output; frequency and presence (OpenAI) over output.
5. Temperature below 1e-5: the largest logit wins, of equal ones the lowest token id. Otherwise divide by it.
6. `top_n_sigma`: keep logits within n standard deviations of the largest (Tang et al. 2024).
7. `min_p`: keep tokens with at least that share of the largest probability.
8. `top_k`: keep the k largest, of equal ones those with lower ids.
9. `typical_p` (Meister et al. 2023): keep the tokens whose surprise is nearest to the entropy, until they sum to it.
10. `top_p` (Holtzman et al. 2020): keep the most likely tokens until they sum to it.
11. Choose: u is a uniform number; the first kept token, in the order of ids, at which the running sum of
    probabilities exceeds u times their sum.

u comes from Philox4x32-10 (Salmon et al. 2011) with the seed as key and the position of the new token as counter,
so a result depends neither on the other requests in the batch nor on how often a sequence was preempted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from caudal.core import InvalidRequestError, Logprob, SamplingParams, TokenLogprobs
from caudal.executors.base import MAX_CANDIDATES, log_sum_exp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from caudal.executors.base import Logits

GREEDY_TEMPERATURE = 1e-5  # below it: greedy
NOT_FINITE = "the model's logits are not finite numbers"

MAX_N = 128
MAX_LOGPROBS = 20
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # beyond, logits overflow or nothing more changes
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_TOKEN_IDS = 1024


# ------------------------------------------------------------------------------------------ validation


def _check_number(
    name: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    above: bool = False,
    integer: bool = False,
) -> None:
    """Raise unless low <= value <= high (low < value with `above`). NaN and infinity never pass."""
    kinds = (int,) if integer else (int, float)
    kind = "an integer" if integer else "a number"
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be {kind}, got {_shown(value)}", name)
    # Not math.isfinite, which fails for integers that no float can hold.
    if not ((low < value if above else low <= value) and value <= high and value != math.inf):
        at_least = f"more than {low:g}" if above else f"at least {low:g}"
        at_most = f" and at most {high:g}" if high != math.inf else ""
        raise InvalidRequestError(f"{name} must be {at_least}{at_most}, got {_shown(value)}", name)


def _shown(value: object) -> str:
    """A value of any size in a message. Python refuses to write integers of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def _check_collection(name: str, value: object) -> None:
    """Raise unless it is a tuple or the like. A text would be taken for its characters."""
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise InvalidRequestError(f"{name} must be a tuple, got {type(cast(object, value)).__name__}", name)


def _check_token_ids(name: str, token_ids: Collection[object], vocab_size: int, limit: int) -> None:
    _check_collection(name, token_ids)
    if len(token_ids) > limit:
        raise InvalidRequestError(f"{name} may have at most {limit} entries, got {len(token_ids)}", name)
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{name} contains {_shown(token_id)}, which is no token id: they go from 0 to {vocab_size - 1}", name
            )


def validate(params: SamplingParams, vocab_size: int, max_model_len: int) -> None:
    """Check every field against its range; `vocab_size` counts the tokenizer's token ids.

    A `max_tokens` beyond the context length is allowed: generation then ends there.

    Raises InvalidRequestError, which names the field.
    """
    _check_number("n", params.n, 1, MAX_N, integer=True)
    if params.max_tokens is not None:
        _check_number("max_tokens", params.max_tokens, 1, integer=True)
    _check_number("min_tokens", params.min_tokens, 0, params.max_tokens or max_model_len, integer=True)
    _check_number("temperature", params.temperature, 0, 2)
    _check_number("top_k", params.top_k, -1, integer=True)
    _check_number("top_p", params.top_p, 0, 1, above=True)
    _check_number("min_p", params.min_p, 0, 1)
    _check_number("typical_p", params.typical_p, 0, 1, above=True)
    _check_number("top_n_sigma", params.top_n_sigma, 0)
    _check_number("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    _check_number("presence_penalty", params.presence_penalty, -2, 2)
    _check_number("frequency_penalty", params.frequency_penalty, -2, 2)
    if params.seed is not None:
        _check_number("seed", params.seed, -(2**63), 2**63 - 1, integer=True)
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None:
            _check_number(name, value, 0, min(MAX_LOGPROBS, vocab_size), integer=True)
    _validate_stops(params, vocab_size)
    _validate_token_sets(params, vocab_size)


def _validate_stops(params: SamplingParams, vocab_size: int) -> None:
    _check_collection("stop", params.stop)
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop may have at most {MAX_STOP_STRINGS} strings, got {len(params.stop)}", "stop")
    for text in cast("tuple[object, ...]", params.stop):
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"each stop string must have 1 to {MAX_STOP_LENGTH} characters, got {str(text)[:40]!r}", "stop"
            )
    if params.stop and not params.detokenize:
        raise InvalidRequestError("stop strings need detokenize=True; use stop_token_ids without it", "stop")
    _check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size, MAX_STOP_TOKEN_IDS)


def _validate_token_sets(params: SamplingParams, vocab_size: int) -> None:
    _check_collection("logit_bias", params.logit_bias)
    for entry in cast("Collection[object]", params.logit_bias):
        if not isinstance(entry, tuple) or len(cast("tuple[object, ...]", entry)) != 2:
            raise InvalidRequestError("logit_bias must consist of pairs (token id, bias)", "logit_bias")
    _check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], vocab_size, MAX_LOGIT_BIAS)
    for _, bias in params.logit_bias:
        _check_number("logit_bias", bias, -100, 100)
    _check_token_ids("bad_token_ids", params.bad_token_ids, vocab_size, MAX_BAD_TOKEN_IDS)
    if params.allowed_token_ids is not None:
        _check_token_ids("allowed_token_ids", params.allowed_token_ids, vocab_size, vocab_size)
        if set(params.allowed_token_ids) <= set(params.bad_token_ids):
            raise InvalidRequestError("allowed_token_ids leaves no token that may be chosen", "allowed_token_ids")


# ----------------------------------------------------------------------------------------- the protocol


@dataclass(slots=True)
class SamplerRow:
    """One sequence, as the sampler sees it. The same object comes back each step while the sequence lives."""

    params: SamplingParams
    seed: int  # 0 .. 2^64 - 1; the params' own, or a fresh one; differs between the n sequences of a request
    token_ids: list[int]  # prompt and output so far; the sequence's own list, which grows
    num_prompt_tokens: int
    end_token_ids: tuple[int, ...]  # excluded while fewer than params.min_tokens have come out
    mask: NDArray[np.uint32] | None = None  # bit i % 32 of word i / 32: token i may come next; None: all
    state: object | None = None  # whatever the sampler keeps for this sequence

    @property
    def position(self) -> int:
        """Where the new token will stand, counted from 0."""
        return len(self.token_ids)

    @property
    def excludes_end(self) -> bool:
        """Whether end tokens may not be chosen yet."""
        return len(self.token_ids) - self.num_prompt_tokens < self.params.min_tokens and bool(self.end_token_ids)


def num_candidates(params: SamplingParams, num_token_ids: int) -> int:
    """How many of the largest logits decide the token and its logprobs, once end tokens may be chosen; 0: all
    logits count."""
    if (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.logit_bias
        or params.bad_token_ids
        or params.allowed_token_ids is not None
    ):
        return 0
    needed = 1
    if params.temperature >= GREEDY_TEMPERATURE:
        if params.top_n_sigma > 0 or not 0 < params.top_k < num_token_ids:
            return 0
        needed = params.top_k
    needed = max(needed, min(params.logprobs or 0, num_token_ids))
    return needed if needed <= MAX_CANDIDATES else 0


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None  # if params.logprobs is set
    error: str | None = None  # why no token could be chosen; token_id means nothing then


class Sampler(Protocol):
    """Chooses the next tokens of a whole batch, each row on its own. Made for a number of token ids: columns of
    the logits beyond it (padding) do not take part."""

    def sample(self, logits: Logits, rows: list[SamplerRow]) -> list[SampledToken]:
        """One token for each row of the logits, which are left as they are; whole rows and candidates give the same.
        A row with NaN or without a token that may be chosen gives an `error`, the others are not affected.

        Raises ValueError if a row has fewer candidates than its parameters need (`num_candidates`).
        """
        ...

    def token_logprobs(self, logits: Logits, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        """The log-softmax of each row at one token id [R], and at its `num_top` [R] best ones.

        Raises ValueError if a row is not finite, or not whole.
        """
        ...


# ---------------------------------------------------------------------------------------- the reference


def philox4x32(key: int, counter: int) -> tuple[int, int, int, int]:
    """Philox4x32-10: four random 32-bit words from a 64-bit key and a 128-bit counter (little-endian words)."""
    mask = 0xFFFFFFFF
    k0, k1 = key & mask, key >> 32 & mask
    c0, c1, c2, c3 = (counter >> shift & mask for shift in (0, 32, 64, 96))
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & mask, p0 >> 32 ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1) with 53 random bits: words 0 (high) and 1 (low) of Philox."""
    high, low, _, _ = philox4x32(seed, position)
    return ((high << 32 | low) >> 11) * 2.0**-53


class ReferenceSampler:
    """The plain implementation in double precision; the native one is tested against it."""

    def __init__(self, num_token_ids: int) -> None:
        self._num_token_ids = num_token_ids

    def sample(self, logits: Logits, rows: list[SamplerRow]) -> list[SampledToken]:
        return [self._sample_row(*self._row(logits, i, row), row) for i, row in enumerate(rows)]

    def token_logprobs(self, logits: Logits, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        if (logits.full_index < 0).any():
            raise ValueError("a row of logits is not whole")
        whole = logits.full[logits.full_index, : self._num_token_ids]
        if not np.isfinite(whole.max(axis=1)).all():
            raise ValueError(NOT_FINITE)
        return [
            _token_logprobs(x, log_sum_exp(x.astype(np.float64)), token_id, k)
            for x, token_id, k in zip(whole, token_ids, num_top, strict=True)
        ]

    def _row(self, logits: Logits, index: int, row: SamplerRow) -> tuple[NDArray[np.float32], float | None]:
        """A row's logits and, unless it is whole, its log-sum-exp. What is not among its candidates becomes minus
        infinity, as the parameters exclude it anyhow."""
        if logits.full_index[index] >= 0:
            return logits.full[logits.full_index[index], : self._num_token_ids], None
        ids = logits.candidate_ids[index]
        ids = ids[ids >= 0]
        x = np.full(self._num_token_ids, -math.inf, np.float32)
        x[ids] = logits.candidate_values[index, : len(ids)]
        if (len(ids) and not 0 < num_candidates(row.params, self._num_token_ids) <= len(ids)) or row.excludes_end:
            raise ValueError("a row has too few candidates for its parameters")
        return x, float(logits.log_sums[index])

    def _sample_row(self, logits: NDArray[np.float32], log_sum: float | None, row: SamplerRow) -> SampledToken:
        if not math.isfinite(logits.max()):  # NaN, infinity, or nothing but minus infinity
            return SampledToken(-1, error=NOT_FINITE)
        x = logits.astype(np.float64)
        _exclude(x, row)
        if x.max() == -math.inf:
            return SampledToken(-1, error="the request excludes every token that the model could choose")
        for token_id, bias in row.params.logit_bias:
            x[token_id] += bias
        _penalize(x, row)
        if row.params.temperature < GREEDY_TEMPERATURE:
            token_id = int(x.argmax())
        else:
            token_id = _draw(x / row.params.temperature, row)
        if row.params.logprobs is None:
            return SampledToken(token_id)
        if log_sum is None:
            log_sum = log_sum_exp(logits.astype(np.float64))
        return SampledToken(token_id, _token_logprobs(logits, log_sum, token_id, row.params.logprobs))


def _exclude(x: NDArray[np.float64], row: SamplerRow) -> None:
    params = row.params
    if params.allowed_token_ids is not None:
        allowed = np.zeros(len(x), np.bool_)
        allowed[list(params.allowed_token_ids)] = True
        x[~allowed] = -math.inf
    if row.mask is not None:
        bits = np.unpackbits(row.mask.view(np.uint8), count=len(x), bitorder="little")  # what is missing is 0
        x[bits == 0] = -math.inf
    x[list(params.bad_token_ids)] = -math.inf
    if row.excludes_end:
        x[list(row.end_token_ids)] = -math.inf


def _penalize(x: NDArray[np.float64], row: SamplerRow) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(row.token_ids)
        x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
    output = row.token_ids[row.num_prompt_tokens :]
    if output and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
        seen, counts = np.unique(output, return_counts=True)
        x[seen] -= params.frequency_penalty * counts + params.presence_penalty


def _draw(x: NDArray[np.float64], row: SamplerRow) -> int:
    params = row.params
    kept = np.flatnonzero(x > -math.inf)  # ids, ascending
    x = x[kept]
    peak = x.max()
    if params.top_n_sigma > 0:
        keep = x >= peak - params.top_n_sigma * x.std()
        kept, x = kept[keep], x[keep]
    if params.min_p > 0:
        keep = x >= peak + math.log(params.min_p)
        kept, x = kept[keep], x[keep]
    if 0 < params.top_k < len(x):
        keep = np.sort(np.argsort(-x, kind="stable")[: params.top_k])
        kept, x = kept[keep], x[keep]
    if params.typical_p < 1:
        log_p = x - log_sum_exp(x)
        p = np.exp(log_p)
        entropy = -float(np.sum(p * log_p))
        keep = _smallest_set(np.argsort(np.abs(-log_p - entropy), kind="stable"), p, params.typical_p)
        kept, x = kept[keep], x[keep]
    if params.top_p < 1:
        p = np.exp(x - log_sum_exp(x))
        keep = _smallest_set(np.argsort(-p, kind="stable"), p, params.top_p)
        kept, x = kept[keep], x[keep]
    sums = np.cumsum(np.exp(x - peak))
    index = int(np.searchsorted(sums, uniform(row.seed, row.position) * float(sums[-1]), side="right"))
    return int(kept[min(index, len(kept) - 1)])


def _smallest_set(order: NDArray[np.intp], p: NDArray[np.float64], mass: float) -> NDArray[np.intp]:
    """The first indices of `order` whose probabilities sum to at least `mass`, ascending."""
    count = int(np.searchsorted(np.cumsum(p[order]), mass, side="left")) + 1
    return np.sort(order[:count])


def _token_logprobs(logits: NDArray[np.float32], log_sum: float, token_id: int, num_top: int) -> TokenLogprobs:
    x = logits.astype(np.float64)
    log_p = x - log_sum
    rank = 1 + int(np.count_nonzero(x > x[token_id])) + int(np.count_nonzero(x[:token_id] == x[token_id]))
    chosen = Logprob(token_id, float(log_p[token_id]), rank)
    # All at least as large as the k-th largest, so that ties are broken by id and not by the partition.
    threshold = np.partition(x, len(x) - num_top)[len(x) - num_top] if num_top else math.inf
    best = np.flatnonzero(x >= threshold)
    best = best[np.argsort(-x[best], kind="stable")][:num_top]
    ids: list[int] = best.tolist()
    top = tuple(Logprob(i, float(log_p[i]), rank) for rank, i in enumerate(ids, 1))
    return TokenLogprobs(chosen, top)
