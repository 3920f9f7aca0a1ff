"""Tokens to text while they are generated: whole characters only, stop strings found wherever tokens cut them.

The text that `push` and `flush` give adds up to exactly what `Tokenizer.decode` makes of all the tokens, cut at the
first stop string; how the tokens were divided among the calls does not matter.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from caudal.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DetokenizerOutput:
    """What one call added."""

    text: str  # new text; what may still turn out to be a stop string is held back
    stopped: str | None = None  # the stop string that ended the text, on the call that found it
    num_tokens: int = 0  # tokens taken: all, or up to and with the one that completed the stop string


class Detokenizer:
    """The text of one sequence. Time per token depends on its length only, whatever the number of stop strings."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        keep_leading_space: bool = True,
    ) -> None:
        """`stop`: the text ends before the first of them to be complete (of several complete at once: before the
        longest); `include_stop` leaves it at the end. Text of the first `min_tokens` tokens is not searched.
        `skip_special` leaves control tokens out. `keep_leading_space` is right for text that continues a prompt, see
        `Tokenizer.decode`. Empty stop strings are ignored.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._include_stop = include_stop
        self._num_unsearched = min_tokens
        self._matcher = _Matcher(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.strips_leading_space and not keep_leading_space
        self._held = ""  # decoded, but possibly the start of a stop string
        self._finished = False

    def push(self, token_ids: Iterable[int]) -> DetokenizerOutput:
        """The text that is certain after these tokens. After a stop string nothing more comes.

        Raises InvalidRequestError for a negative id. Ids past the vocabulary, which models with a padded output
        matrix can choose, have no text.
        """
        texts: list[str] = []
        num_tokens = 0
        for token_id in token_ids:
            if self._finished:
                break
            num_tokens += 1
            text = self._decoder.decode(self._bytes(token_id))
            if self._num_unsearched > 0:
                self._num_unsearched -= 1
                texts.append(text)
            elif text:
                text, stopped = self._search(text)
                texts.append(text)
                if stopped is not None:
                    return DetokenizerOutput("".join(texts), stopped, num_tokens)
        return DetokenizerOutput("".join(texts), None, num_tokens)

    def flush(self) -> DetokenizerOutput:
        """The text held back, when no more tokens will come; half a character becomes U+FFFD."""
        if self._finished:
            return DetokenizerOutput("")
        text, stopped = self._search(self._decoder.decode(b"", final=True))
        if stopped is None:
            text += self._held
        self._finished = True
        self._held = ""
        return DetokenizerOutput(text, stopped)

    def _bytes(self, token_id: int) -> bytes:
        if token_id >= self._tokenizer.vocab_size:
            return b""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return b""
        piece = self._tokenizer.token_bytes(token_id)
        if self._strip_space and piece:
            self._strip_space = False
            piece = piece.removeprefix(b" ")
        return piece

    def _search(self, text: str) -> tuple[str, str | None]:
        """(what of the held text and `text` is certain, the stop string found)."""
        match = self._matcher.feed(text)
        if match is not None:
            end, length = match
            text = self._held + text[:end]
            stopped = text[len(text) - length :]
            self._finished = True
            self._held = ""
            return text if self._include_stop else text[: len(text) - length], stopped
        text = self._held + text
        certain = len(text) - self._matcher.depth
        self._held = text[certain:]
        return text[:certain], None


class _Matcher:
    """Finds the first of many strings to be complete in a text that comes in pieces (Aho and Corasick 1975).

    The state is the longest end of the text so far that starts one of the strings; `depth` is its length.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._lengths = [0]  # of the longest string that ends at a state; 0: none
        for string in filter(None, strings):
            self._add(string)
        self._fallbacks = self._link()
        self._state = 0

    @property
    def depth(self) -> int:
        return self._depths[self._state]

    def feed(self, text: str) -> tuple[int, int] | None:
        """(end in `text`, length) of the first string to be complete; of several complete at once the longest."""
        state, following = self._state, self._next
        if state == 0 and following[0].keys().isdisjoint(text):
            return None
        for index, char in enumerate(text):
            while state and char not in following[state]:
                state = self._fallbacks[state]
            state = following[state].get(char, 0)
            if self._lengths[state]:
                self._state = state
                return index + 1, self._lengths[state]
        self._state = state
        return None

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self._depths.append(self._depths[state] + 1)
                self._lengths.append(0)
            state = following
        self._lengths[state] = len(string)

    def _link(self) -> list[int]:
        """For each state the next shorter one; breadth first, so that shorter ones are done before."""
        fallbacks = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._next[state].items():
                fallback = fallbacks[state]
                while fallback and char not in self._next[fallback]:
                    fallback = fallbacks[fallback]
                fallbacks[following] = self._next[fallback].get(char, 0)
                if not self._lengths[following]:
                    self._lengths[following] = self._lengths[fallbacks[following]]
                queue.append(following)
        return fallbacks
