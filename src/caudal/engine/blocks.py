"""BlockPool: who holds which block of the KV cache, and which blocks hold a known prefix.

Metadata only; the storage belongs to the executor. Standard library only. Every operation costs O(1) for
each block that it is given.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def root_hash(adapter: str | None, cache_salt: str) -> int:
    """The parent of a first block: prefixes are shared only under the same adapter and salt."""
    name = "" if adapter is None else f"adapter {adapter}"
    digest = hashlib.sha256(f"{len(name)} {name}{cache_salt}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest, "little")


def block_hash(parent: int, token_ids: Sequence[int]) -> int:
    """Chained hash of one full block. SHA-256, so that no prompt can be made to collide with another's cache
    (CVE-2025-25183 was such a collision)."""
    data = parent.to_bytes(32, "little") + array("q", token_ids).tobytes()
    return int.from_bytes(hashlib.sha256(data).digest(), "little")


@dataclass(slots=True)
class Block:
    """One block's metadata."""

    id: int
    num_references: int = 0  # block tables that hold it; 0: free
    hash: int | None = None  # set while its content can be found again


class BlockPool:
    """All blocks. A block is either free or referenced by one or more block tables.

    A free block keeps its hash, and so its content can be found again, until it is allocated anew. Blocks
    without a hash are allocated first, then the least recently used ones.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: num_blocks={num_blocks}, block_size={block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free = OrderedDict[int, None].fromkeys(range(num_blocks))  # in the order of reuse
        self._by_hash: dict[int, int] = {}  # hash -> block id

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def find(self, hash: int) -> int | None:
        """The block with that content, free or not."""
        return self._by_hash.get(hash)

    def is_free(self, block_id: int) -> bool:
        return self._blocks[block_id].num_references == 0

    def num_references(self, block_id: int) -> int:
        """Block tables that hold it."""
        return self._blocks[block_id].num_references

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks to write to; they forget what they held. The caller checks `num_free`."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken: list[int] = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            block = self._blocks[block_id]
            self._forget(block)
            block.num_references = 1
            taken.append(block_id)
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these blocks, found by their hashes, to read them."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.num_references == 0:
                del self._free[block_id]
            block.num_references += 1

    def release(self, block_table: Sequence[int]) -> None:
        """Drop one reference to each block of a table. Ends are reused before beginnings, which more prompts share."""
        for block_id in reversed(block_table):
            block = self._blocks[block_id]
            assert block.num_references > 0, f"block {block_id} is already free"
            block.num_references -= 1
            if block.num_references == 0:
                self._free[block_id] = None
                if block.hash is None:
                    self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, hash: int) -> None:
        """Make a full, computed block findable; from now on nobody may write to it. A block that holds what
        another already offers stays private."""
        block = self._blocks[block_id]
        assert block.num_references > 0, f"block {block_id} is free"
        if block.hash is None and hash not in self._by_hash:
            block.hash = hash
            self._by_hash[hash] = block_id

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """Make the content of these blocks unfindable, because it may be wrong."""
        for block_id in block_ids:
            self._forget(self._blocks[block_id])

    def _forget(self, block: Block) -> None:
        if block.hash is not None:
            del self._by_hash[block.hash]
            block.hash = None
