"""Grammars that outputs must follow, with llguidance: JSON schemas, regular expressions, choices and Lark grammars.

A grammar is compiled once for a request, in a thread of its own, and copied for each of its sequences. While the
model computes, the matcher of a sequence writes the mask of tokens that may come next.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from caudal.core import CaudalError, InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions
    from numpy.typing import NDArray

    from caudal.core import Grammar
    from caudal.text.tokenizer import Tokenizer

MAX_CHARACTERS = 1024**2  # of a grammar
# JSON is written without line breaks and with single spaces where the model wants them: a small model that may write
# any white space often never stops writing it.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"\x20?"}
# Work for compiling and for one mask, in llguidance's units: about a tenth of a second and 30 milliseconds.
_COMPILE_FUEL, _MASK_FUEL = 5_000_000, 500_000


class GrammarFailedError(CaudalError):
    """A grammar turned out too complex while text was generated, or the text left it."""


class Matcher:
    """One sequence's place in its grammar. Implements `core.TokenMatcher`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy())

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Bit i % 32 of word i / 32: token i may come next. Raises GrammarFailedError."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    def accept(self, token_id: int) -> bool:
        """Go on behind a token; whether nothing may follow it. Raises GrammarFailedError."""
        self._matcher.consume_token(token_id)
        self._check()
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailedError(f"the grammar failed: {self._matcher.get_error()}")


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiled: LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> Matcher:
        """Raises InvalidRequestError for a grammar that is not valid, not supported or too large."""
        if len(grammar.text) > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"the grammar has {len(grammar.text)} characters; at most {MAX_CHARACTERS} are allowed", grammar.param
            )
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(
            self._vocabulary(),
            _source(grammar),
            log_level=0,
            limits=LLParserLimits(initial_lexer_fuel=_COMPILE_FUEL, step_lexer_fuel=_MASK_FUEL),
        )
        if matcher.is_error():
            reason = matcher.get_error().strip().splitlines()[0][:500]
            raise InvalidRequestError(f"the grammar cannot be used: {reason}", grammar.param)
        return Matcher(matcher)

    def _vocabulary(self) -> LLTokenizer:
        """The trie of all tokens; it takes a moment and is made when the first grammar comes."""
        with self._lock:
            if self._compiled is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                view = _Vocabulary(self._tokenizer)
                self._compiled = LLTokenizer(TokenizerWrapper(view), eos_token=view.eos_token_ids)
            return self._compiled


class _Vocabulary:
    """A tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = sorted(tokenizer.eos_ids)
        self.eos_token_id = self.eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), add_special=False)


def _source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_schema":
            try:
                schema: Any = json.loads(grammar.text)
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(f"the JSON schema is not valid JSON: {error}", grammar.param) from error
            if not isinstance(schema, dict | bool):
                raise InvalidRequestError("a JSON schema must be an object, or true or false", grammar.param)
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            choices: list[str] = json.loads(grammar.text)
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
