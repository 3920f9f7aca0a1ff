"""Every setting, in frozen dataclasses: the only source of command-line flags, their help and the docs.

A field's metadata holds `help`, `flag` where the flag is not the field's name with dashes, and `size`. Sizes in
bytes are written on the command line as 64MiB, 2GiB or plain numbers (`parse_size`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

KVType = Literal["f16", "q8"]
SpeculationMethod = Literal["off", "lookup", "draft"]
WeightsMode = Literal["auto", "packed", "mmap"]

_UNITS = (
    {"": 1, "b": 1}
    | {f"{p}{s}": 1024**i for i, p in enumerate("kmgt", 1) for s in ("", "ib")}
    | {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}
)


def parse_size(text: str) -> int:
    """Bytes from `64MiB`, `2G` (= GiB), `500MB` (= 10^6) or a plain number. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"not a size: {text!r}; write for example 64MiB, 2GiB or 1000000")
    size = float(match[1]) * _UNITS[match[2]]
    if size == math.inf:
        raise ValueError("a size beyond all bounds")
    return int(size)


def format_size(num_bytes: float) -> str:
    """Bytes as a short text in binary units, such as `93.8 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def setting(default: Any, help: str, flag: str | None = None, *, size: bool = False) -> Any:
    """A dataclass field that becomes a command-line flag; `size`: it counts bytes, read by `parse_size`."""
    return field(default=default, metadata={"help": help, "flag": flag, "size": size})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one model runs."""

    num_threads: int = setting(0, "CPU threads; 0: as many as this process may use.", "--threads")
    max_model_len: int = setting(0, "Context length in tokens; 0: the model's own, less if memory is short.", "--ctx")
    kv_cache_memory: int = setting(
        0, "Memory for keys and values, such as 64MiB; 0: chosen from the context length and free memory.", size=True
    )
    weights: WeightsMode = setting(
        "auto",
        "Where weights are: packed, copied into memory in the order of the kernels, which is fastest; or mmap, in the "
        "pages of the file, which other processes share and the system may drop, for models that hardly fit in memory. "
        "auto: packed if that fits.",
    )
    mlock: bool = setting(
        False, "Lock weights and cache in memory, so that they are never dropped or swapped out (see ulimit -l)."
    )
    kv_type: KVType = setting("f16", "How keys and values are stored: f16, or q8 for half the memory.")
    max_num_seqs: int = setting(64, "Sequences that may run at the same time.")
    max_num_batched_tokens: int = setting(512, "Tokens computed in one step, decodes and prompts together.")
    max_waiting: int = setting(4096, "Requests that may wait; more are refused.")
    prefix_caching: bool = setting(True, "Reuse the keys and values of equal prompt beginnings.")
    speculation: SpeculationMethod = setting(
        "lookup",
        "Guess tokens and check several in one step where that is faster; answers stay the same. "
        "lookup: guess from the text so far; draft: with --draft-model.",
    )
    draft_model: str | None = setting(
        None, "Small model with the same vocabulary that guesses; for --speculation draft."
    )
    num_speculative_tokens: int = setting(8, "Tokens to guess at most for one sequence in one step.")
    pin_threads: bool = setting(True, "Bind each thread to one CPU.")
    isa: str = setting("auto", "Kernels: auto, reference, avx2, avx512, neon, neon-dotprod or neon-i8mm.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the HTTP server listens."""

    host: str = setting("127.0.0.1", "Address to listen on; anything but loopback needs an API key.")
    port: int = setting(8000, "Port to listen on.")
    api_key: str | None = setting(None, "Key that clients must send as a bearer token.")
    insecure: bool = setting(False, "Listen on any address without an API key.")
    served_model_name: str | None = setting(None, "Name of the model in the API; default: its own.")
    allowed_origins: tuple[str, ...] = setting((), "Origins that browsers may call from (CORS); none by default.")
    max_request_bytes: int = setting(32 * 1024**2, "Largest accepted request body.", size=True)
    drain_timeout: float = setting(30.0, "Seconds that running requests get to finish after SIGTERM.")
