"""Weights packed and where they lie in the file: the same bits, no copy, shared or locked pages, changing files."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from batches import Part, build, run_chunks

from caudal import _native
from caudal.config import EngineConfig
from caudal.core import InsufficientMemoryError, InvalidModelFileError
from caudal.executors.lowering import mapping, memory_need
from caudal.executors.native import NativeExecutor
from caudal.formats import open_checkpoint
from caudal.models import build_program
from conftest import shared_dir

QUANTIZED = sorted(path.name for path in shared_dir("golden", "quant").glob("*.gguf"))
CONFIG = EngineConfig(num_threads=2, pin_threads=False, max_model_len=256)
IN_PLACE = replace(CONFIG, weights="mmap")


def quantized(name: str) -> Path:
    return shared_dir("golden", "quant", name)


def some_logits(executor: NativeExecutor) -> list[np.ndarray]:
    """Prompts at once and in pieces, and several sequences together, so that every kernel has its turn."""
    ids = np.random.default_rng(0).integers(5, executor.vocab_size, 130).tolist()
    together = [Part(ids[:n], 0, [4 + n]) for n in (1, 2, 3)]
    return [
        run_chunks(executor, ids, [0, 1, 2, 3, 4], 130),
        run_chunks(executor, ids[:20], [3], 1),
        run_chunks(executor, ids[:40], [1, 3], 9),
        executor.run(build(together, executor.kv_layout.block_size)).full.copy(),
    ]


@pytest.mark.parametrize("isa", [_native.instruction_sets()[-1], "reference"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_same_bits(name: str, isa: str):
    results = []
    for config in (CONFIG, IN_PLACE, replace(IN_PLACE, num_threads=1)):
        with closing(NativeExecutor(open_checkpoint(quantized(name)), replace(config, isa=isa))) as executor:
            results.append(some_logits(executor))
    for in_place in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], in_place, strict=True))
    assert np.isfinite(results[0][0]).all()


def test_tensors_that_are_no_mapped_file_may_be_used_where_they_lie():
    checkpoint = open_checkpoint(quantized("Q4_K_M.gguf"))
    copies = {name: replace(t, data=t.data.copy()) for name, t in checkpoint.tensors.items()}
    assert all(mapping(t.data) is None for t in copies.values())
    executors = [NativeExecutor(replace(checkpoint, tensors=copies), config) for config in (CONFIG, IN_PLACE)]
    del copies
    packed, in_place = (some_logits(executor) for executor in executors)
    assert all(np.array_equal(a, b) for a, b in zip(packed, in_place, strict=True))


def test_short_memory_chooses_the_mode_and_says_so(monkeypatch: pytest.MonkeyPatch):
    checkpoint = open_checkpoint(quantized("Q8_0.gguf"))
    need = memory_need(build_program(checkpoint)[1], checkpoint, "f16")
    cache = 8 * need.kv_block
    for missing, remark in ((0, ""), (1, "mmap mode")):
        free = (256 << 20) + need.weights + cache - missing
        monkeypatch.setattr("caudal.executors.native.available_memory", lambda free=free: free)
        with closing(NativeExecutor(checkpoint, CONFIG)) as executor:
            assert remark in executor.remark
            assert bool(executor.remark) == bool(missing)
            assert executor.kv_layout.num_blocks >= 8


# ---------------------------------------------------------------------------------------------- pages


class FilePages:
    """What /proc/self/smaps says about the mappings of one file, in KiB."""

    def __init__(self, path: Path) -> None:
        self.numbers: dict[str, int] = {}
        inside = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            words = line.split()
            if not words[0].endswith(":"):
                inside = words[-1] == str(path)
            elif inside and words[-1] == "kB":
                name = words[0].rstrip(":")
                self.numbers[name] = self.numbers.get(name, 0) + int(words[1])

    def __getitem__(self, name: str) -> int:
        return self.numbers.get(name, 0)


def anonymous() -> int:
    """Bytes of this process's memory that are no pages of files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    """A model that no other test maps."""
    return Path(shutil.copy(quantized("Q8_0.gguf"), tmp_path / "model.gguf"))


needs_linux = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")


@needs_linux
def test_packed_weights_leave_no_pages_of_the_file_but_those_of_the_embedding(own_file: Path):
    checkpoint = open_checkpoint(own_file)
    with closing(NativeExecutor(checkpoint, CONFIG)) as executor:
        some_logits(executor)
        embedding = checkpoint.tensors["token_embd.weight"].data.nbytes
        assert FilePages(own_file)["Rss"] * 1024 < embedding + checkpoint.num_bytes / 4


_CHILD = """
import sys, time
from contextlib import closing
sys.path[:0] = sys.argv[2:]
from test_weights import IN_PLACE, NativeExecutor, open_checkpoint, some_logits
from pathlib import Path
with closing(NativeExecutor(open_checkpoint(Path(sys.argv[1])), IN_PLACE)) as executor:
    some_logits(executor)
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_process(own_file: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that uses the model where it lies."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", _CHILD, str(own_file), str(here), str(here.parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.communicate("")


@needs_linux
def test_processes_share_the_pages_of_weights_in_the_file(own_file: Path, other_process: subprocess.Popen[str]):
    checkpoint = open_checkpoint(own_file)
    before = anonymous()
    with closing(NativeExecutor(checkpoint, IN_PLACE)) as executor:
        some_logits(executor)
        pages = FilePages(own_file)
        # All weights are there, none was written to, and each page counts half, for it has two users.
        assert pages["Rss"] * 1024 >= checkpoint.num_bytes
        assert pages["Private_Dirty"] == 0
        assert pages["Pss"] <= 0.55 * pages["Rss"]
        assert anonymous() - before < (16 << 20)
    assert other_process.poll() is None


# ---------------------------------------------------------------------------------------------- locked


@needs_linux
@pytest.mark.parametrize("config", [CONFIG, IN_PLACE], ids=["packed", "mmap"])
def test_locked_memory(own_file: Path, config: EngineConfig):
    checkpoint = open_checkpoint(own_file)
    need = memory_need(build_program(checkpoint)[1], checkpoint, "f16")

    def locked() -> int:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmLck"].split()[0]) * 1024

    before = locked()
    try:
        executor = NativeExecutor(checkpoint, replace(config, mlock=True))
    except InsufficientMemoryError as error:
        pytest.skip(str(error))
    with closing(executor):
        cache = executor.kv_layout.num_blocks * need.kv_block
        assert locked() - before >= need.weights + cache
        in_file = FilePages(own_file)["Locked"] * 1024
        assert in_file >= (need.weights if config is IN_PLACE else checkpoint.tensors["token_embd.weight"].data.nbytes)
        assert np.isfinite(some_logits(executor)[0]).all()


def test_a_limit_below_what_must_be_locked_is_an_error_with_advice(own_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("caudal.executors.native.lockable_memory", lambda: 64 << 10)
    with pytest.raises(InsufficientMemoryError, match=r"the limit is 64.0 KiB.*ulimit -l.*CAP_IPC_LOCK"):
        NativeExecutor(open_checkpoint(own_file), replace(CONFIG, mlock=True))


_NO_LOCK = """
import os, resource, sys
from dataclasses import replace
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import caudal.executors.native as native
from test_weights import CONFIG, open_checkpoint
native.lockable_memory = lambda: 1 << 40  # so that the system is asked
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
if os.getuid() == 0:  # root has the capability
    os.setuid(65534)
try:
    native.NativeExecutor(open_checkpoint(Path(sys.argv[1])), replace(CONFIG, mlock=True))
except native.InsufficientMemoryError as error:
    print(error)
"""


def test_a_refusal_of_the_system_to_lock_is_an_error_with_advice():
    here = Path(__file__).parent
    # A file that other users may read.
    command = [sys.executable, "-c", _NO_LOCK, str(quantized("Q8_0.gguf")), str(here), str(here.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Permission" in done.stderr:
        pytest.skip("another user may not read the model")
    assert "the system refused to lock" in done.stdout, done.stderr
    assert "ulimit -l" in done.stdout


# ---------------------------------------------------------------------------------------------- files that change


@pytest.mark.parametrize("config", [CONFIG, IN_PLACE], ids=["packed", "mmap"])
def test_a_file_cut_short_ends_requests_and_not_the_process(own_file: Path, config: EngineConfig):
    checkpoint = open_checkpoint(own_file)
    batch = build([Part([5, 6, 7], 0, [0])], 32)
    with closing(NativeExecutor(checkpoint, config)) as executor:
        before = executor.run(batch).full.copy()
        content = own_file.read_bytes()
        os.truncate(own_file, len(content) - mmap.PAGESIZE)
        with pytest.raises(InvalidModelFileError, match=r"model\.gguf: the file was cut short"):
            executor.run(batch)
        with pytest.raises(InvalidModelFileError, match="cut short"):
            NativeExecutor(checkpoint, config)
        own_file.write_bytes(content)
        assert np.array_equal(executor.run(batch).full, before)


def test_a_file_replaced_by_name_does_not_matter(own_file: Path):
    batch = build([Part([5, 6, 7], 0, [0])], 32)
    with closing(NativeExecutor(open_checkpoint(own_file), IN_PLACE)) as executor:
        before = executor.run(batch).full.copy()
        (own_file.parent / "new").write_bytes(b"something else")
        (own_file.parent / "new").replace(own_file)
        assert np.array_equal(executor.run(batch).full, before)
