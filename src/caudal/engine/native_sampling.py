"""The Sampler in native code: the rows of a step on the threads of the executor's pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caudal import _native
from caudal.core import Logprob, TokenLogprobs
from caudal.engine.sampling import SampledToken, SamplerRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from caudal.executors.base import Logits

_Logprobs = tuple[float, int, list[tuple[int, float]]]  # logprob, rank, best tokens


class NativeSampler:
    """Implements `engine.sampling.Sampler`, which says what each step does."""

    def __init__(self, pool: _native.ThreadPool, isa: str, num_token_ids: int) -> None:
        """The pool's threads must not be busy during calls: the engine's one thread uses both."""
        self._sampler = _native.BatchSampler(pool, isa, num_token_ids)
        self._num_token_ids = num_token_ids

    def sample(self, logits: Logits, rows: list[SamplerRow]) -> list[SampledToken]:
        """Raises ValueError where candidates do not suffice."""
        states = [self._state(row) for row in rows]
        results = self._sampler.sample(
            logits.full,
            logits.full_index,
            logits.candidate_ids,
            logits.candidate_values,
            logits.log_sums,
            states,
            [len(row.token_ids) for row in rows],
        )
        return [
            SampledToken(token_id, None if found is None else _to_logprobs(token_id, found), error or None)
            for token_id, error, found in results
        ]

    def token_logprobs(self, logits: Logits, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Raises ValueError where logits are not finite, or not whole."""
        found: list[TokenLogprobs] = []
        results = self._sampler.logprobs(logits.full, logits.full_index, list(token_ids), list(num_top))
        for token_id, error, logprobs in results:
            if error or logprobs is None:
                raise ValueError(error)
            found.append(_to_logprobs(token_id, logprobs))
        return found

    def _state(self, row: SamplerRow) -> _native.SequenceSampling:
        state = row.state
        if not isinstance(state, _native.SequenceSampling):
            row.state = state = self._new_state(row)
        if row.mask is not None:
            state.set_mask(row.mask)
        params = row.params
        if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            state.extend(row.token_ids[state.num_tokens :])
        return state

    def _new_state(self, row: SamplerRow) -> _native.SequenceSampling:
        params = row.params
        banned = list(params.bad_token_ids)
        return _native.SequenceSampling(
            temperature=params.temperature,
            top_k=min(max(params.top_k, 0), self._num_token_ids),
            top_p=params.top_p,
            min_p=params.min_p,
            typical_p=params.typical_p,
            top_n_sigma=params.top_n_sigma,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=row.seed,
            num_prompt_tokens=row.num_prompt_tokens,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            bias_ids=[token_id for token_id, _ in params.logit_bias],
            bias_values=[bias for _, bias in params.logit_bias],
            allowed=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
            banned=banned,
            early_banned=[*banned, *row.end_token_ids],
            min_tokens=params.min_tokens,
        )


def _to_logprobs(token_id: int, found: _Logprobs) -> TokenLogprobs:
    logprob, rank, top = found
    best = tuple(Logprob(other, value, place) for place, (other, value) in enumerate(top, 1))
    return TokenLogprobs(Logprob(token_id, logprob, rank), best)
