"""The plain data that passes between the parts: requests, sequences, batches, outputs and typed errors.

Nothing here imports the rest of Caudal, and nothing heavy: `import caudal.core` costs milliseconds.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# ---------------------------------------------------------------------------------------------- errors


class CaudalError(Exception):
    """Base of every error that Caudal raises on purpose. The message says what is wrong and what to do."""


class ModelNotFoundError(CaudalError):
    """No such file, folder or store name."""


class DownloadError(CaudalError):
    """A model could not be fetched: no network, no such package, no space, or not the bytes that were expected."""


class InvalidModelFileError(CaudalError):
    """The bytes are not a valid model file: bad magic, truncated, impossible counts or offsets."""


class UnsupportedModelError(CaudalError):
    """A valid file that needs something Caudal does not have: an architecture, tensor type, tokenizer or option."""


class InvalidSettingError(CaudalError):
    """A setting out of its range."""


class InsufficientMemoryError(CaudalError):
    """The model or its KV cache does not fit; the message has the numbers."""


class InvalidRequestError(CaudalError):
    """A request that can never be served as asked; `param` names the offending field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLongError(InvalidRequestError):
    """Prompt plus requested tokens exceed the context length or the whole KV cache."""


class QueueFullError(CaudalError):
    """The engine has too many waiting requests; try again later."""


class EngineDeadError(CaudalError):
    """The engine thread has stopped; nothing more can be served."""


# -------------------------------------------------------------------------------------------- requests


class FinishReason(enum.Enum):
    """Why a sequence ended. The values are OpenAI's words where OpenAI has one."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # cancelled, or its client went away
    ERROR = "error"  # its own fault or a failure inside the engine; `RequestOutput.error` says which


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()  # lost its blocks; will be recomputed from its tokens
    FINISHED = enum.auto()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, with vLLM's names and neutral defaults (a neutral value switches a step off).

    `engine.sampling.validate` checks ranges and raises `InvalidRequestError`.
    """

    n: int = 1
    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output (Keskar et al. 2019)
    presence_penalty: float = 0.0  # over output only, as OpenAI defines it
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: a fresh one for each request
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] = ()  # never chosen
    logprobs: int | None = None  # None: none; k: the chosen token and the k best, of the raw logits
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    speculate: bool = True  # False: one token a step, even if the engine speculates; the output is the same


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must look like."""

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str  # the schema as JSON; the expression; the choices as a JSON list of texts; the grammar
    param: str  # the field of the request that it came in, for errors


class TokenMatcher(Protocol):
    """A compiled grammar at one place of an output (`text.grammar.Matcher`)."""

    def copy(self) -> TokenMatcher:
        """The same place, from which another sequence goes on."""
        ...

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Write which tokens may come next: bit i % 32 of word i / 32. Raises CaudalError."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on behind a token; whether nothing may follow it. Raises CaudalError."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked, as token ids. Immutable; one request becomes `params.n` sequences."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0  # lower runs first
    adapter: str | None = None  # name of a LoRA adapter
    cache_salt: str = ""  # requests share cached prefixes only under the same salt
    matcher: TokenMatcher | None = None  # of the grammar that every output must follow
    arrival_time: float = field(default_factory=time.monotonic)  # seconds, monotonic clock


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation's mutable state. Owned by the scheduler; compared by identity."""

    request: Request
    index: int  # 0 .. params.n - 1
    token_ids: list[int]  # prompt and output
    num_prompt_tokens: int
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache
    num_cached_tokens: int = 0  # of those, found there at first admission (prefix hit)
    block_table: list[int] = field(default_factory=list[int])
    block_hashes: list[int] = field(default_factory=list[int])  # of the full blocks, chained
    status: SequenceStatus = SequenceStatus.WAITING
    adapter_slot: int = 0  # 0: base model
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it
    first_scheduled_time: float | None = None  # seconds, monotonic clock
    first_token_time: float | None = None
    num_preemptions: int = 0
    order: int = 0  # of arrival among all sequences; set by the scheduler

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(slots=True)
class Batch:
    """The flat arrays of one step: S sequences with T new tokens in all, R of which need logits.

    Tokens of one sequence are adjacent and in order. Slots address single tokens of the KV cache:
    slot = block id * block size + offset in the block.
    """

    token_ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T]
    query_start: NDArray[np.int32]  # [S + 1]: tokens of sequence s are query_start[s] .. query_start[s + 1]
    seq_lens: NDArray[np.int32]  # [S]: cached tokens and new ones together
    block_tables: NDArray[np.int32]  # [S, B], rows padded with 0
    slot_mapping: NDArray[np.int32]  # [T]
    logits_rows: NDArray[np.int32]  # [R]: ascending indices into the T tokens
    adapter_slots: NDArray[np.int32]  # [S]
    # [R]: how many of a row's largest logits suffice, up to executors.base.MAX_CANDIDATES; 0: the whole row is
    # needed. None: all rows whole.
    num_candidates: NDArray[np.int32] | None = None
    # [R]: whether the row's log-sum-exp is needed beside its candidates. None: nowhere.
    log_sums: NDArray[np.bool_] | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Logprob:
    token_id: int
    logprob: float  # natural logarithm
    rank: int  # 1: the most likely


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token at one position and the most likely ones, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from the arrival of the request to three moments of one of its sequences."""

    queued: float = 0.0  # its first step; where there was none, its end
    first_token: float = 0.0  # 0: none came
    total: float = 0.0  # its end


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to one sequence of a request. Deltas, never the whole text again.

    `text` may lag behind `token_ids`: half a character or a possible stop string is held back. The last
    output of a sequence has a `finish_reason`; the request is done when all its `n` sequences are.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # so far
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # on the first output; None for token 0
    timings: Timings | None = None  # on the last output
    error: CaudalError | None = None
