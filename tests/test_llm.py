"""LLM and the loader, with a tiny model written to a file, and with the real one."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tiny
from caudal import LLM, SamplingParams
from caudal.core import (
    EngineDeadError,
    InvalidModelFileError,
    InvalidRequestError,
    ModelNotFoundError,
    RequestTooLongError,
    UnsupportedModelError,
)
from caudal.engine.draft_model import DraftModel
from caudal.engine.speculation import StepCosts
from caudal.formats.gguf import write_gguf

ALPHABET = [*"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"0123.:,", "\u0120", "\u010a"]
CONTROLS = ["<|im_start|>", "<|im_end|>", "<|x|>"]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ALPHABET + CONTROLS,
    "tokenizer.ggml.token_type": [1] * len(ALPHABET) + [3] * len(CONTROLS),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": len(ALPHABET) + 1,
}
BLOCK_BYTES = 2 * 2 * (8 + 8) * 2 * 32  # layers, kv heads, dimensions, float16, tokens
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def weights() -> dict[str, np.ndarray]:
    """A head of its own: with the embedding as head, a random model says the same token for ever."""
    return tiny.arrays() | {"output.weight": np.random.default_rng(1).normal(0, 0.5, (64, 24)).astype(np.float32)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.checkpoint(weights())
    file = tmp_path_factory.mktemp("llm") / "tiny.gguf"
    write_gguf(file, {**tiny.metadata(), **TOKENIZER, "general.name": "Tiny"}, model.tensors.values())
    return file


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, num_threads=1, pin_threads=False, max_num_seqs=8) as llm:
        yield llm


def test_one_prompt_gives_one_result_and_many_give_a_list(llm: LLM) -> None:
    one = llm.generate("Hello", GREEDY)
    assert one.prompt == "Hello"
    assert one.prompt_token_ids == tuple(llm.tokenizer.encode("Hello"))
    assert len(one.token_ids) == 12
    assert one.text == llm.tokenizer.decode(one.token_ids, skip_special=True)
    assert one.finish_reason == "length"
    many = llm.generate(["Hello", "abc"], GREEDY)
    assert [r.prompt for r in many] == ["Hello", "abc"]
    assert many[0].token_ids == one.token_ids
    assert llm.generate([], GREEDY) == []


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello")
    result = llm.generate(ids, GREEDY)
    assert result.prompt is None
    assert result.token_ids == llm.generate("Hello", GREEDY).token_ids
    mixed = llm.generate([ids, "abc", tuple(ids)], GREEDY)
    assert [len(r.outputs) for r in mixed] == [1, 1, 1]
    assert mixed[0].token_ids == mixed[2].token_ids == result.token_ids


def test_params_for_each_prompt(llm: LLM) -> None:
    results = llm.generate(["a", "a"], [GREEDY, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)])
    assert [len(r.token_ids) for r in results] == [12, 3]
    with pytest.raises(ValueError, match="2 prompts, but 1 params"):
        llm.generate(["a", "a"], [GREEDY])


def test_results_carry_logprobs_and_times(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    result = llm.generate("Hello", params)
    assert [c.index for c in result.outputs] == [0, 1, 2]
    assert len({c.token_ids for c in result.outputs}) > 1
    for completion in result.outputs:
        assert completion.logprobs is not None
        assert [entry.chosen.token_id for entry in completion.logprobs] == list(completion.token_ids)
        assert all(len(entry.top) == 2 for entry in completion.logprobs)
        assert completion.cumulative_logprob == pytest.approx(sum(e.chosen.logprob for e in completion.logprobs))
        assert completion.timings is not None
        assert 0 < completion.timings.first_token <= completion.timings.total
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    assert result.prompt_logprobs[0] is None
    assert llm.generate("Hello", params).outputs[0].token_ids == result.outputs[0].token_ids
    assert llm.generate("a", GREEDY).outputs[0].cumulative_logprob is None


def test_chat_is_the_template_and_generate(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    prompt = llm.chat_prompt(messages)
    assert llm.tokenizer.decode(prompt) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    result = llm.chat(messages, GREEDY)
    assert result.prompt_token_ids == tuple(prompt)
    both = llm.chat([messages, [{"role": "user", "content": "abc"}]], GREEDY)
    assert both[0].token_ids == result.token_ids
    assert llm.tokenizer.decode(llm.chat_prompt(messages, add_generation_prompt=False)).endswith("<|im_end|>\n")


def test_streaming(llm: LLM) -> None:
    want = llm.generate("Hello", GREEDY)
    outputs = list(llm.stream("Hello", GREEDY))
    assert tuple(t for o in outputs for t in o.token_ids) == want.token_ids
    assert "".join(o.text for o in outputs) == want.text
    assert len(outputs) == 12

    async def main() -> tuple[int, ...]:
        return tuple([t async for o in llm.astream("Hello", GREEDY) for t in o.token_ids])

    assert asyncio.run(main()) == want.token_ids


def test_leaving_a_stream_aborts(llm: LLM) -> None:
    stream = llm.stream("Hello", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    del stream
    assert llm.generate("Hello", GREEDY).finish_reason == "length"
    stats = llm._model.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


def test_more_prompts_than_may_wait(path: Path) -> None:
    with LLM(path, num_threads=1, pin_threads=False, max_num_seqs=4, max_waiting=8) as llm:
        results = llm.generate([f"a{'b' * (i % 7)}" for i in range(50)], GREEDY)
    assert [r.finish_reason for r in results] == ["length"] * 50


def test_tokens_are_the_same_alone_together_preempted_and_after_a_prefix_hit(path: Path) -> None:
    rng = random.Random(1)
    common = rng.choices(range(60), k=70)
    prompts = [common[: rng.choice([0, 40, 70])] + rng.choices(range(60), k=rng.randrange(1, 60)) for _ in range(24)]
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=40, ignore_eos=True) for i in range(24)]
    with LLM(path, num_threads=1, pin_threads=False, prefix_caching=False) as llm:
        alone = [llm.generate(p, q).token_ids for p, q in zip(prompts, params, strict=True)]
    settings = {"num_threads": 2, "pin_threads": False, "max_num_seqs": 24, "max_num_batched_tokens": 48}
    with LLM(path, kv_cache_memory=14 * BLOCK_BYTES, **settings) as llm:
        together = [r.token_ids for r in llm.generate(prompts, params)]
        stats = llm._model.engine.stats()
        again = [r.token_ids for r in llm.generate(prompts, params)]
    assert len({token for tokens in alone for token in tokens}) > 40, "the model does not distinguish much"
    assert together == alone
    assert again == alone
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert stats.kv_cache_usage == 0.0


def test_threads_share_a_model(llm: LLM) -> None:
    results: dict[int, tuple[int, ...]] = {}

    def work(i: int) -> None:
        results[i] = llm.generate("Hello"[: 1 + i % 5], GREEDY).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[i] == results[i + 5] for i in range(5))


def test_impossible_requests_are_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestTooLongError, match="300 tokens"):
        llm.generate(["a", [1] * 300], GREEDY)
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate("", GREEDY)
    with pytest.raises(InvalidRequestError, match="temperature"):
        llm.generate("a", SamplingParams(temperature=-1.0))
    for prompt in (None, 7, b"hi", [True, False], {"a": 1}):
        with pytest.raises(InvalidRequestError, match="text or"):
            llm.generate(prompt, GREEDY)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(InvalidRequestError, match="role"):
        llm.chat([{"content": "a"}])
    with pytest.raises(InvalidRequestError, match="top_p"):
        llm.stream("a", SamplingParams(top_p=3.0))


def test_a_closed_model_says_so(path: Path) -> None:
    llm = LLM(path, num_threads=1, pin_threads=False)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="shutting down"):
        llm.generate("a", GREEDY)


def test_a_model_that_nobody_refers_to_is_freed(path: Path) -> None:
    llm = LLM(path, num_threads=1, pin_threads=False)
    thread = llm._model.engine._thread
    llm.generate("a", GREEDY)
    del llm
    gc.collect()
    assert not thread.is_alive()


def test_settings_and_files_that_do_not_exist(path: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no_such_setting"):
        LLM(path, no_such_setting=1)
    with pytest.raises(ModelNotFoundError):
        LLM(tmp_path / "none.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InvalidModelFileError):
        LLM(broken)
    strange = tmp_path / "strange.gguf"
    model = tiny.checkpoint(tiny.arrays())
    write_gguf(strange, {**tiny.metadata("mamba9"), **TOKENIZER}, model.tensors.values())
    with pytest.raises(UnsupportedModelError, match="mamba9"):
        LLM(strange)


def test_the_reference_executor_gives_the_same_first_tokens(path: Path, llm: LLM) -> None:
    with LLM(path, executor="reference") as reference:
        assert reference.generate("Hello", GREEDY).token_ids[:4] == llm.generate("Hello", GREEDY).token_ids[:4]


def test_the_loader_says_what_it_loaded(path: Path, llm: LLM) -> None:
    model = llm._model
    assert (model.path, model.name, model.architecture) == (path, "Tiny", "llama")
    assert model.num_bytes == sum(a.nbytes for a in weights().values())
    assert llm.max_model_len == 256


def test_a_real_answer(smollm2: Path) -> None:
    with LLM(smollm2, max_model_len=512, num_threads=2) as llm:
        result = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8))
        assert "Paris" in result.text
        answer = llm.chat([{"role": "user", "content": "Say hello."}], SamplingParams(temperature=0.0, max_tokens=40))
        assert answer.text
        assert "<|im_end|>" not in answer.text


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, min_p=0.05, seed=3),
        SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1),
        SamplingParams(temperature=1.0, top_p=0.9, seed=4, logprobs=3, n=2),
    ],
    ids=["greedy", "sampled", "penalties", "logprobs"],
)
def test_speculation_changes_nothing(smollm2: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token and bit by bit; where rows cost nothing, so that the engine speculates as much as it can."""
    monkeypatch.setattr(StepCosts, "record", lambda self, num_rows, seconds: setattr(self, "_seconds", [1.0] * 16))
    code = "def add(first, second):\n    return first + second\n\n\ndef subtract(first, second):\n    return first - "
    prompts = [code, "One, two, three, one, two, three, one, two,", "The capital of France is"]
    results: list[object] = []
    for method in ("off", "lookup"):
        with LLM(smollm2, max_model_len=256, speculation=method) as llm:
            found = llm.generate(prompts, replace(params, max_tokens=48, ignore_eos=True))
            results.append([[(o.token_ids, o.text, o.logprobs) for o in result.outputs] for result in found])
            num_accepted = llm._model.engine.stats().num_accepted_tokens
            assert num_accepted > 0 if method == "lookup" else num_accepted == 0
    assert results[0] == results[1]


def test_a_draft_model_changes_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the same model, which is always right, nor another one."""
    monkeypatch.setattr(StepCosts, "record", lambda self, num_rows, seconds: setattr(self, "_seconds", [1.0] * 16))
    monkeypatch.setattr(DraftModel, "seconds_per_token", 0.0)
    other = tiny.checkpoint(weights() | {"output_norm.weight": np.linspace(0.5, 1.5, 24, dtype=np.float32)})
    file = tmp_path / "other.gguf"
    write_gguf(file, {**tiny.metadata(), **TOKENIZER}, other.tensors.values())
    params = [GREEDY, SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True, logprobs=2)]
    settings = {"num_threads": 1, "pin_threads": False, "max_num_seqs": 8}
    found: list[object] = []
    for draft in (None, path, file):
        method = {"speculation": "off"} if draft is None else {"speculation": "draft", "draft_model": str(draft)}
        with LLM(path, **settings, **method) as llm:
            results = llm.generate(["Hello", "abc"], params)
            found.append([(r.token_ids, r.text, r.outputs[0].logprobs) for r in results])
            stats = llm._model.engine.stats()
        if draft is path:
            assert stats.num_accepted_tokens == stats.num_draft_tokens > 20
        elif draft is file:
            assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert found[0] == found[1] == found[2]


def test_a_draft_model_needs_the_same_vocabulary(path: Path, tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.tokens": [*TOKENIZER["tokenizer.ggml.tokens"][:-1], "<|y|>"]}  # type: ignore[misc]
    write_gguf(
        tmp_path / "other.gguf", {**tiny.metadata(), **TOKENIZER, **tokens}, tiny.checkpoint(weights()).tensors.values()
    )
    with pytest.raises(UnsupportedModelError, match=r"other.gguf.*another vocabulary \(token 63 differs\)"):
        LLM(path, speculation="draft", draft_model=str(tmp_path / "other.gguf"))
    with pytest.raises(ModelNotFoundError):
        LLM(path, speculation="draft", draft_model=str(tmp_path / "none.gguf"))
