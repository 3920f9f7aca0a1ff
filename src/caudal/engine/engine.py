"""Engine: the loop of schedule, run, sample and update. One thread at a time may use it."""

from __future__ import annotations

import logging
import secrets
import time
from array import array
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

import numpy as np

from caudal.config import KVType, SpeculationMethod, WeightsMode
from caudal.core import (
    Batch,
    CaudalError,
    FinishReason,
    InvalidRequestError,
    InvalidSettingError,
    QueueFullError,
    Request,
    RequestOutput,
    RequestTooLongError,
    Sequence,
    Timings,
    TokenLogprobs,
)
from caudal.engine.blocks import BlockPool
from caudal.engine.draft_model import DraftModel
from caudal.engine.sampling import SampledToken, Sampler, SamplerRow, num_candidates, validate
from caudal.engine.scheduler import Scheduler, wants_prompt_logits
from caudal.engine.speculation import MAX_STEP_ROWS, Lookup, Speculation, Speculator
from caudal.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from caudal.config import EngineConfig
    from caudal.core import SamplingParams, TokenMatcher
    from caudal.executors.base import Executor, Logits
    from caudal.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_MASK64 = 2**64 - 1
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so the seeds of a request's sequences all differ


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and the state right now."""

    num_running: int = 0  # sequences
    num_waiting: int = 0  # sequences, preempted ones included
    kv_cache_usage: float = 0.0  # share of the blocks that sequences hold, 0 to 1
    num_steps: int = 0
    num_computed_tokens: int = 0  # rows that went through the model
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    prompt_tokens: int = 0  # of sequences that gave their first token
    generation_tokens: int = 0
    num_drafts: int = 0  # that went through the model
    num_draft_tokens: int = 0  # in these
    num_accepted_tokens: int = 0  # of these, equal to what was sampled


@dataclass(slots=True, eq=False)
class _Generation:
    """All that the engine keeps for one sequence; compared by identity."""

    seq: Sequence
    row: SamplerRow
    detokenizer: Detokenizer | None
    stop_token_ids: frozenset[int]
    max_num_tokens: int  # prompt and output
    prompt_logprobs: list[TokenLogprobs | None] | None
    num_candidates: int  # largest logits that its parameters need; 0: all
    matcher: TokenMatcher | None = None  # of the grammar that the output must follow
    speculation: Speculation | None = None  # None: gets no drafts
    mask_error: str = ""  # why there is no mask
    draft: list[int] = field(default_factory=list[int])  # behind the last token, in the step in progress
    table_row: int = -1  # in Engine._tables, while running
    num_table_entries: int = 0  # block ids written there


@dataclass(frozen=True, slots=True)
class _Step:
    """A batch, and what the rows of its logits are for."""

    batch: Batch
    samplers: dict[_Generation, int]  # those that get a token: the row, and those of their draft tokens follow
    scores: dict[_Generation, list[tuple[int, int]]]  # prompt tokens that get logprobs: (position, the row before it)


# Settings that count something: the least and the most. The most are what no machine needs and the arrays still hold.
_SETTING_RANGES = {
    "num_threads": (0, 1024),
    "max_model_len": (0, 2**31 - 1),
    "kv_cache_memory": (0, 2**62),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**20),
    "max_waiting": (0, 2**31 - 1),
    "num_speculative_tokens": (1, MAX_STEP_ROWS - 1),
}


def validate_config(config: EngineConfig) -> None:
    """Raises InvalidSettingError, which names the setting and its range."""
    for name, (least, most) in _SETTING_RANGES.items():
        value: object = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidSettingError(f"{name} must be an integer, not {value!r}")
        if value < least:
            raise InvalidSettingError(f"{name} must be at least {least}, not {value}")
        if value > most:
            raise InvalidSettingError(f"{name} must be at most {most}, not {value}")
    if config.max_model_len == 1:
        raise InvalidSettingError("max_model_len must be at least 2: one token of prompt and one of output")
    for name, kind in (("kv_type", KVType), ("speculation", SpeculationMethod), ("weights", WeightsMode)):
        value = getattr(config, name)
        if value not in get_args(kind):
            raise InvalidSettingError(f"{name} must be one of {', '.join(get_args(kind))}, not {value!r}")
    if config.speculation == "draft" and not config.draft_model:
        raise InvalidSettingError("speculation must be lookup or off without a draft_model")
    if config.draft_model and config.speculation != "draft":
        raise InvalidSettingError(f"draft_model must be given with speculation draft only, not {config.speculation}")


class Engine:
    """Serves requests with one model.

    A failure ends the sequences that it touches with `FinishReason.ERROR` and a typed error; the others go on.
    With `ignore_eos` end tokens may still be chosen, they merely do not stop the sequence (as in vLLM; llama.cpp
    excludes them).
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        config: EngineConfig,
        sampler: Sampler,
        *,
        draft_executor: Executor | None = None,
    ) -> None:
        """`draft_executor`: runs the model of the same vocabulary that guesses, with `config.speculation` draft. Both
        executors are closed with the engine. Raises InvalidSettingError."""
        validate_config(config)
        layout = executor.kv_layout
        self._executor = executor
        self._draft_executor = draft_executor
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._num_token_ids = min(tokenizer.vocab_size, executor.vocab_size)
        self._context_length = min(executor.max_model_len, config.max_model_len or executor.max_model_len)
        self._cache_tokens = layout.num_blocks * layout.block_size
        self._max_unfinished = config.max_num_seqs + config.max_waiting
        self._scheduler = Scheduler(
            BlockPool(layout.num_blocks, layout.block_size),
            max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=min(self._context_length, self._cache_tokens),
            prefix_caching=config.prefix_caching,
        )
        self._mask_thread = ThreadPoolExecutor(1, "caudal-masks")  # starts with the first grammar
        self._speculator = self._new_speculator(config)
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._generations: dict[Sequence, _Generation] = {}
        self._requests: dict[str, list[_Generation]] = {}  # the unfinished sequences of each
        self._tables = np.zeros(
            (self._scheduler.max_num_seqs, self._scheduler.pool.blocks_for(self.max_model_len)), np.int32
        )
        self._free_table_rows = list(range(len(self._tables)))
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._num_step_tokens = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together: of the context, or of the whole cache if that is smaller."""
        return self._scheduler.max_model_len

    @property
    def has_work(self) -> bool:
        return bool(self._generations)

    @property
    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.pool.usage,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
        )

    def validate(self, request: Request) -> None:
        """Check that a request can be served. Touches no mutable state: any thread may call it.

        Raises InvalidRequestError or RequestTooLongError.
        """
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequestError("the prompt is empty; it needs at least one token", "prompt")
        if len(prompt) >= self.max_model_len:  # first, as to check millions of ids takes long
            limit = f"the context length is {self._context_length} tokens"
            if self._cache_tokens < self._context_length:
                limit += f" and the whole KV cache holds {self._cache_tokens}"
            raise RequestTooLongError(
                f"the prompt has {len(prompt)} tokens and at least one more must fit, but {limit}; "
                "shorten the prompt, or give the model more context or KV cache memory",
                "prompt",
            )
        try:
            array("q", prompt)
        except (TypeError, OverflowError) as error:
            raise InvalidRequestError(f"the prompt must consist of integer token ids: {error}", "prompt") from error
        if min(prompt) < 0 or max(prompt) >= self._num_token_ids:
            wrong = next(t for t in prompt if not 0 <= t < self._num_token_ids)
            raise InvalidRequestError(
                f"the prompt contains {wrong}, which is no token id: they go from 0 to {self._num_token_ids - 1}",
                "prompt",
            )
        if request.adapter is not None:
            raise InvalidRequestError(f"there is no adapter {request.adapter!r}", "model")
        if request.matcher is not None and request.params.min_tokens > 0:
            raise InvalidRequestError(
                "min_tokens must be 0 with a grammar, which says itself when to end", "min_tokens"
            )
        validate(request.params, self._num_token_ids, self.max_model_len)
        self._check_choice(request.params)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError, RequestTooLongError or QueueFullError."""
        self.validate(request)
        params = request.params
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
        if len(self._generations) + params.n > self._max_unfinished:
            raise QueueFullError(
                f"{len(self._generations)} sequences are running or waiting, at most {self._max_unfinished} may; "
                "try again later"
            )
        seed = secrets.randbits(64) if params.seed is None else params.seed
        end_token_ids = self._end_token_ids(params)
        max_num_tokens = self.max_model_len
        if params.max_tokens is not None:
            max_num_tokens = min(max_num_tokens, len(request.prompt_token_ids) + params.max_tokens)
        generations: list[_Generation] = []
        for index in range(params.n):
            prompt_logprobs: list[TokenLogprobs | None] = [None] * len(request.prompt_token_ids)
            seq = Sequence(request, index, list(request.prompt_token_ids), len(request.prompt_token_ids))
            row = SamplerRow(
                params=params,
                seed=(seed + index * _SEED_STEP) & _MASK64,
                token_ids=seq.token_ids,
                num_prompt_tokens=seq.num_prompt_tokens,
                end_token_ids=end_token_ids,
            )
            matcher = None
            if request.matcher is not None:
                matcher = request.matcher.copy()
                row.mask = np.zeros(-(-self._num_token_ids // 32), np.uint32)
            speculator = self._speculator if params.speculate else None
            generations.append(
                _Generation(
                    seq=seq,
                    row=row,
                    detokenizer=self._new_detokenizer(params) if params.detokenize else None,
                    stop_token_ids=frozenset(end_token_ids),
                    max_num_tokens=max_num_tokens,
                    prompt_logprobs=prompt_logprobs if wants_prompt_logits(seq) else None,
                    num_candidates=0 if matcher is not None else num_candidates(params, self._num_token_ids),
                    matcher=matcher,
                    speculation=None if speculator is None else speculator.start(row),
                )
            )
        self._requests[request.request_id] = generations
        for generation in generations:
            self._generations[generation.seq] = generation
            self._scheduler.add(generation.seq)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now and free its blocks; the last outputs of its sequences. Unknown ids are ignored."""
        generations = list(self._requests.get(request_id, ()))
        return [self._finish(generation, FinishReason.ABORT) for generation in generations]

    def step(self) -> list[RequestOutput]:
        """Run one step of the scheduled sequences; what it added to those that got a token or ended."""
        plan = self._scheduler.schedule()
        for seq in self._scheduler.preempted:
            self._release_table_row(self._generations[seq])
        if not plan:
            return []
        generations = [self._generations[seq] for seq in plan]
        now = time.monotonic()
        for seq in plan:
            if seq.first_scheduled_time is None:
                seq.first_scheduled_time = now
        if self._speculator is not None:
            self._add_drafts(self._speculator, plan, generations)
        self._num_steps += 1
        self._num_step_tokens = sum(plan.values())
        self._num_computed_tokens += self._num_step_tokens
        started = time.perf_counter()
        try:
            step = self._build(plan, generations)
            masks = self._start_masks(step)
            logits = self._executor.run(step.batch)
            if masks is not None:
                masks.result()
            if len(logits) != len(step.batch.logits_rows) or logits.full.shape[1] != self._executor.vocab_size:
                raise ValueError(f"the executor returned {len(logits)} rows of {logits.full.shape[1]} logits")
        except Exception as error:  # noqa: BLE001  (whatever failed, it must not end the loop)
            _log.exception("a step with %d sequences failed", len(plan))
            return [self._fail(generation, f"the step failed: {error}") for generation in generations]
        self._scheduler.update({g.seq: plan[g.seq] - len(g.draft) for g in generations})
        outputs = self._score_prompts(step, logits) if step.scores else []
        outputs += self._extend(step, logits)
        if self._speculator is not None and self._num_step_tokens == len(logits):
            self._speculator.record(len(logits), len(logits) - len(plan), time.perf_counter() - started)
        return outputs

    def close(self) -> None:
        """Free the executors' memory. Idempotent."""
        self._mask_thread.shutdown()
        self._executor.close()
        if self._draft_executor is not None:
            self._draft_executor.close()

    # ------------------------------------------------------------------------------------- before the step

    def _end_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return params.stop_token_ids if params.ignore_eos else (*self._tokenizer.eos_ids, *params.stop_token_ids)

    def _check_choice(self, params: SamplingParams) -> None:
        """Raises InvalidRequestError if the request excludes every token while it may not end."""
        if params.min_tokens == 0:
            return  # `validate` has seen to it
        excluded = {*params.bad_token_ids, *self._end_token_ids(params)}
        if params.allowed_token_ids is None:
            is_impossible = len(excluded) >= self._num_token_ids
        else:
            is_impossible = excluded.issuperset(params.allowed_token_ids)
        if is_impossible:
            raise InvalidRequestError(
                "the request excludes every token that could come before min_tokens are reached", "min_tokens"
            )

    def _new_detokenizer(self, params: SamplingParams) -> Detokenizer:
        return Detokenizer(
            self._tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def _new_speculator(self, config: EngineConfig) -> Speculator | None:
        if config.speculation == "off":
            return None
        if config.speculation == "lookup":
            return Speculator(Lookup(), config.num_speculative_tokens)
        if self._draft_executor is None:
            raise InvalidSettingError("speculation must be lookup or off for an engine without a draft_executor")
        proposer = DraftModel(self._draft_executor, self._sampler, self._num_token_ids, config.max_num_batched_tokens)
        return Speculator(proposer, config.num_speculative_tokens)

    def _add_drafts(self, speculator: Speculator, plan: dict[Sequence, int], generations: list[_Generation]) -> None:
        """Put draft tokens behind the last tokens of sequences in the plan. If that fails, nobody needs it: the engine
        goes on without."""
        targets: list[tuple[_Generation, Speculation, int]] = []
        for generation in generations:
            seq, speculation = generation.seq, generation.speculation
            if speculation is None or seq.num_output_tokens == 0 or seq.num_computed_tokens + 1 < seq.num_tokens:
                continue
            targets.append((generation, speculation, generation.max_num_tokens - seq.num_tokens - 1))
        try:
            drafts = speculator.draft([(target, limit) for _, target, limit in targets], sum(plan.values()))
        except Exception:  # noqa: BLE001  (no request depends on it)
            _log.exception("speculation failed and is switched off")
            self._speculator = None
            return
        found = {g.seq: draft for (g, _, _), draft in zip(targets, drafts, strict=True) if draft}
        granted = self._scheduler.add_drafts(plan, {seq: len(draft) for seq, draft in found.items()})
        for seq, count in granted.items():
            self._generations[seq].draft = found[seq][:count]
        self._num_drafts += len(granted)
        self._num_draft_tokens += sum(granted.values())

    def _build(self, plan: dict[Sequence, int], generations: list[_Generation]) -> _Step:
        """The arrays of one step. Python work per sequence is constant; the rest is numpy."""
        counts = np.fromiter(plan.values(), np.int32, len(plan))
        starts = np.fromiter((seq.num_computed_tokens for seq in plan), np.int32, len(plan))
        query_start = np.zeros(len(plan) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        seq_lens = starts + counts
        token_ids: list[int] = []
        table_rows: list[int] = []
        logits_rows: list[int] = []
        candidates: list[int] = []  # of each logits row
        log_sums: list[bool] = []
        samplers: dict[_Generation, int] = {}
        scores: dict[_Generation, list[tuple[int, int]]] = {}
        num_blocks = 0
        for (seq, count), generation in zip(plan.items(), generations, strict=True):
            start = seq.num_computed_tokens
            self._write_table(generation)
            table_rows.append(generation.table_row)
            num_blocks = max(num_blocks, generation.num_table_entries)
            if wants_prompt_logits(seq):
                scored = range(start, min(start + count, seq.num_prompt_tokens - 1))
                scores[generation] = [(position + 1, len(logits_rows) + position - start) for position in scored]
                logits_rows += [len(token_ids) + position - start for position in scored]
                candidates += [0] * len(scored)
                log_sums += [False] * len(scored)
            if count == 1:
                token_ids.append(seq.token_ids[start])
            else:
                token_ids += seq.token_ids[start : start + count]
                token_ids += generation.draft
            if start + count == len(seq.token_ids) + len(generation.draft):
                samplers[generation] = len(logits_rows)
                num_rows = 1 + len(generation.draft)
                logits_rows += range(len(token_ids) - num_rows, len(token_ids))
                candidates += [0 if generation.row.excludes_end else generation.num_candidates] * num_rows
                log_sums += [seq.request.params.logprobs is not None] * num_rows
        tables = self._tables[table_rows, :num_blocks]
        in_sequence = np.repeat(np.arange(len(plan)), counts)
        positions = np.arange(len(token_ids), dtype=np.int32) + (starts - query_start[:-1])[in_sequence]
        block_size = self._scheduler.pool.block_size
        slots = tables[in_sequence, positions // block_size] * block_size + positions % block_size
        batch = Batch(
            token_ids=np.array(token_ids, np.int32),
            positions=positions,
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=tables,
            slot_mapping=slots,
            logits_rows=np.array(logits_rows, np.int32),
            adapter_slots=np.zeros(len(plan), np.int32),
            num_candidates=np.array(candidates, np.int32),
            log_sums=np.array(log_sums, np.bool_),
        )
        return _Step(batch, samplers, scores)

    def _start_masks(self, step: _Step) -> Future[None] | None:
        """Compute the masks of sequences with a grammar in another thread, while the model computes their logits."""
        constrained = [generation for generation in step.samplers if generation.matcher is not None]
        return self._mask_thread.submit(_fill_masks, constrained) if constrained else None

    def _write_table(self, generation: _Generation) -> None:
        """Bring the sequence's row of `_tables` up to date with its block table, which only grows while it runs."""
        block_table, done = generation.seq.block_table, generation.num_table_entries
        if generation.table_row < 0:
            generation.table_row = self._free_table_rows.pop()
        if done < len(block_table):
            self._tables[generation.table_row, done : len(block_table)] = block_table[done:]
            generation.num_table_entries = len(block_table)

    def _release_table_row(self, generation: _Generation) -> None:
        if generation.table_row >= 0:
            self._tables[generation.table_row, : generation.num_table_entries] = 0
            self._free_table_rows.append(generation.table_row)
            generation.table_row, generation.num_table_entries = -1, 0

    # ------------------------------------------------------------------------------------- after the step

    def _score_prompts(self, step: _Step, logits: Logits) -> list[RequestOutput]:
        """Fill in the logprobs of prompt tokens, each from the logits of the position before it. Gives the last
        outputs of those whose logits cannot be used."""
        failed: list[RequestOutput] = []
        for generation, scores in step.scores.items():
            seq = generation.seq
            token_ids = [seq.token_ids[position] for position, _ in scores]
            num_top = [seq.request.params.prompt_logprobs or 0] * len(scores)
            try:
                found = self._sampler.token_logprobs(logits.take([row for _, row in scores]), token_ids, num_top)
            except Exception as error:  # noqa: BLE001  (one request's failure, not the others')
                _log.exception("no prompt logprobs for request %s", seq.request.request_id)
                failed.append(self._fail(generation, f"prompt logprobs failed: {error}"))
                continue
            assert generation.prompt_logprobs is not None
            for (position, _), entry in zip(scores, found, strict=True):
                generation.prompt_logprobs[position] = entry
        return failed

    def _extend(self, step: _Step, logits: Logits) -> list[RequestOutput]:
        """Give each sequence its next token, and more as long as they are those of its draft."""
        outputs: list[RequestOutput] = []
        speculating = [(g, g.speculation, g.seq.num_tokens) for g in step.samplers if g.speculation is not None]
        live = {g: row for g, row in step.samplers.items() if g.seq.finish_reason is None}
        num_accepted = 0  # draft tokens of each sequence in `live`
        while live:
            following: dict[_Generation, int] = {}
            now = time.monotonic()
            if num_accepted:
                _fill_masks([generation for generation in live if generation.matcher is not None])
            for (generation, row), token in zip(live.items(), self._sample(live, logits), strict=True):
                outputs.append(self._accept(generation, token, now))
                if num_accepted < len(generation.draft) and generation.draft[num_accepted] == token.token_id:
                    self._num_accepted_tokens += 1
                    if generation.seq.finish_reason is None:
                        following[generation] = row + 1
            # The keys and values of the tokens before the next ones are in the cache: the drafts were right.
            self._scheduler.update({generation.seq: 1 for generation in following})
            live = following
            num_accepted += 1
        if self._speculator is not None:
            for generation, speculation, length in speculating:
                self._finish_draft(generation)
                self._speculator.observe(speculation, generation.seq.token_ids[length:])
        return outputs

    def _finish_draft(self, generation: _Generation) -> None:
        """The draft has been checked. Its rejected tokens leave keys and values in the cache, which the next tokens
        overwrite before anybody reads them."""
        if generation.draft and generation.seq.finish_reason is None:
            self._scheduler.drop_drafts(generation.seq)
            num_blocks = len(generation.seq.block_table)
            self._tables[generation.table_row, num_blocks : generation.num_table_entries] = 0
            generation.num_table_entries = num_blocks
        generation.draft = []

    def _sample(self, rows: dict[_Generation, int], logits: Logits) -> list[SampledToken]:
        """A token for each of these sequences, from its row of `logits`. If a batch fails, it is sampled row by row, so
        that only the guilty suffer."""
        if len(rows) < len(logits):
            logits = logits.take(list(rows.values()))
        samplers = [generation.row for generation in rows]
        try:
            return self._sampler.sample(logits, samplers)
        except Exception:  # noqa: BLE001  (it must not end the loop)
            _log.exception("sampling %d rows together failed", len(rows))
        tokens: list[SampledToken] = []
        for index, (generation, row) in enumerate(zip(rows, samplers, strict=True)):
            try:
                tokens += self._sampler.sample(logits.take([index]), [row])
            except Exception as error:  # noqa: BLE001  (one request's failure, not the others')
                _log.exception("sampling for request %s failed", generation.seq.request.request_id)
                tokens.append(SampledToken(-1, error=f"sampling failed: {error}"))
        return tokens

    def _accept(self, generation: _Generation, token: SampledToken, now: float) -> RequestOutput:
        """Append a sampled token to its sequence; ends the sequence if that stops it."""
        if token.error is not None:
            return self._fail(generation, generation.mask_error or token.error)
        seq, token_id = generation.seq, token.token_id
        is_complete = False
        if generation.matcher is not None and token_id not in generation.stop_token_ids:
            try:
                is_complete = generation.matcher.accept(token_id)
            except CaudalError as error:
                return self._fail(generation, str(error))
        seq.token_ids.append(token_id)
        if seq.first_token_time is None:
            seq.first_token_time = now
            self._prompt_tokens += seq.num_prompt_tokens
        self._generation_tokens += 1
        reason: FinishReason | None = None
        if token_id in generation.stop_token_ids:
            reason = FinishReason.STOP
            seq.stop_reason = token_id if token_id in seq.request.params.stop_token_ids else None
        elif is_complete:
            reason = FinishReason.STOP
        elif len(seq.token_ids) >= generation.max_num_tokens:
            reason = FinishReason.LENGTH
        text = ""
        if generation.detokenizer is not None:
            params = seq.request.params
            # The text of the token that ends the output is no part of it, as with stop strings.
            if token_id not in generation.stop_token_ids or params.include_stop_str_in_output:
                try:
                    output = generation.detokenizer.push((token_id,))
                except Exception as error:  # noqa: BLE001  (one request's failure, not the others')
                    _log.exception("no text for token %d of request %s", token_id, seq.request.request_id)
                    return self._fail(generation, f"detokenizing failed: {error}")
                text = output.text
                if output.stopped is not None:
                    reason, seq.stop_reason = FinishReason.STOP, output.stopped
        logprobs = () if token.logprobs is None else (token.logprobs,)
        if reason is not None:
            return self._finish(generation, reason, text=text, token_ids=(token_id,), logprobs=logprobs)
        return self._output(generation, text, (token_id,), logprobs)

    def _fail(self, generation: _Generation, message: str) -> RequestOutput:
        return self._finish(generation, FinishReason.ERROR, error=CaudalError(message))

    def _finish(
        self,
        generation: _Generation,
        reason: FinishReason,
        *,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        error: CaudalError | None = None,
    ) -> RequestOutput:
        """Forget a sequence and give its last output."""
        seq, request_id = generation.seq, generation.seq.request.request_id
        self._scheduler.finish(seq, reason)
        self._release_table_row(generation)
        if self._speculator is not None and generation.speculation is not None:
            self._speculator.forget(generation.speculation)
        del self._generations[seq]
        unfinished = self._requests[request_id]
        unfinished.remove(generation)
        if not unfinished:
            del self._requests[request_id]
        if generation.detokenizer is not None:
            text += generation.detokenizer.flush().text
        return self._output(generation, text, token_ids, logprobs, error)

    def _output(
        self,
        generation: _Generation,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        error: CaudalError | None = None,
    ) -> RequestOutput:
        seq = generation.seq
        prompt_logprobs = None
        if generation.prompt_logprobs is not None and token_ids:
            prompt_logprobs, generation.prompt_logprobs = tuple(generation.prompt_logprobs), None
        return RequestOutput(
            request_id=seq.request.request_id,
            index=seq.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            num_output_tokens=seq.num_output_tokens,
            prompt_logprobs=prompt_logprobs,
            timings=None if seq.finish_reason is None else _timings(seq),
            error=error,
        )


def _fill_masks(generations: list[_Generation]) -> None:
    """Of sequences with a grammar. Where it fails no token is allowed, and the sampler ends the sequence."""
    for generation in generations:
        assert generation.matcher is not None
        assert generation.row.mask is not None
        try:
            generation.matcher.fill(generation.row.mask)
        except CaudalError as error:
            generation.mask_error = str(error)
            generation.row.mask[:] = 0


def _timings(seq: Sequence) -> Timings:
    arrival, total = seq.request.arrival_time, time.monotonic() - seq.request.arrival_time
    return Timings(
        queued=total if seq.first_scheduled_time is None else seq.first_scheduled_time - arrival,
        first_token=0.0 if seq.first_token_time is None else seq.first_token_time - arrival,
        total=total,
    )
