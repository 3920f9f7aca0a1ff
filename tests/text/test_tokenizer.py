"""Tokenizers against the vocabularies and ids of llama.cpp's own tests, and against rules spelled out by hand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import text_models as models
from hypothesis import given, settings
from hypothesis import strategies as st

from caudal.core import InvalidModelFileError, InvalidRequestError, UnsupportedModelError
from caudal.formats import open_checkpoint
from caudal.text.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from caudal.text.tokenizer import Tokenizer
from conftest import shared_dir

VOCABULARIES = ("bert-bge", "deepseek-llm", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2")
SEPARATOR = "\n__ggml_vocab_test__\n"


@cache
def stored(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(vocabulary_file(name)).metadata)


def vocabulary_file(name: str, suffix: str = "") -> Path:
    return shared_dir("data", "vocab", f"ggml-vocab-{name}.gguf{suffix}")


def texts_and_ids(name: str) -> list[tuple[str, list[int]]]:
    *texts, rest = vocabulary_file(name, ".inp").read_bytes().decode().split(SEPARATOR)
    assert rest == ""  # each text ends with the separator
    lines = vocabulary_file(name, ".out").read_text().splitlines()
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=True)]


@cache
def smollm2_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(path).metadata)


# ------------------------------------------------------------------------------------ reference results


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_equal_the_reference(name: str) -> None:
    tokenizer = stored(name)
    cases = texts_and_ids(name)
    assert len(cases) > 40
    for text, ids in cases:
        assert tokenizer.encode(text, add_special=False, parse_special=False) == ids, text


@pytest.mark.parametrize("name", [name for name in VOCABULARIES if name != "bert-bge"])
def test_reference_ids_decode_to_their_texts(name: str) -> None:
    for text, ids in texts_and_ids(name):
        assert stored(name).decode(ids) == text


def test_smollm2_prompts_and_answers(smollm2: Path) -> None:
    tokenizer = smollm2_tokenizer(smollm2)
    for case in json.loads(shared_dir("golden", "smollm2_greedy.json").read_text()):
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"], case["name"]
        assert tokenizer.decode(case["tokens"]) == case["text"], case["name"]
    assert tokenizer.eos_ids == {0, 2, 4}  # as the README of the reference says


@pytest.mark.parametrize(
    ("name", "bos", "eos", "ends", "add_bos"),
    [
        ("gpt-2", 50256, 50256, {50256}, False),
        ("llama-bpe", 128000, 128001, {128001, 128009}, True),
        ("qwen2", 151643, 151643, {151643, 151645}, False),
        ("llama-spm", 1, 2, {2}, True),
        ("phi-3", 1, 32000, {2, 32000, 32007}, True),
        ("deepseek-llm", 100000, 100001, {100001}, True),
    ],
)
def test_special_ids(name: str, bos: int, eos: int, ends: set[int], add_bos: bool) -> None:
    tokenizer = stored(name)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (bos, eos, ends)
    assert tokenizer.encode("a")[:1] == ([bos] if add_bos else tokenizer.encode("a", add_special=False)[:1])
    assert all(tokenizer.is_special(i) for i in ends)


def test_phi3_drops_white_space_behind_its_markers() -> None:
    tokenizer = stored("phi-3")
    assert tokenizer.encode("<|user|>\n  hi", add_special=False) == tokenizer.encode("<|user|>hi", add_special=False)
    assert tokenizer.encode("<s> hi", add_special=False) != tokenizer.encode("<s>hi", add_special=False)


# --------------------------------------------------------------------------------------------- byte BPE


def test_bpe_special_tokens_only_where_asked() -> None:
    tokenizer = models.tokenizer(models.bpe())
    assert tokenizer.encode("hi<|im_end|>", add_special=False) == [256, 260]
    plain = tokenizer.encode("hi<|im_end|>", add_special=False, parse_special=False)
    assert 260 not in plain
    assert tokenizer.decode(plain) == "hi<|im_end|>"
    assert tokenizer.encode("<tool> hi", add_special=False, parse_special=False) == [261, 257]


def test_special_tokens_touching_and_overlapping() -> None:
    tokenizer = models.tokenizer(models.bpe())
    assert tokenizer.encode("<|bos|><|bos|><tool><|im_end|>", add_special=False) == [259, 259, 261, 260]
    assert tokenizer.decode(tokenizer.encode("<|bos<|bos|>|>", add_special=False)) == "<|bos<|bos|>|>"


@pytest.mark.parametrize(("pre", "default"), [("gpt-2", False), ("llama-bpe", True), ("tekken", True)])
def test_add_bos_default_depends_on_the_pre_tokenizer(pre: str, default: bool) -> None:
    assert models.tokenizer(models.bpe(pre=pre)).add_bos is default
    assert models.tokenizer(models.bpe(pre=pre, add_bos_token=not default)).add_bos is not default


def test_bos_and_eos_are_added() -> None:
    tokenizer = models.tokenizer(models.bpe(add_bos_token=True, add_eos_token=True, eos_token_id=260))
    assert tokenizer.encode("hi") == [259, 256, 260]
    assert tokenizer.encode("") == [259, 260]
    assert tokenizer.encode("", add_special=False) == []
    assert tokenizer.encode("<|bos|>hi") == [259, 259, 256, 260]


def test_chat_prompts_have_one_bos() -> None:
    tokenizer = models.tokenizer(models.bpe(add_bos_token=True, add_eos_token=True, eos_token_id=260))
    assert tokenizer.encode_chat("hi") == tokenizer.encode_chat("<|bos|>hi") == [259, 256]
    assert models.tokenizer(models.bpe()).encode_chat("hi") == [256]


def test_ids_that_are_no_tokens_are_no_special_tokens() -> None:
    tokenizer = models.tokenizer(models.bpe(bos_token_id=2**32 - 1, eos_token_id=-1, add_bos_token=True))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (None, None, False)
    assert tokenizer.encode("hi") == [256]


def test_end_tokens_by_their_text() -> None:
    data = models.bpe(eot_token_id=259)
    assert models.tokenizer(data).eos_ids == {259, 260}
    texts = data["tokenizer.ggml.tokens"]
    assert isinstance(texts, list)
    texts[261] = "<|eot_id|>"  # which the file calls user-defined
    tokenizer = models.tokenizer(data)
    assert tokenizer.eos_ids == {259, 260, 261}
    assert tokenizer.is_special(261)


def test_bos_and_eos_are_special_even_without_token_types() -> None:
    data = models.spm()
    del data["tokenizer.ggml.token_type"]
    tokenizer = models.tokenizer(data)
    assert tokenizer.decode([1, 268, 2], skip_special=True) == "é"
    assert tokenizer.encode("</s>", add_special=False) == [2]


def test_html_is_no_end_token() -> None:
    tokens = [(char, models.NORMAL) for char in models.byte_alphabet()]
    tokens += [("</s>", models.NORMAL), ("<|im_end|>", models.CONTROL)]
    tokenizer = models.tokenizer(models.metadata("gpt2", tokens, pre="qwen2", merges=[], eos_token_id=257))
    assert tokenizer.eos_ids == {257}
    assert tokenizer.encode("</s>", add_special=False) == list(b"</s>")


def test_harmony_messages_do_not_end_the_generation() -> None:
    tokens = [(char, models.NORMAL) for char in models.byte_alphabet()]
    texts = ["<|return|>", "<|call|>", "<|end|>", "<|channel|>"]
    tokens += [(text, models.CONTROL) for text in texts]
    tokenizer = models.tokenizer(models.metadata("gpt2", tokens, pre="gpt-4o", merges=[]))
    assert tokenizer.eos_ids == {256, 257}
    assert tokenizer.decode([258, 259, 256], skip_special=True) == "<|end|><|channel|>"


@pytest.mark.parametrize("array", [list, tuple, np.array])
def test_arrays_of_any_kind(array: Any) -> None:
    data = models.spm()
    data["tokenizer.ggml.scores"] = array(data["tokenizer.ggml.scores"])
    data["tokenizer.ggml.token_type"] = array(data["tokenizer.ggml.token_type"])
    assert models.tokenizer(data).encode("ab") == models.tokenizer(models.spm()).encode("ab")


def test_merges_of_missing_tokens_never_apply() -> None:
    data = models.bpe(merges=["h i", "hi x", "zz zz", "Ġ hi", "Ċ Ċ"])
    assert models.tokenizer(data).encode("hix hi", add_special=False) == [256, ord("x"), 257]


def test_tokens_in_no_byte_alphabet_are_text() -> None:
    data = models.bpe()
    texts = data["tokenizer.ggml.tokens"]
    assert isinstance(texts, list)
    texts[258] = "日"
    data["tokenizer.ggml.merges"] = ["h i", "Ġ hi"]
    assert models.tokenizer(data).token_bytes(258) == "日".encode()


# ---------------------------------------------------------------------------------------- SentencePiece


def texts_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(i) for i in ids]


def test_spm_joins_the_best_pair_first() -> None:
    tokenizer = models.tokenizer(models.spm())
    assert texts_of(tokenizer, tokenizer.encode("abc", add_special=False)) == ["▁ab", "c"]  # not "abc"
    unprefixed = models.tokenizer(models.spm(add_space_prefix=False))
    assert texts_of(unprefixed, unprefixed.encode("abc", add_special=False)) == ["abc"]


def test_spm_space_prefix_and_bytes() -> None:
    tokenizer = models.tokenizer(models.spm())
    assert texts_of(tokenizer, tokenizer.encode("a")) == ["<s>", "▁a"]
    assert texts_of(tokenizer, tokenizer.encode("x", add_special=False)) == ["▁", "<0x78>"]
    assert texts_of(tokenizer, tokenizer.encode("b日", add_special=False)) == ["▁", "b", "<0xE6>", "<0x97>", "<0xA5>"]
    assert texts_of(tokenizer, tokenizer.encode("a</s>a<tool>a", add_special=False)) == [
        *("▁a", "</s>", "▁a", "<tool>", "▁a")
    ]


def test_spm_plain_text_never_becomes_control_or_byte_tokens() -> None:
    tokenizer = models.tokenizer(models.spm())
    for text in ("<s>", "</s>", "<unk>", "<0x41>"):
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert tokenizer.decode(ids, skip_special=True) == text


def test_spm_characters_that_are_no_tokens_still_join() -> None:
    data = models.spm()
    texts = data["tokenizer.ggml.tokens"]
    assert isinstance(texts, list)
    for character in ("▁", "a", "b"):
        texts[texts.index(character)] = f"[{character}]"
    tokenizer = models.tokenizer(data)
    assert texts_of(tokenizer, tokenizer.encode("a", add_special=False)) == ["▁a"]
    assert texts_of(tokenizer, tokenizer.encode("b", add_special=False)) == ["<0xE2>", "<0x96>", "<0x81>", "<0x62>"]


def test_spm_without_byte_tokens_has_the_unknown_token() -> None:
    control = [("<unk>", models.UNKNOWN), ("<s>", models.CONTROL), ("</s>", models.CONTROL)]
    data = models.metadata("llama", [*control, ("▁", 1), ("a", 1)], scores=[0.0, 0.0, 0.0, -1.0, -2.0])
    assert models.tokenizer(data).encode("a日本", add_special=False) == [3, 4, 0]


def test_leading_space_of_spm() -> None:
    tokenizer = models.tokenizer(models.spm())
    ids = tokenizer.encode("ab a")
    assert tokenizer.decode(ids, skip_special=True) == "ab a"
    assert tokenizer.decode(ids, skip_special=True, keep_leading_space=True) == " ab a"
    assert tokenizer.decode(ids) == "<s> ab a"


# -------------------------------------------------------------------------------------------- WordPiece


def test_wpm() -> None:
    tokenizer = models.tokenizer(models.wpm())
    ids = tokenizer.encode("Hello, WORLDS 中é\u0301 xyz")
    assert texts_of(tokenizer, ids) == ["[CLS]", "▁hello", "▁,", "▁world", "s", "▁中", "▁e", "[UNK]", "[SEP]"]
    assert tokenizer.decode(ids, skip_special=True) == "hello , worlds 中 e"
    assert tokenizer.encode("hello[MASK]", add_special=False) == [5, 4]
    cased = models.tokenizer(models.wpm(**{"normalizer.lowercase": False}))
    assert texts_of(cased, cased.encode("Hello hello", add_special=False)) == ["[UNK]", "▁hello"]


# ------------------------------------------------------------------------------------- all tokenizers


def test_text_that_is_no_unicode_is_refused() -> None:
    for data in (models.bpe(), models.spm(), models.wpm()):
        with pytest.raises(InvalidRequestError, match="character 2"):
            models.tokenizer(data).encode("hi\ud800")
    assert models.tokenizer(models.bpe()).decode(models.tokenizer(models.bpe()).encode("a\0b")) == "a\0b"


@pytest.mark.parametrize("token_id", [-1, 262, 2**31, 10**30])
def test_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    tokenizer = models.tokenizer(models.bpe())
    for use in (tokenizer.token_bytes, tokenizer.token_text, tokenizer.is_special, lambda i: tokenizer.decode([i])):
        with pytest.raises(InvalidRequestError, match="0 to 261"):
            use(token_id)


def test_most_characters_of_a_token() -> None:
    tokenizer = models.tokenizer(models.bpe())
    longest = max(len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size))
    assert tokenizer.max_token_characters == longest
    # every unknown word is one token
    assert models.tokenizer(models.wpm()).max_token_characters is None


def test_bytes_that_are_no_utf8() -> None:
    tokenizer = models.tokenizer(models.bpe())
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [bytes((byte,)) for byte in range(256)]
    assert tokenizer.decode([0xF0, 0x9F, 0xA6, 0x99]) == "🦙"
    assert tokenizer.decode([0xF0, 0x9F, 0xA6]) == "\ufffd"
    assert tokenizer.decode([0xFF, 0x41, 0x80]) == "\ufffdA\ufffd"


@settings(deadline=None, max_examples=300)
@given(st.text())
def test_byte_level_round_trip(text: str) -> None:
    for name in ("gpt-2", "llama-bpe", "qwen2", "deepseek-llm"):
        tokenizer = stored(name)
        for parse_special in (True, False):
            assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=parse_special)) == text


@settings(deadline=None, max_examples=200)
@given(st.text().filter(lambda text: "\u2581" not in text))
def test_spm_round_trip(text: str) -> None:
    tokenizer = stored("llama-spm")
    assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False)) == text


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<|bos|>", "<|im_end|>", "<tool>", "<|", "hi", " ", "\n"])))
def test_special_tokens_anywhere_round_trip(parts: list[str]) -> None:
    tokenizer = models.tokenizer(models.bpe())
    ids = tokenizer.encode("".join(parts), add_special=False)
    assert tokenizer.decode(ids) == "".join(parts)
    assert sum(i >= 259 for i in ids) >= sum(part[-1] == ">" for part in parts)


# ------------------------------------------------------------------------------ refused and broken files


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_builds_and_loses_nothing(name: str) -> None:
    text = "I've HELLO camelCase 12345 3.14\r\n\n  \t日本語 한국어 नमस्ते 🦙🏽!?…<|x|> \u3000 '"
    tokenizer = models.tokenizer(models.bpe(pre=name))
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_unknown_pre_tokenizer_names_the_nearest() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'qwen-2'.*'qwen2'"):
        models.tokenizer(models.bpe(pre="qwen-2"))
    assert pre_tokenizer("llama3") is pre_tokenizer("llama-bpe")


@pytest.mark.parametrize("model", ["t5", "rwkv", "plamo2", "none"])
def test_unsupported_kinds_are_named(model: str) -> None:
    with pytest.raises(UnsupportedModelError, match=model):
        models.tokenizer(models.metadata(model, [("a", 1)]))


def broken() -> Iterator[tuple[dict[str, object], str]]:
    prefix = "tokenizer.ggml."
    yield {}, "no tokenizer"
    yield {**models.bpe(), f"{prefix}model": 3}, "model should be"
    yield {**models.bpe(), f"{prefix}tokens": []}, "no vocabulary"
    yield {**models.bpe(), f"{prefix}tokens": "abc"}, "should be an array"
    yield {**models.bpe(), f"{prefix}tokens": [1, 2]}, "array of strings"
    yield {**models.bpe(), f"{prefix}tokens": ["a" * 100_000]}, "characters"
    yield {**models.bpe(), f"{prefix}tokens": ["\ud800"]}, "UTF-8"
    yield {**models.bpe(), f"{prefix}token_type": [1, 1]}, "2 entries for 262 tokens"
    yield {**models.bpe(), f"{prefix}token_type": [1.5] * 262}, "numbers"
    yield {**models.bpe(), f"{prefix}merges": None}, "merges"
    yield {**models.bpe(), f"{prefix}merges": ["hi"]}, "not two tokens"
    yield {**models.bpe(), f"{prefix}merges": [0]}, "array of strings"
    yield {**models.bpe(), f"{prefix}bos_token_id": "1"}, "bos_token_id"
    yield {**models.spm(), f"{prefix}scores": [0.0]}, "1 entries"
    yield {**models.spm(), f"{prefix}scores": ["x"] * 270}, "numbers"
    yield {**models.wpm(), f"{prefix}unknown_token_id": 10**6}, "unknown token"


@pytest.mark.parametrize(("data", "message"), list(broken()))
def test_broken_vocabularies_are_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidModelFileError, match=message):
        models.tokenizer(data)


# --------------------------------------------------------------------------------------- time and threads


@pytest.mark.parametrize(("name", "seconds"), [("qwen2", 1.5), ("llama-bpe", 1.5), ("llama-spm", 1.0)])
def test_large_vocabularies_build_fast(name: str, seconds: float) -> None:
    metadata = open_checkpoint(vocabulary_file(name)).metadata
    start = time.process_time()
    Tokenizer.from_gguf(metadata)
    assert time.process_time() - start < seconds


@pytest.mark.parametrize("name", ["qwen2", "llama-spm", "bert-bge"])
@pytest.mark.parametrize("word", ["a", "ab", " ", "\n", "7", "!?", "日本", "🦙", "é", "<|", "A", "'s"])
def test_time_grows_with_the_length_only(name: str, word: str) -> None:
    tokenizer = stored(name)
    start = time.process_time()
    ids = tokenizer.encode(word * (200_000 // len(word)), add_special=False)
    assert time.process_time() - start < 5  # measured: under 0.5 s; a quadratic way takes minutes
    if name != "bert-bge":
        assert tokenizer.decode(ids) == word * (200_000 // len(word))


def test_a_megabyte_of_text_with_special_tokens() -> None:
    text = ("<|im_start|>user\nWhat is 1 < 2? [PAD] <b>bold</b><|im_end|>\n" * 20_000)[:1_000_000]
    start = time.process_time()
    ids = stored("qwen2").encode(text)
    assert time.process_time() - start < 10
    assert stored("qwen2").decode(ids) == text


def test_threads_may_share_a_tokenizer() -> None:
    tokenizer = stored("qwen2")
    texts = [f"thread {i} says: {'hello ' * i}<|im_end|>" for i in range(16)]
    expected = [tokenizer.encode(text) for text in texts]
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        for _ in range(20):
            results[i] = tokenizer.encode(texts[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(len(texts))] == expected
