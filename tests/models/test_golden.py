"""Whole models against logits of llama.cpp and transformers, on every executor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from caudal.core import UnsupportedModelError
from caudal.executors.base import Executor
from caudal.executors.driver import run_tokens, sequence_batch
from caudal.formats import open_checkpoint
from caudal.models import build_program
from caudal.quants import all_types
from conftest import shared_dir
from executor_cases import ExecutorCase, each_executor, fast_executors, nmse

GOLDEN = shared_dir("golden")
LENGTHS = (1, 9, 70)
CHUNKS = {"whole": (), "by 7": (7,), "by 1": (1,), "33 and 2": (33, 2)}

ARCHITECTURES = ("gguf/llama", "gguf/mistral", "gguf/qwen2", "gguf/qwen3", "hf/llama", "hf/qwen3")
QUANTIZED = sorted(path.stem for path in (GOLDEN / "quant").glob("*.gguf"))
TYPES_OF_QUANTIZED: dict[str, dict[str, dict[str, object]]] = json.loads((GOLDEN / "quant" / "types.json").read_text())


@contextmanager
def opened(case: ExecutorCase, path: Path, max_model_len: int = 512) -> Iterator[Executor]:
    with closing(case.open(open_checkpoint(path), max_model_len=max_model_len)) as executor:
        yield executor


def arch_limit(case: ExecutorCase, name: str) -> float:
    """Of the NMSE; summary.json covers arch/gguf, and arch/hf has the same kind of weights."""
    limits = json.loads((GOLDEN / "arch" / "summary.json").read_text())[Path(name).name]["nmse_limit"]
    return limits["f32_cache" if case.exact_cache else "f16_cache"]


@each_executor
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(case: ExecutorCase, name: str, chunks: str):
    path = GOLDEN / "arch" / f"{name}.gguf"
    llama_cpp, transformers = np.load(path.with_suffix(".npz")), np.load(path.with_suffix(".hf.npz"))
    with opened(case, path) as executor:
        for n in LENGTHS:
            got = run_tokens(executor, llama_cpp[f"tokens_{n}"].tolist(), chunk_sizes=CHUNKS[chunks], all_logits=True)
            assert nmse(got, llama_cpp[f"logits_{n}"]) <= arch_limit(case, name)
            np.testing.assert_array_equal(llama_cpp[f"tokens_{n}"], transformers[f"input_ids_{n}"].reshape(-1))
            assert nmse(got, transformers[f"logits_{n}"].reshape(got.shape)) <= arch_limit(case, name)


OTHERS = sorted(
    {f"{folder}/{path.stem}" for folder in ("gguf", "hf") for path in (GOLDEN / "arch" / folder).glob("*.gguf")}
    - {*ARCHITECTURES}
)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_compared_here_is_refused(name: str):
    """No architecture may run without a golden test: one that is added must join ARCHITECTURES."""
    with pytest.raises(UnsupportedModelError, match=r"the architecture .* is not supported|mixture of experts"):
        build_program(open_checkpoint(GOLDEN / "arch" / f"{name}.gguf"))


@each_executor
def test_yarn_with_mscale(case: ExecutorCase):
    """The mistral3 file is a llama with YaRN, and an attention temperature that is 1 up to position 64."""
    path = GOLDEN / "arch" / "gguf" / "mistral3.gguf"
    checkpoint = open_checkpoint(path)
    metadata = {name.replace("mistral3.", "llama."): value for name, value in checkpoint.metadata.items()}
    metadata["general.architecture"] = "llama"
    del metadata["llama.attention.temperature_scale"]
    expected = np.load(path.with_suffix(".npz"))
    with closing(case.open(replace(checkpoint, metadata=metadata), max_model_len=512)) as executor:
        for n in LENGTHS:
            got = run_tokens(executor, expected[f"tokens_{n}"].tolist(), all_logits=True)[:64]
            assert nmse(got, expected[f"logits_{n}"][:64]) <= arch_limit(case, "mistral3")


@each_executor
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantization(case: ExecutorCase, name: str):
    known = {quant_type.name.upper() for quant_type in all_types()}
    unknown = TYPES_OF_QUANTIZED[name]["types"].keys() - known
    if unknown:
        pytest.skip(f"tensor types that Caudal does not have yet: {', '.join(sorted(unknown))}")
    path = GOLDEN / "quant" / f"{name}.gguf"
    expected = np.load(GOLDEN / "quant" / f"{name}.S.npz")
    # llama.cpp rounds activations too; a difference within its own is right.
    summary = TYPES_OF_QUANTIZED[name]["S"]
    assert isinstance(summary, dict)
    limit = 1e-6 if case.exact_activations else max(1.5 * float(summary["vs_exact"]), 1e-6)
    with opened(case, path) as executor:
        rows = [run_tokens(executor, expected[f"tokens_{n}"].tolist(), chunk_sizes=(128,))[0] for n in (1, 17, 300)]
    assert nmse(np.array(rows), expected["logits_exact"]) <= limit


@each_executor
def test_stories_follow_from_each_other(case: ExecutorCase):
    """A trained model of 260,000 weights: greedy text is fluent, so its own choices are likely."""
    path = shared_dir("data", "models", "stories260K-f32.gguf")
    tokens = [1]
    with opened(case, path, max_model_len=128) as executor:
        for _ in range(40):
            tokens.append(int(run_tokens(executor, tokens)[0].argmax()))
        logits = run_tokens(executor, tokens, all_logits=True)
    np.testing.assert_array_equal(logits[:-1].argmax(axis=1), tokens[1:])
    assert len(set(tokens)) > 15
    assert np.exp(-logprobs(logits)[np.arange(40), tokens[1:]].mean()) < 5


def logprobs(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def check_smollm2(case: ExecutorCase, path: Path, prompts: range) -> None:
    """Top 20 logprobs along the reference's own tokens. Limits: golden/README.md."""
    greedy = json.loads((GOLDEN / "smollm2_greedy.json").read_text())
    exact = [json.loads(line) for line in (GOLDEN / "smollm2_exact.jsonl").read_text().splitlines()]
    differences: list[np.ndarray] = []
    flips = 0
    with opened(case, path, max_model_len=2048) as executor:
        for prompt in prompts:
            prompt_ids, reference = greedy[prompt]["prompt_ids"], exact[prompt]
            tokens, num_before = prompt_ids + reference["tokens"][:-1], len(prompt_ids) - 1
            table, size = range(executor.kv_layout.num_blocks), executor.kv_layout.block_size
            for start in range(0, num_before, 256):
                executor.run(sequence_batch(tokens[start : min(start + 256, num_before)], start, table, size, ()))
            rows = range(len(tokens) - num_before)
            got = logprobs(executor.run(sequence_batch(tokens[num_before:], num_before, table, size, rows)).full)
            ids, expected = np.array(reference["ids"]), np.array(reference["lp"])
            differences.append(np.abs(np.take_along_axis(got, ids, 1) - expected)[:, :10].reshape(-1))
            flips += int(np.sum((got.argmax(axis=1) != ids[:, 0]) & (expected[:, 0] - expected[:, 1] > 0.5)))
    difference = np.concatenate(differences)
    if case.exact_activations:
        assert difference.max() <= 0.03
        assert flips == 0
    else:
        assert difference.mean() <= 0.12
        assert np.quantile(difference, 0.99) <= 0.6
        assert flips <= 2


@fast_executors
def test_smollm2_some_prompts(case: ExecutorCase, smollm2: Path):
    check_smollm2(case, smollm2, range(0, 24, 8))


@pytest.mark.slow
@fast_executors
def test_smollm2_all_prompts(case: ExecutorCase, smollm2: Path):
    check_smollm2(case, smollm2, range(24))
