"""A model without weights that notices every mistake in scheduling, a tokenizer of bytes, and the right answers.

The model's "keys and values" of a token are the token, its position and a hash of all tokens up to it, stored in the
slot that the batch names. A step reads the slots of every earlier position through the block table and fails if one
does not hold what that position must hold. The logits are pseudo-random numbers made from the hash of all tokens, so
one wrong token anywhere changes everything after it.
"""

from __future__ import annotations

import time

import numpy as np

from caudal.config import EngineConfig
from caudal.core import Batch, FinishReason, Request, RequestOutput, SamplingParams
from caudal.engine.engine import Engine
from caudal.engine.sampling import ReferenceSampler, SamplerRow
from caudal.executors.base import KVLayout, Logits, asked_for, whole_rows
from caudal.text.tokenizer import Tokenizer

NUM_TOKEN_IDS = 260  # bytes, then control tokens
EOS = 256
VOCAB_SIZE = 272  # padded, as real models are
_MASK = 2**64 - 1


def byte_tokenizer() -> Tokenizer:
    """Token ids 0 to 255 stand for the bytes of GPT-2's alphabet in its order; 256 ends a text."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    controls = ["<|end|>", "<|begin|>", "<|a|>", "<|b|>"]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": alphabet + controls,
            "tokenizer.ggml.token_type": [1] * 256 + [3] * 4,
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": EOS,
        }
    )


def _mix(state: int, token_id: int) -> int:
    return (state * 6364136223846793005 + (token_id + 1) * 1442695040888963407) & _MASK


def history(token_ids: list[int]) -> int:
    """Hash of a token and all before it."""
    state = 0
    for token_id in token_ids:
        state = _mix(state, token_id)
    return state


def logits_after(state: int) -> np.ndarray:
    """[VOCAB_SIZE] numbers from 0 to 8 that depend on every token so far. The padding is the largest."""
    x = np.arange(1, VOCAB_SIZE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(state)
    x = (x ^ (x >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    logits = (x >> np.uint64(40)).astype(np.float32) * np.float32(8 / 2**24)
    logits[NUM_TOKEN_IDS:] = 100
    return logits


class FakeExecutor:
    """See above. `violations` says what was wrong with the batches."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 256) -> None:
        self.kv_layout = KVLayout(block_size, num_blocks, block_size * 16, "f16")
        self.vocab_size = VOCAB_SIZE
        self.max_model_len = max_model_len
        self.remark = ""
        self.violations: list[str] = []
        self.batches: list[list[int]] = []  # tokens of each sequence, step by step
        self.max_rows = 0  # of logits in one step
        self.fail_next: Exception | None = None
        self.bad_histories: set[int] = set()  # states whose logits are NaN
        self.delay = 0.0  # seconds a step
        self.closed = False
        num_slots = num_blocks * block_size
        self._tokens = np.full(num_slots, -1, np.int64)
        self._positions = np.full(num_slots, -1, np.int64)
        self._states = np.zeros(num_slots, np.uint64)

    def run(self, batch: Batch) -> Logits:
        return asked_for(self.all_logits(batch), batch, NUM_TOKEN_IDS)

    def all_logits(self, batch: Batch) -> np.ndarray:
        if self.delay:
            time.sleep(self.delay)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        states = np.zeros(batch.num_tokens, np.uint64)
        self._check_shape(batch)
        for index in range(batch.num_sequences):
            self._run_sequence(batch, index, states)
        self.batches.append(np.diff(batch.query_start).tolist())
        self.max_rows = max(self.max_rows, len(batch.logits_rows))
        logits = np.empty((len(batch.logits_rows), VOCAB_SIZE), np.float32)
        for row, token in enumerate(batch.logits_rows):
            logits[row] = np.nan if int(states[token]) in self.bad_histories else logits_after(int(states[token]))
        return logits

    def close(self) -> None:
        self.closed = True

    @property
    def num_computed(self) -> int:
        return sum(map(sum, self.batches))

    def _run_sequence(self, batch: Batch, index: int, states: np.ndarray) -> None:
        begin, end = int(batch.query_start[index]), int(batch.query_start[index + 1])
        length = int(batch.seq_lens[index])
        start = length - (end - begin)
        places = np.arange(length)
        size = self.kv_layout.block_size
        slots = batch.block_tables[index][places // size] * size + places % size
        self._expect(
            np.array_equal(batch.slot_mapping[begin:end], slots[start:]), "slot_mapping and block_tables differ"
        )
        self._expect(np.array_equal(batch.positions[begin:end], places[start:]), "wrong positions")
        self._expect(np.array_equal(self._positions[slots[:start]], places[:start]), f"wrong keys {index=}")
        state = 0
        for token_id, stored in zip(self._tokens[slots[:start]].tolist(), self._states[slots[:start]], strict=True):
            state = _mix(state, token_id)
            self._expect(state == int(stored), "a key has another history")
        for token in range(begin, end):
            token_id = int(batch.token_ids[token])
            state = _mix(state, token_id)
            slot = slots[start + token - begin]
            self._tokens[slot], self._positions[slot], self._states[slot] = token_id, batch.positions[token], state
            states[token] = state

    def _check_shape(self, batch: Batch) -> None:
        names = [name for name in Batch.__slots__ if getattr(batch, name) is not None]
        types = {name: np.bool_ if name == "log_sums" else np.int32 for name in names}
        self._expect(all(getattr(batch, name).dtype == types[name] for name in names), "an array of another type")
        self._expect(
            all(array.flags.c_contiguous for array in (getattr(batch, name) for name in names)),
            "an array is not contiguous",
        )
        self._expect(int(batch.query_start[-1]) == batch.num_tokens == len(batch.positions), "token counts differ")
        self._expect(bool(np.all(np.diff(batch.query_start) > 0)), "a sequence without tokens")
        self._expect(bool(np.all(np.diff(batch.logits_rows) > 0)), "logits_rows do not ascend")
        self._expect(len(np.unique(batch.slot_mapping)) == batch.num_tokens, "two tokens in one slot")
        self._expect(batch.block_tables.shape[0] == len(batch.seq_lens) == len(batch.adapter_slots), "rows differ")

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)
            raise AssertionError(what)


def make_engine(executor: FakeExecutor | None = None, **config: object) -> tuple[Engine, FakeExecutor]:
    executor = executor or FakeExecutor()
    settings = EngineConfig(**({"max_num_seqs": 8, "max_num_batched_tokens": 32} | config))
    tokenizer = byte_tokenizer()
    return Engine(executor, tokenizer, settings, ReferenceSampler(tokenizer.vocab_size)), executor


def request(
    name: str, prompt: list[int], *, priority: int = 0, cache_salt: str = "", temperature: float = 0.0, **params: object
) -> Request:
    return Request(
        name,
        tuple(prompt),
        SamplingParams(temperature=temperature, **params),
        priority=priority,
        cache_salt=cache_salt,
    )


def expected(request: Request, *, max_model_len: int = 256, index: int = 0) -> list[int]:
    """The tokens that a sequence of this request must get, computed without an engine."""
    params = request.params
    tokens = list(request.prompt_token_ids)
    seed = ((params.seed or 0) + index * 0x9E3779B97F4A7C15) & _MASK
    ends = params.stop_token_ids if params.ignore_eos else (EOS, *params.stop_token_ids)
    row = SamplerRow(params, seed, tokens, len(tokens), ends)
    sampler = ReferenceSampler(NUM_TOKEN_IDS)
    limit = min(len(tokens) + (params.max_tokens or max_model_len), max_model_len)
    while len(tokens) < limit:
        token_id = sampler.sample(whole_rows(logits_after(history(tokens))[None]), [row])[0].token_id
        tokens.append(token_id)
        if token_id in ends:
            break
    return tokens[len(request.prompt_token_ids) :]


class Collected:
    """All outputs of all sequences, put together."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.texts: dict[tuple[str, int], str] = {}
        self.last: dict[tuple[str, int], RequestOutput] = {}
        self.outputs: list[RequestOutput] = []

    def add(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            key = output.request_id, output.index
            assert key not in self.last, "an output after the last one"
            self.outputs.append(output)
            self.tokens.setdefault(key, []).extend(output.token_ids)
            self.texts[key] = self.texts.get(key, "") + output.text
            assert output.num_output_tokens == len(self.tokens[key])
            if output.finish_reason is not None:
                self.last[key] = output

    def reason(self, name: str, index: int = 0) -> FinishReason | None:
        return self.last[name, index].finish_reason


def run_all(engine: Engine, collected: Collected | None = None, *, max_steps: int = 10_000) -> Collected:
    collected = collected or Collected()
    for _ in range(max_steps):
        if not engine.has_work:
            return collected
        collected.add(engine.step())
    raise AssertionError(f"not finished after {max_steps} steps: {engine.stats}")
