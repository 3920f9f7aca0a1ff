"""Grammars: whatever a model does, what comes out is valid; and what cannot be used is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caudal.core import Grammar, InvalidRequestError
from caudal.formats import open_checkpoint
from caudal.text.grammar import MAX_CHARACTERS, GrammarCompiler, GrammarFailedError, Matcher
from caudal.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", 'y"z']}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(smollm2).metadata)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def new_mask(tokenizer: Tokenizer) -> np.ndarray:
    return np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)


def allowed(matcher: Matcher, mask: np.ndarray) -> np.ndarray:
    mask[:] = 0xFFFFFFFF
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def random_output(matcher: Matcher, tokenizer: Tokenizer, seed: int) -> str | None:
    """Text of tokens drawn from the masks; None if it would not end. Tokens that end something are preferred, as a
    drunken model never closes its strings."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(400):
        choices = allowed(matcher, new_mask(tokenizer))
        assert len(choices) > 0
        token_id = int(rng.choice(choices))
        if token_id in tokenizer.eos_ids:
            return tokenizer.decode(ids)
        ids.append(token_id)
        if matcher.accept(token_id):
            return tokenizer.decode(ids)
    return None


@pytest.mark.parametrize("seed", range(8))
def test_random_outputs_follow_a_schema(compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int) -> None:
    text = random_output(compiler.compile(Grammar("json_schema", json.dumps(PERSON), "x")), tokenizer, seed)
    assert text is not None
    value: dict[str, Any] = json.loads(text)
    assert {"name", "age"} <= value.keys() <= {"name", "age", "tags"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 120
    assert set(value.get("tags", ())) <= {"x", 'y"z'}
    assert len(value.get("tags", ())) <= 3


OTHERS: list[tuple[Grammar, str]] = [
    (Grammar("regex", "[0-9]{3}-[a-f]{2,4}", "x"), "[0-9]{3}-[a-f]{2,4}"),
    (Grammar("choice", json.dumps(["yes", "no", 'may"be\n', "não"]), "x"), 'yes|no|may"be\n|não'),
    (
        Grammar("lark", 'start: "(" NUMBER ("," NUMBER)? ")"\nNUMBER: /[0-9]{1,3}/', "x"),
        r"\([0-9]{1,3}(,[0-9]{1,3})?\)",
    ),
]


@pytest.mark.parametrize(("grammar", "pattern"), OTHERS, ids=[g.kind for g, _ in OTHERS])
def test_random_outputs_follow_the_grammar(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, pattern: str
) -> None:
    matcher = compiler.compile(grammar)
    texts = [random_output(matcher.copy(), tokenizer, seed) for seed in range(30)]
    for text in texts:
        assert text is not None
        assert re.fullmatch(pattern, text), text
    assert len(set(texts)) > 2


def test_a_token_that_is_not_allowed_is_an_error(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(Grammar("regex", "[0-9]+", "x"))
    letter = tokenizer.encode("a", add_special=False)[0]
    assert letter not in allowed(matcher, new_mask(tokenizer))
    with pytest.raises(GrammarFailedError):
        matcher.accept(letter)
    with pytest.raises(GrammarFailedError):
        matcher.fill(new_mask(tokenizer))


def test_copies_are_independent(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    first = compiler.compile(Grammar("choice", '["ab", "cd"]', "x"))
    second = first.copy()
    a, c = (tokenizer.encode(letter, add_special=False)[0] for letter in "ac")
    assert not first.accept(a)
    assert c in allowed(second, new_mask(tokenizer))
    assert c not in allowed(first, new_mask(tokenizer))


def test_special_tokens_other_than_the_end_are_never_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(Grammar("regex", "(.|\n)*", "x"))
    special = [i for i in allowed(matcher, new_mask(tokenizer)) if tokenizer.is_special(int(i))]
    assert set(special) <= set(tokenizer.eos_ids)
    assert special


REFUSED: dict[str, Grammar] = {
    "no such type": Grammar("json_schema", '{"type": "thing"}', "p"),
    "not JSON": Grammar("json_schema", '{"type": ', "p"),
    "no schema": Grammar("json_schema", "[1]", "p"),
    "nested too deep": Grammar("json_schema", "[" * 100_000, "p"),
    "a schema elsewhere": Grammar("json_schema", '{"$ref": "http://example.com/schema"}', "p"),
    "no regex": Grammar("regex", "(", "p"),
    "no Lark": Grammar("lark", "start: ::", "p"),
    "unknown rule": Grammar("lark", "start: other", "p"),
    "too long": Grammar("regex", "a" * (MAX_CHARACTERS + 1), "p"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_grammars_that_cannot_be_used(compiler: GrammarCompiler, case: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(REFUSED[case])
    assert caught.value.param == "p"
    assert len(str(caught.value)) < 700


def test_a_schema_with_300_tools(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    tools = [
        {
            "type": "object",
            "properties": {"name": {"const": f"tool_{i}"}, "arguments": {"type": "object"}},
            "required": ["name", "arguments"],
        }
        for i in range(300)
    ]
    matcher = compiler.compile(Grammar("json_schema", json.dumps({"anyOf": tools}), "x"))
    assert len(allowed(matcher, new_mask(tokenizer))) > 0
