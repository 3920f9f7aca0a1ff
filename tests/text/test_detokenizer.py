"""Incremental text equals the text decoded at once, however tokens and calls divide it."""

from __future__ import annotations

import time
from functools import cache

import pytest
import text_models as models
from hypothesis import given, settings
from hypothesis import strategies as st

from caudal.core import InvalidRequestError
from caudal.text.detokenizer import Detokenizer, DetokenizerOutput
from caudal.text.tokenizer import Tokenizer


@cache
def bpe() -> Tokenizer:
    return models.tokenizer(models.bpe())


@cache
def spm() -> Tokenizer:
    return models.tokenizer(models.spm())


def expected(text: str, stop: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """By the definition, one character after another: the first stop string to be complete, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [string for string in stop if string and text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


def pieces(
    detokenizer: Detokenizer, token_ids: list[int], cuts: list[int]
) -> tuple[list[DetokenizerOutput], str, str | None]:
    outputs: list[DetokenizerOutput] = []
    start = 0
    for end in (*sorted(cuts), len(token_ids)):
        outputs.append(detokenizer.push(token_ids[start:end]))
        start = end
    outputs.append(detokenizer.flush())
    stopped = [output.stopped for output in outputs if output.stopped is not None]
    assert len(stopped) <= 1
    return outputs, "".join(output.text for output in outputs), stopped[0] if stopped else None


TEXTS = st.text(st.sampled_from("ab é🦙\n"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("ab é🦙\n"), max_size=4), max_size=4).map(tuple)


@settings(deadline=None, max_examples=500)
@given(TEXTS, STOPS, st.booleans(), st.data())
def test_any_division_gives_the_same_text(text: str, stop: tuple[str, ...], include: bool, data: st.DataObject) -> None:
    token_ids = bpe().encode(text, add_special=False)
    cuts = data.draw(st.lists(st.integers(0, len(token_ids)), max_size=5))
    detokenizer = Detokenizer(bpe(), stop=stop, include_stop=include)
    _, joined, stopped = pieces(detokenizer, token_ids, cuts)
    assert (joined, stopped) == expected(text, stop, include)


@settings(deadline=None, max_examples=500)
@given(st.lists(st.integers(0, 261), max_size=40), STOPS, st.booleans(), st.booleans(), st.data())
def test_any_tokens_even_bytes_that_are_no_utf8(
    token_ids: list[int], stop: tuple[str, ...], include: bool, skip: bool, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(token_ids)), max_size=5))
    detokenizer = Detokenizer(bpe(), stop=stop, include_stop=include, skip_special=skip)
    _, joined, stopped = pieces(detokenizer, token_ids, cuts)
    assert (joined, stopped) == expected(bpe().decode(token_ids, skip_special=skip), stop, include)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 269), max_size=30), st.booleans(), st.booleans())
def test_spm_tokens(token_ids: list[int], skip: bool, keep: bool) -> None:
    detokenizer = Detokenizer(spm(), skip_special=skip, keep_leading_space=keep)
    _, joined, _ = pieces(detokenizer, token_ids, list(range(len(token_ids))))
    assert joined == spm().decode(token_ids, skip_special=skip, keep_leading_space=keep)


def test_every_stop_position_in_every_division() -> None:
    text = "one 🦙 two é three 🦙🦙 four"
    token_ids = bpe().encode(text, add_special=False)
    for start in range(len(text)):
        for length in (1, 2, 5):
            stop = (text[start : start + length],)
            for cut in range(len(token_ids) + 1):
                _, joined, stopped = pieces(Detokenizer(bpe(), stop=stop), token_ids, [cut])
                assert (joined, stopped) == expected(text, stop, False)


def test_never_half_a_character() -> None:
    detokenizer = Detokenizer(bpe())
    token_ids = bpe().encode("é🦙", add_special=False)
    assert [detokenizer.push([i]).text for i in token_ids] == ["", "é", "", "", "", "🦙"]
    assert detokenizer.flush().text == ""


def test_half_a_character_at_the_end_is_replaced() -> None:
    detokenizer = Detokenizer(bpe())
    assert detokenizer.push("🦙".encode()[:3]).text == ""
    assert detokenizer.flush().text == "\ufffd"


def test_possible_stop_strings_are_held_back_and_no_more() -> None:
    detokenizer = Detokenizer(bpe(), stop=("stop!", "end"))
    assert [detokenizer.push([byte]).text for byte in b"a stoop"] == ["a", " ", "", "", "", "stoo", "p"]
    assert [detokenizer.push([byte]).text for byte in b"ensto"] == ["", "", "en", "", ""]
    assert detokenizer.flush().text == "sto"


def test_what_a_call_says_when_it_stops() -> None:
    detokenizer = Detokenizer(bpe(), stop=("ND",))
    assert detokenizer.push(b"an E") == DetokenizerOutput("an E", None, 4)
    assert detokenizer.push(b"NDxyz") == DetokenizerOutput("", "ND", 2)
    assert detokenizer.push(b"more") == DetokenizerOutput("", None, 0)
    assert detokenizer.flush() == DetokenizerOutput("")


def test_the_first_complete_stop_string_wins_and_of_several_the_longest() -> None:
    for stop in (("bc", "abcd", "c"), ("c", "abcd", "bc")):
        assert Detokenizer(bpe(), stop=stop).push(b"xabcd") == DetokenizerOutput("xa", "bc", 4)
        assert Detokenizer(bpe(), stop=stop, include_stop=True).push(b"xabcd").text == "xabc"


def test_special_tokens_are_left_out_or_shown_and_may_stop() -> None:
    token_ids = [*b"a", 260, *b"b"]
    assert Detokenizer(bpe()).push(token_ids).text == "ab"
    assert Detokenizer(bpe(), skip_special=False).push(token_ids).text == "a<|im_end|>b"
    output = Detokenizer(bpe(), skip_special=False, stop=("<|im_end|>",)).push(token_ids)
    assert (output.text, output.stopped) == ("a", "<|im_end|>")
    assert Detokenizer(bpe(), stop=("<|im_end|>",)).push(token_ids).stopped is None


def test_stop_strings_count_after_min_tokens() -> None:
    detokenizer = Detokenizer(bpe(), stop=("ab",), min_tokens=3)
    assert detokenizer.push(b"aba").text == "aba"
    assert detokenizer.push(b"b").text == "b"  # its "a" belongs to the first three
    assert detokenizer.push(b"xab") == DetokenizerOutput("x", "ab", 3)


def test_ids_past_the_vocabulary_have_no_text_and_negative_ones_are_refused() -> None:
    assert Detokenizer(bpe()).push([*b"a", 5000, *b"b"]) == DetokenizerOutput("ab", None, 3)
    with pytest.raises(InvalidRequestError):
        Detokenizer(bpe()).push([-1])


def test_thousands_of_stop_strings_cost_no_more_than_one() -> None:
    stop = tuple(f"stop number {i} of many" for i in range(5000))
    token_ids = bpe().encode("stop number 4999 of some, " * 2000, add_special=False)
    detokenizer = Detokenizer(bpe(), stop=stop)
    start = time.process_time()
    joined = "".join(detokenizer.push([i]).text for i in token_ids) + detokenizer.flush().text
    assert time.process_time() - start < 3  # measured: 0.1 s for 52,000 tokens
    assert joined == bpe().decode(token_ids)
    assert (
        Detokenizer(bpe(), stop=stop).push(bpe().encode("x stop number 4321 of many", add_special=False)).text == "x "
    )


def test_stop_string_of_one_repeated_letter() -> None:
    """Naive matching compares the whole stop string again for every letter."""
    detokenizer = Detokenizer(bpe(), stop=("a" * 20_000 + "b",))
    start = time.process_time()
    output = detokenizer.push(b"a" * 100_000)
    assert time.process_time() - start < 3
    assert len(output.text) == 80_000
    assert len(detokenizer.flush().text) == 20_000
