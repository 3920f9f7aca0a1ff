"""How the native executor divides memory: where weights are, how long a context and how large a cache may be."""

from __future__ import annotations

from dataclasses import dataclass

from caudal.config import EngineConfig, format_size
from caudal.core import InsufficientMemoryError
from caudal.executors.lowering import MemoryNeed

BLOCK_SIZE = 32  # tokens; kKvBlock of the native core
_DEFAULT_SEQUENCES = 4  # of full length that the cache holds unless told otherwise; pages are used as they fill
_RESERVE = 256 << 20  # bytes left to the rest of the process and the system
_MAX_BLOCKS = (2**31 - 1) // BLOCK_SIZE  # their slots are numbered by int32
_MIN_PACKED_CONTEXT = 1024  # tokens; packed weights that leave room for less are not worth it
_MMAP_CACHE_SHARE = 4  # beside weights in the file's pages, the cache gets this part of memory: pages serve all tokens


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What fits. The cache may be larger than one sequence of the longest context, or smaller where that was not
    asked for."""

    pack: bool  # weights are copied in the order of the kernels, rather than used where they lie in the file
    max_model_len: int  # tokens
    num_blocks: int
    remark: str = ""  # for people, where the plan is not the usual one


def plan_memory(
    config: EngineConfig, need: MemoryNeed, *, context_length: int, available: int, reserve: int = 0
) -> MemoryPlan:
    """context_length: the model's. available: bytes that are free, of which `reserve` are promised to others.

    Raises InsufficientMemoryError.
    """
    free = max(0, available - reserve - _RESERVE)
    # Blocks of a program without attention take no memory; the arithmetic below wants some.
    block_bytes = max(1, need.kv_block)
    wanted = config.max_model_len or context_length
    blocks_per_sequence = -(-wanted // BLOCK_SIZE)
    if config.kv_cache_memory:
        least = config.kv_cache_memory // block_bytes
        if least == 0:
            raise InsufficientMemoryError(
                f"one block of {BLOCK_SIZE} tokens takes {format_size(block_bytes)} of cache, "
                f"more than --kv-cache-memory {format_size(config.kv_cache_memory)}"
            )
    elif config.max_model_len:
        least = blocks_per_sequence
    elif config.weights == "packed":
        least = 1
    else:
        least = min(blocks_per_sequence, _MIN_PACKED_CONTEXT // BLOCK_SIZE)
    fits = need.weights + least * block_bytes <= free
    pack = config.weights == "packed" or (config.weights == "auto" and (fits or config.mlock))
    resident = need.weights if pack or config.mlock else 0
    if not config.kv_cache_memory and not config.max_model_len:
        least = 1
    if resident + least * block_bytes > free:
        raise InsufficientMemoryError(_refusal(config, need, wanted, least * block_bytes, resident, free))
    num_blocks = least
    if not config.kv_cache_memory:
        room = max(free - need.weights, 0 if resident else free // _MMAP_CACHE_SHARE)
        num_blocks = max(least, min(_DEFAULT_SEQUENCES * blocks_per_sequence, room // block_bytes))
    num_blocks = min(num_blocks, _MAX_BLOCKS)
    if not config.max_model_len:
        wanted = min(wanted, num_blocks * BLOCK_SIZE)
    remark = ""
    if not pack:
        remark = "weights are used where they lie in the file (mmap mode)"
        if config.weights == "auto":
            remark += (
                f": {format_size(need.weights)} packed do not fit beside a cache in the {format_size(free)} that are "
                "free. Slower, the more so the less of the file stays in memory; --weights packed refuses instead"
            )
    return MemoryPlan(pack, wanted, num_blocks, remark)


def _refusal(config: EngineConfig, need: MemoryNeed, wanted: int, cache: int, resident: int, free: int) -> str:
    if config.kv_cache_memory:
        what = f"a cache of {format_size(cache)} (--kv-cache-memory)"
    elif config.max_model_len:
        what = f"a cache of {format_size(cache)} for a context of {wanted} tokens"
    else:
        what = f"one block of cache of {format_size(cache)}"
    ways: list[str] = []
    if resident and not config.mlock:
        ways.append("leave weights in the file's pages (--weights mmap)")
    elif config.mlock:
        ways.append("do without --mlock")
    if config.kv_cache_memory:
        ways.append("ask for a smaller cache (--kv-cache-memory)")
    elif config.max_model_len:
        ways.append("ask for a shorter context (--ctx)")
    if config.kv_type != "q8":
        ways.append("halve the cache (--kv-type q8)")
    ways.append("use a smaller model")
    weights = f"the weights need {format_size(resident)} and " if resident else ""
    return f"{weights}{what} does not fit in the {format_size(free)} that are free; {', or '.join(ways)}"
