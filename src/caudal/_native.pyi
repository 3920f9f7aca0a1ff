"""Caudal's native core."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

class ThreadPool:
    """Pinned threads; the caller of a step is one of them."""

    def __init__(self, num_threads: int, pin: bool = True) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def num_benched(self) -> int:
        """Threads left out because their CPU is taken by others."""

class Norm:
    """
    A norm in front of another op; heads of `head_dim`, or the whole row if 0.
    """

    def __init__(self, kind: str, weight: int, eps: float, bias: int = -1, head_dim: int = 0) -> None: ...

class Linear:
    """One matrix of a linear phase, or a gated pair; see exec/model.h."""

    def __init__(
        self,
        weight: int,
        out: int,
        bias: int = -1,
        residual: int = -1,
        up_weight: int = -1,
        up_bias: int = -1,
        act: str = "silu",
    ) -> None: ...

class Model:
    """
    A model lowered to phases; see exec/model.h. Build in order, then finish(), then run().
    """

    def __init__(self, pool: ThreadPool, isa: str, packed_bytes: int) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def num_phases(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def kv_block_bytes(self) -> int: ...
    def add_weight(
        self,
        type: int,
        rows: int,
        cols: int,
        data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        pack: bool,
        release_source: bool = False,
    ) -> int:
        """
        release_source: drop the pages of a packed weight's source; only for mapped files.
        """

    def add_vector(
        self, data: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> int: ...
    def add_value(self, width: int, logits_row: bool) -> int: ...
    def add_rope_table(
        self,
        inv_freq: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        mscale: float,
    ) -> int: ...
    def embed(self, weight: int, out: int) -> None: ...
    def linear(self, input: int, linears: Sequence[Linear], norm: Norm | None = None) -> None: ...
    def attention(
        self,
        *,
        q: int,
        k: int,
        v: int,
        out: int,
        layer: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        scale: float,
        window: int,
        softcap: float,
        q_rope: int,
        k_rope: int,
        rope_style: str,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        sinks: int = -1,
        slopes: int = -1,
    ) -> None: ...
    def head(
        self, input: int, weight: int, bias: int, norm: Norm | None, scale: float, softcap: float, num_ids: int
    ) -> None:
        """
        The end: logits, of which run() gives what is asked for; see exec/model.h.
        """

    def select_rows(self, input: int, out: int) -> None: ...
    def add(self, a: int, b: int, out: int) -> None: ...
    def mul(self, a: int, b: int, out: int) -> None: ...
    def scale(self, a: int, out: int, by: float) -> None: ...
    def softcap(self, a: int, out: int, cap: float) -> None: ...
    def glu(self, gate: int, up: int, out: int, act: str) -> None: ...
    def slice(self, a: int, out: int, start: int) -> None: ...
    def norm(self, a: int, out: int, norm: Norm) -> None: ...
    def rope(self, a: int, out: int, table: int, style: str, head_dim: int) -> None: ...
    def finish(
        self, output: int | None, kv_type: str, num_blocks: int, kv_layers: Sequence[tuple[int, int, int]]
    ) -> None:
        """output: none after head()."""

    def lock_memory(self) -> None:
        """
        Keep weights and cache in memory; raises OSError where the system refuses.
        """

    def run(
        self,
        token_ids: NDArray[numpy.int32],
        positions: NDArray[numpy.int32],
        query_start: NDArray[numpy.int32],
        seq_lens: NDArray[numpy.int32],
        block_tables: NDArray[numpy.int32],
        slot_mapping: NDArray[numpy.int32],
        logits_rows: NDArray[numpy.int32],
        num_candidates: NDArray[numpy.int32] | None = None,
        log_sums: NDArray[numpy.bool_] | None = None,
    ) -> tuple[
        NDArray[numpy.float32],
        NDArray[numpy.int32],
        NDArray[numpy.int32],
        NDArray[numpy.float32],
        NDArray[numpy.float64],
    ]:
        """
        One step; the fields of executors.base.Logits, which are valid until the next call.
        """

def instruction_sets() -> list[str]:
    """Names that Model accepts on this CPU."""

def packed_bytes(type: int, rows: int, cols: int) -> int:
    """Bytes of a weight in the packed layout; 0 if its type has none."""

def has_type(type: int) -> bool: ...
def kv_block_bytes(kv_type: str, layers: Sequence[tuple[int, int, int]]) -> int:
    """Bytes of one cache block over layers of (kv heads, k dim, v dim)."""

def decode_rows(
    type: int,
    rows: int,
    cols: int,
    data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
    isa: str,
    out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
) -> None:
    """Dequantizes rows into `out` [rows, cols]."""

class SequenceSampling:
    """One sequence's sampling parameters and token history."""

    def __init__(
        self,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        typical_p: float,
        top_n_sigma: float,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        seed: int,
        num_prompt_tokens: int,
        num_logprobs: int,
        bias_ids: Sequence[int],
        bias_values: Sequence[float],
        allowed: Sequence[int] | None = None,
        banned: Sequence[int],
        early_banned: Sequence[int],
        min_tokens: int,
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the token history, which penalties read."""

    def set_mask(
        self, mask: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> None:
        """Which tokens may come next: bit i % 32 of word i / 32."""

class BatchSampler:
    """Samples the rows of a step; see sample/sampler.h for the steps."""

    def __init__(self, pool: ThreadPool, isa: str, num_token_ids: int) -> None: ...
    def sample(
        self,
        full: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        full_index: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        candidate_ids: Annotated[
            NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        candidate_values: Annotated[
            NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        log_sums: Annotated[NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        sequences: Sequence[SequenceSampling],
        positions: Sequence[int],
    ) -> list[tuple[int, str, tuple[float, int, list[tuple[int, float]]] | None]]: ...
    def logprobs(
        self,
        full: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        full_index: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        tokens: Sequence[int],
        num_top: Sequence[int],
    ) -> list[tuple[int, str, tuple[float, int, list[tuple[int, float]]] | None]]: ...
