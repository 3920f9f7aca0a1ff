"""Text to token ids and back, from the tokenizer data in a GGUF file, on the `tokenizers` library.

The library does the merging. What GGUF and llama.cpp define around it is here: special tokens are cut out of the text
first and never reach the merges; white space and bytes are mapped as the vocabulary wants; BOS and EOS are added.

Text is never normalized, except by BERT's own rules: decoding what was encoded gives the text back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, cast

from caudal.core import InvalidModelFileError, InvalidRequestError
from caudal.text.vocabulary import TokenKind, Vocabulary

if TYPE_CHECKING:
    import tokenizers

PLAIN_MARK = "\ufdd0"  # in a rendered chat template: what follows is no special token. Unicode keeps it for such uses
SPACE = "\u2581"  # stands for a space in the tokens of SentencePiece and, here, before a word in those of WordPiece
_HIDDEN = (TokenKind.CONTROL, TokenKind.UNKNOWN)
_WORDPIECE_MAX_CHARS = 100  # BERT's own limit: a longer word is unknown


class Tokenizer:
    """Immutable after construction; every method may be called from any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises InvalidModelFileError if the vocabulary contradicts itself."""
        build, piece_bytes = _MODELS[vocabulary.model]
        self._library, self._spelled = build(vocabulary)
        self._vocabulary = replace(vocabulary, merges=(), scores=())  # which the library has now
        self._piece_bytes = piece_bytes
        self._pieces: dict[int, bytes] = {}
        whole = {kind: _texts_of(vocabulary, kind) for kind in (*_HIDDEN, TokenKind.USER_DEFINED)}
        user_defined = whole[TokenKind.USER_DEFINED]
        self._split_user_defined = _Splitter(user_defined, vocabulary)
        self._split_special = _Splitter({k: v for texts in whole.values() for k, v in texts.items()}, vocabulary)
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eos_ids = vocabulary.end_ids  # every token that ends a generation, eos_id among them
        self.fim_ids = vocabulary.fim_ids  # of the markers for filling a gap, by GGUF's names; empty if there are none
        self.max_token_characters = _max_token_characters(vocabulary)
        self.add_bos = vocabulary.add_bos and vocabulary.bos_id is not None
        self.add_eos = vocabulary.add_eos and vocabulary.eos_id is not None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """The tokenizer that a GGUF file describes (keys `tokenizer.ggml.*`; arrays may be lists or numpy arrays).

        Raises UnsupportedModelError for a kind of tokenizer or a pre-tokenizer that Caudal does not have, and
        InvalidModelFileError for missing or inconsistent data.
        """
        return cls(Vocabulary.from_gguf(metadata))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` adds BOS and EOS where the model wants them (for BERT: [CLS] and [SEP]), `parse_special` takes
        the text of a control token for that token; without it such text is ordinary text. Tokens that the vocabulary
        calls user-defined are always taken whole.

        Raises InvalidRequestError if `text` is not valid Unicode (lone surrogates).
        """
        ids: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        ids.extend(self._encode_parts(text, self._split_special if parse_special else self._split_user_defined))
        if add_special:
            last = self._vocabulary.separator_id if self._vocabulary.model == "wpm" else self.eos_id
            if last is not None and (self.add_eos or self._vocabulary.model == "wpm"):
                ids.append(last)
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a rendered chat template: special tokens parsed, BOS first if the model wants one.

        Templates differ in whether they write BOS themselves; there is never a second one. The text of a special
        token behind a `PLAIN_MARK` stays text; the mark itself has no token.

        Raises InvalidRequestError if `text` is not valid Unicode (lone surrogates).
        """
        first, *others = text.split(PLAIN_MARK)
        places: set[int] = set()
        end = len(first)
        for part in others:
            places.add(end)
            end += len(part)
        ids = self._encode_parts(first + "".join(others), self._split_special, places)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False, keep_leading_space: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD.

        SentencePiece and WordPiece put a space before the first word, which is removed again unless
        `keep_leading_space` (for text that continues other text).

        Raises InvalidRequestError for an id outside the vocabulary.
        """
        pieces = [self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i))]
        data = b"".join(pieces)
        if self.strips_leading_space and not keep_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    @property
    def strips_leading_space(self) -> bool:
        """Whether `decode` removes a space at the start of a text."""
        return self._vocabulary.add_space_prefix or self._vocabulary.model == "wpm"

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text: UTF-8, possibly a part of a character. Control tokens give their name.

        Raises InvalidRequestError for an id outside the vocabulary.
        """
        piece = self._pieces.get(token_id)
        if piece is None:
            self._check(token_id)
            token, kind = self._vocabulary.tokens[token_id], self._vocabulary.kinds[token_id]
            if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN):
                piece = token.encode()
            elif kind == TokenKind.BYTE and (value := _byte_value(token)) is not None:
                piece = bytes((value,))
            else:
                piece = self._piece_bytes(token)
            self._pieces[token_id] = piece
        return piece

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it. Raises InvalidRequestError for an id outside the vocabulary."""
        self._check(token_id)
        return self._vocabulary.tokens[token_id]

    def token_id(self, text: str) -> int | None:
        """The id of the token that the vocabulary spells `text`."""
        return self._vocabulary.ids.get(text)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token (or the unknown one), which `skip_special` leaves out."""
        self._check(token_id)
        return self._vocabulary.kinds[token_id] in _HIDDEN

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(f"token id {token_id} is outside the vocabulary (0 to {self.vocab_size - 1})")

    def _encode_parts(self, text: str, splitter: _Splitter, plain: Set[int] = frozenset()) -> list[int]:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequestError(
                    f"the text is not valid Unicode: a lone surrogate at character {error.start}"
                ) from error
        parts = splitter.split(text, plain)
        texts = [part for part in parts if isinstance(part, str)]
        if self._vocabulary.model == "spm":
            # The first word, there and after a token that was cut out, begins with a space like any other.
            prefix = SPACE if self._vocabulary.add_space_prefix else ""
            texts = [prefix + text.replace(" ", SPACE) for text in texts]
        # Not `encode`: this one leaves the offsets out and releases the GIL.
        encodings = iter(self._library.encode_batch_fast(texts, add_special_tokens=False))
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                ids.extend(next(encodings).ids)
            else:
                ids.append(part)
        if self._spelled:
            return [token_id for i in ids for token_id in self._spelled.get(i, (i,))]
        return ids


def _max_token_characters(vocabulary: Vocabulary) -> int | None:
    """Most characters of a text that one token stands for, not counting white space that some special tokens swallow;
    None: any number, as unknown words and neighbouring unknown characters become one token."""
    if vocabulary.model == "bpe" or TokenKind.BYTE in vocabulary.kinds:
        return max(map(len, vocabulary.tokens), default=1)
    return None


_Spelled = Mapping[int, Sequence[int]]  # ids of the library's that stand for several of the vocabulary's


class _Splitter:
    """Cuts whole tokens out of a text: at each place the longest one."""

    def __init__(self, ids: Mapping[str, int], vocabulary: Vocabulary) -> None:
        self._ids = ids
        self._strip_before = vocabulary.strip_before
        self._strip_after = vocabulary.strip_after
        # By their first two characters, the lengths that occur, longest first: a place where no token starts costs
        # one look-up, however many tokens there are.
        lengths: dict[str, set[int]] = {}
        for text in ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        starts = sorted({text[0] for text in ids})
        self._start = re.compile("[" + "".join(map(re.escape, starts)) + "]") if starts else None

    def split(self, text: str, plain: Set[int]) -> list[str | int]:
        """The parts of `text` in order: ordinary text (never empty) and ids. No token starts at a place in `plain`."""
        parts: list[str | int] = []
        done = 0  # text before this is in parts
        place = 0
        while self._start is not None and (match := self._start.search(text, place)):
            begin = match.start()
            token = None if begin in plain else self._longest_at(text, begin)
            if token is None:
                place = begin + 1
                continue
            token_id = self._ids[token]
            before = text[done:begin]
            if token_id in self._strip_before:
                before = before.rstrip(_ASCII_SPACES)
            if before:
                parts.append(before)
            parts.append(token_id)
            done = place = begin + len(token)
            if token_id in self._strip_after:
                done = place = _skip_spaces(text, done)
        if done < len(text):
            parts.append(text[done:])
        return parts

    def _longest_at(self, text: str, begin: int) -> str | None:
        for key in (text[begin : begin + 2], text[begin]):
            for length in self._lengths.get(key, ()):
                token = text[begin : begin + length]
                if token in self._ids:
                    return token
        return None


_ASCII_SPACES = " \t\n\v\f\r"


def _skip_spaces(text: str, place: int) -> int:
    while place < len(text) and text[place] in _ASCII_SPACES:
        place += 1
    return place


def _texts_of(vocabulary: Vocabulary, kind: TokenKind) -> dict[str, int]:
    if kind not in vocabulary.kinds:
        return {}
    tokens = vocabulary.tokens
    return {tokens[i]: i for i, k in enumerate(vocabulary.kinds) if k == kind and tokens[i]}


# ------------------------------------------------------------------------------------- byte-level BPE


def _build_bpe(vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, _Spelled]:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    assert vocabulary.pre is not None
    ids = _without_hidden(vocabulary)
    ignore_merges = vocabulary.pre.ignore_merges
    pairs = [tuple(merge.split(" ", 1)) for merge in vocabulary.merges]
    try:
        model = models.BPE(ids, cast("list[tuple[str, str]]", pairs), ignore_merges=ignore_merges)
    except Exception:  # noqa: BLE001  (the class that the library raises; to check every merge first takes too long)
        model = models.BPE(ids, _applicable(vocabulary.merges, ids), ignore_merges=ignore_merges)
    library = Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in vocabulary.pre.patterns]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return library, {}


def _applicable(merges: Iterable[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges without those of tokens that are not there: vocabularies that were cut down have some."""
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        place = merge.find(" ", 1)
        if place < 0:
            raise InvalidModelFileError(f"tokenizer.ggml.merges has {merge!r}, which is not two tokens")
        left, right = merge[:place], merge[place + 1 :]
        if left in ids and right in ids and left + right in ids:
            pairs.append((left, right))
    return pairs


@cache
def _byte_of_char() -> dict[int, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for 256, 257, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {256 + index: byte for index, byte in enumerate(others)}


def _bpe_bytes(token: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes([table[ord(char)] for char in token])
    except KeyError:  # not written in that alphabet: text as it stands
        return token.encode()


# ---------------------------------------------------------------------------------------- SentencePiece


def _build_spm(vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, _Spelled]:
    from tokenizers import Tokenizer, models

    ids = _without_hidden(vocabulary)
    unknown = None
    if vocabulary.unknown_id is not None:
        unknown = vocabulary.tokens[vocabulary.unknown_id]
        ids[unknown] = vocabulary.unknown_id
    kinds, scores = vocabulary.kinds, vocabulary.scores
    joined = [i for i in ids.values() if kinds[i] not in (TokenKind.BYTE, *_HIDDEN)]
    joined.sort(key=lambda i: -scores[i])
    tokens = [vocabulary.tokens[i] for i in joined]
    # SentencePiece starts from characters, be they tokens or not. Those that are not get ids past the vocabulary's.
    missing = sorted(set("".join(tokens)) - ids.keys())
    spelled: dict[int, list[int]] = {}
    for char in missing:
        spare = len(vocabulary.tokens) + len(spelled)
        ids[char] = spare
        spelled[spare] = _byte_ids(vocabulary, char)
    merges = _spm_merges(tokens, {*tokens, *missing})
    return Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)), spelled


def _spm_merges(tokens: Iterable[str], parts: Set[str]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours that make the token with the best score. As merges of BPE, best first:
    every way to cut a token in two parts. `tokens` are in that order."""
    merges: list[tuple[str, str]] = []
    for token in tokens:
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in parts:
                right = token[cut:]
                if right in parts:
                    merges.append((left, right))
    return merges


def _byte_ids(vocabulary: Vocabulary, char: str) -> list[int]:
    ids = [vocabulary.ids.get(f"<0x{byte:02X}>") for byte in char.encode()]
    unknown = [] if vocabulary.unknown_id is None else [vocabulary.unknown_id]
    return unknown if None in ids else cast("list[int]", ids)


def _spm_bytes(token: str) -> bytes:
    return token.replace(SPACE, " ").encode()


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_value(token: str) -> int | None:
    match = _BYTE_TOKEN.fullmatch(token)
    return int(match[1], 16) if match else None


# -------------------------------------------------------------------------------------------- WordPiece


def _build_wpm(vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, _Spelled]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    if vocabulary.unknown_id is None:
        raise InvalidModelFileError("a bert tokenizer needs an unknown token, and the file has none")
    unknown = vocabulary.tokens[vocabulary.unknown_id]
    # GGUF marks the start of a word, BERT's own files what is not the start.
    ids: dict[str, int] = {
        token[1:] if token.startswith(SPACE) else "##" + token: i for token, i in _without_hidden(vocabulary).items()
    }
    ids[unknown] = vocabulary.unknown_id
    model = models.WordPiece(
        ids, unk_token=unknown, max_input_chars_per_word=_WORDPIECE_MAX_CHARS, continuing_subword_prefix="##"
    )
    library = Tokenizer(model)
    library.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=vocabulary.strip_accents,
        lowercase=vocabulary.lowercase,
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return library, {}


def _without_hidden(vocabulary: Vocabulary) -> dict[str, int]:
    """The tokens that ordinary text may become: control tokens never come out of merges."""
    ids = dict(vocabulary.ids)
    for token, i in vocabulary.ids.items():
        if vocabulary.kinds[i] in _HIDDEN or not token:
            del ids[token]
    return ids


_MODELS: dict[str, tuple[Callable[[Vocabulary], tuple[tokenizers.Tokenizer, _Spelled]], Callable[[str], bytes]]] = {
    "bpe": (_build_bpe, _bpe_bytes),
    "spm": (_build_spm, _spm_bytes),
    "wpm": (_build_wpm, _spm_bytes),
}
