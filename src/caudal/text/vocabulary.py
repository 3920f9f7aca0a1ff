"""The vocabulary in a model file's metadata, checked: tokens, their kinds, scores, merges and special ids.

Source: the `tokenizer.ggml.*` keys of the GGUF specification. Where a file leaves something out, the defaults are
llama.cpp's, because that is what the files are made for.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from caudal.core import InvalidModelFileError, UnsupportedModelError
from caudal.text.pretokenizers import PreTokenizer, pre_tokenizer

MAX_TOKEN_CHARS = 1024  # no vocabulary in use comes near; a longer token is a damaged or hostile file
MAX_TOKENS = 4_000_000


class TokenKind(enum.IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


Model = Literal["bpe", "spm", "wpm"]
_MODELS: dict[str, Model] = {"gpt2": "bpe", "llama": "spm", "bert": "wpm"}
_DEFAULT_IDS: dict[Model, dict[str, int]] = {
    "bpe": {},
    "spm": {"bos": 1, "eos": 2, "unknown": 0},
    "wpm": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
}

# Token texts that end a generation even where the file does not say so.
_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
    *("<end_of_utterance>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
)
# Markers between the parts of fill-in-the-middle prompts; past one of the last three a model writes another file.
_FIM_TEXTS: dict[str, tuple[str, ...]] = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_FIM_ENDS = ("fim_pad", "fim_rep", "fim_sep")
# Parts of the answer itself in OpenAI's harmony format: shown, and never the end.
_HARMONY_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Everything that a tokenizer is built from. Ids index `tokens` and `kinds`."""

    model: Model
    pre: PreTokenizer | None  # of bpe
    tokens: Sequence[str]
    kinds: Sequence[int]  # TokenKind values
    ids: Mapping[str, int]  # of the tokens; of equal ones the first
    scores: Sequence[float]  # of spm; empty otherwise
    merges: Sequence[str]  # of bpe: "left right", best first; empty otherwise
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    separator_id: int | None
    end_ids: frozenset[int]  # tokens that end a generation
    fim_ids: Mapping[str, int]  # of the markers for filling a gap, by GGUF's names: fim_pre, fim_suf, fim_mid ...
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    lowercase: bool  # of wpm
    strip_accents: bool  # of wpm
    strip_after: frozenset[int]  # tokens that swallow the white space behind them
    strip_before: frozenset[int]

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Vocabulary:
        """Raises InvalidModelFileError (missing or inconsistent keys) or UnsupportedModelError (kind of tokenizer)."""
        name = _get(metadata, "model", str)
        if name is None:
            raise InvalidModelFileError("the file has no tokenizer: the key tokenizer.ggml.model is missing")
        model = _MODELS.get(name)
        if model is None:
            raise UnsupportedModelError(
                f"tokenizer {name!r} (tokenizer.ggml.model) is not supported; supported are "
                f"{', '.join(f'{key!r} ({value})' for key, value in _MODELS.items())}"
            )
        tokens = _tokens(metadata)
        ids = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))
        rule = pre_tokenizer(_get(metadata, "pre", str) or "default") if model == "bpe" else None
        kinds = _numbers(metadata, "token_type", len(tokens), int) or [int(TokenKind.NORMAL)] * len(tokens)
        special = _SpecialIds(metadata, model, tokens)
        fim_ids = _fim_ids(ids, special)
        end_ids = _mark_special(ids, kinds, special, fim_ids)
        add_bos = _get(metadata, "add_bos_token", bool)
        if add_bos is None:
            add_bos = rule.add_bos if rule else True
        lowercase = _get(metadata, "normalizer.lowercase", bool)
        strip_accents = _get(metadata, "normalizer.strip_accents", bool)
        prefix = _get(metadata, "add_space_prefix", bool)
        strip_before, strip_after = _strip_rules(metadata, ids, kinds)
        return cls(
            model=model,
            pre=rule,
            tokens=tokens,
            kinds=kinds,
            ids=ids,
            scores=(_numbers(metadata, "scores", len(tokens), float) or [0.0] * len(tokens)) if model == "spm" else (),
            merges=_merges(metadata) if model == "bpe" else (),
            bos_id=special["bos"],
            eos_id=special["eos"],
            unknown_id=special["unknown"],
            separator_id=special["seperator"],
            end_ids=end_ids,
            fim_ids=fim_ids,
            add_bos=add_bos,
            add_eos=_get(metadata, "add_eos_token", bool) or False,
            add_space_prefix=model == "spm" and prefix is not False,
            lowercase=lowercase is not False,
            strip_accents=lowercase is not False if strip_accents is None else strip_accents,
            strip_before=strip_before,
            strip_after=strip_after,
        )


class _SpecialIds:
    """Special ids by GGUF's names: what the file says, where that is a token, else the default of the model."""

    def __init__(self, metadata: Mapping[str, object], model: Model, tokens: Sequence[str]) -> None:
        self._metadata = metadata
        self._defaults = _DEFAULT_IDS[model]
        self._num_tokens = len(tokens)
        # Falcon's files are older than these keys.
        if model == "bpe" and len(tokens) > 11 and tokens[11] == "<|endoftext|>":
            self._defaults = {"bos": 11, "eos": 11}

    def __getitem__(self, name: str) -> int | None:
        # -1 and 2**32 - 1 are in use for "none"; ids past the end do occur in files cut down by hand.
        for value in (_get(self._metadata, f"{name}_token_id", int), self._defaults.get(name)):
            if value is not None and 0 <= value < self._num_tokens:
                return value
        return None


def special_token_texts(metadata: Mapping[str, object]) -> tuple[str, str]:
    """The texts of BOS and EOS, each empty if the model has none; without reading the whole vocabulary."""
    model = _MODELS.get(_get(metadata, "model", str) or "")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if model is None or not isinstance(tokens, Sequence):
        return "", ""
    texts = cast("Sequence[str]", tokens)
    special = _SpecialIds(metadata, model, texts)
    bos_id, eos_id = special["bos"], special["eos"]
    return "" if bos_id is None else texts[bos_id], "" if eos_id is None else texts[eos_id]


def control_token_texts(metadata: Mapping[str, object]) -> list[str]:
    """The texts of the tokens that steer a model: what the file calls control tokens, and all that end a generation."""
    tokens = _strings(metadata, "tokens") or []
    kinds = _numbers(metadata, "token_type", len(tokens), int) or []
    control = {token for token, kind in zip(tokens, kinds, strict=False) if kind == TokenKind.CONTROL}
    return sorted(control | (set(_END_TEXTS) & set(tokens)))


def _fim_ids(ids: Mapping[str, int], special: _SpecialIds) -> dict[str, int]:
    """The markers that the file names, or the tokens whose texts are known as such."""
    found = {
        name: next((ids[text] for text in texts if text in ids), None) if special[name] is None else special[name]
        for name, texts in _FIM_TEXTS.items()
    }
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def _mark_special(
    ids: Mapping[str, int], kinds: list[int], special: _SpecialIds, fim_ids: Mapping[str, int]
) -> frozenset[int]:
    """The tokens that end a generation. Makes control tokens of those that the file calls normal by mistake."""
    end_ids = {ids[text] for text in _END_TEXTS if text in ids}
    if "</s>" in ids and kinds[ids["</s>"]] == TokenKind.NORMAL:  # a piece of HTML, as in Qwen
        end_ids.discard(ids["</s>"])
    end_ids.update(token_id for name in ("eos", "eot", "eom") if (token_id := special[name]) is not None)
    for token_id in (*end_ids, special["bos"]):
        if token_id is not None:
            kinds[token_id] = TokenKind.CONTROL
    for name, token_id in fim_ids.items():
        if special[name] is None:
            kinds[token_id] = TokenKind.CONTROL
        if name in _FIM_ENDS:
            end_ids.add(token_id)
    for text in _HARMONY_TEXTS:
        if text in ids:
            kinds[ids[text]] = TokenKind.USER_DEFINED

    def ends(*texts: str) -> bool:
        return all(ids.get(text) in end_ids for text in texts)

    # In harmony and Solar Open "<|end|>" ends one message of several.
    if ends("<|end|>", "<|return|>", "<|call|>") or (
        ends("<|end|>", "<|flush|>") and (ends("<|call|>") or ends("<|calls|>"))
    ):
        end_ids.discard(ids["<|end|>"])
        kinds[ids["<|end|>"]] = TokenKind.USER_DEFINED
    # Gemma 4 has "</s>" as a piece of HTML too, but one that is taken whole.
    if ends("</s>", "<|tool_response>"):
        end_ids.discard(ids["</s>"])
        kinds[ids["</s>"]] = TokenKind.USER_DEFINED
    return frozenset(end_ids)


def _strip_rules(
    metadata: Mapping[str, object], ids: Mapping[str, int], kinds: Sequence[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """(tokens that swallow white space before them, tokens that swallow it after them).

    GGUF does not carry these flags of `tokenizer.json`; the model families that have them are known by name.
    """
    model_name = metadata.get("general.name")
    name = model_name.lower() if isinstance(model_name, str) else ""
    pre = _get(metadata, "pre", str) or ""
    architecture = metadata.get("general.architecture")
    if pre in ("jina-v2-de", "jina-v2-es", "jina-v2-code") or architecture in ("nomic-bert-moe", "jina-bert-v3"):
        return frozenset(ids[text] for text in ("<mask>",) if text in ids), frozenset()
    if "phi-3" in name or "phi3" in name:
        keep = {ids[text] for text in ("<unk>", "<s>", "<|endoftext|>") if text in ids}
        kept_whole = (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)
        after = {token_id for token_id, kind in enumerate(kinds) if kind in kept_whole}
        after.update(ids[text] for text in ("</s>",) if text in ids)
        return frozenset(), frozenset(after - keep)
    if "modern-bert" in name:
        return frozenset(ids[text] for text in ("[MASK]",) if text in ids), frozenset()
    return frozenset(), frozenset()


_T = TypeVar("_T")
_N = TypeVar("_N", int, float)


def _get(metadata: Mapping[str, object], key: str, kind: type[_T]) -> _T | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if not isinstance(value, kind):
        raise InvalidModelFileError(
            f"tokenizer.ggml.{key} should be of type {kind.__name__}, not {type(value).__name__}"
        )
    return value


def _array(metadata: Mapping[str, object], key: str) -> list[object] | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    tolist = getattr(value, "tolist", None)  # numpy arrays and array.array, without importing either
    if callable(tolist):
        value = tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidModelFileError(f"tokenizer.ggml.{key} should be an array, not {type(value).__name__}")
    return list(cast("Iterable[object]", value))


def _strings(metadata: Mapping[str, object], key: str) -> list[str] | None:
    values = _array(metadata, key)
    if values is not None and not set(map(type, values)) <= {str}:
        raise InvalidModelFileError(f"tokenizer.ggml.{key} should be an array of strings")
    return cast("list[str] | None", values)


def _numbers(metadata: Mapping[str, object], key: str, length: int, kind: type[_N]) -> list[_N] | None:
    """One number for each token."""
    values = _array(metadata, key)
    if values is None:
        return None
    if not set(map(type, values)) <= {int, kind}:
        raise InvalidModelFileError(f"tokenizer.ggml.{key} should be an array of numbers")
    if len(values) < length:
        raise InvalidModelFileError(f"tokenizer.ggml.{key} has {len(values)} entries for {length} tokens")
    return list(map(kind, cast("list[_N]", values[:length])))


def _tokens(metadata: Mapping[str, object]) -> list[str]:
    tokens = _strings(metadata, "tokens")
    if not tokens:
        raise InvalidModelFileError("the file has no vocabulary: the key tokenizer.ggml.tokens is missing or empty")
    if len(tokens) > MAX_TOKENS:
        raise InvalidModelFileError(f"tokenizer.ggml.tokens has {len(tokens)} tokens; the limit is {MAX_TOKENS}")
    if max(map(len, tokens)) > MAX_TOKEN_CHARS:
        index, token = next((i, token) for i, token in enumerate(tokens) if len(token) > MAX_TOKEN_CHARS)
        raise InvalidModelFileError(f"token {index} has {len(token)} characters; the limit is {MAX_TOKEN_CHARS}")
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError as error:
        raise InvalidModelFileError(f"tokenizer.ggml.tokens is not valid UTF-8: {error.reason}") from error
    return tokens


def _merges(metadata: Mapping[str, object]) -> list[str]:
    merges = _strings(metadata, "merges")
    if merges is None:
        raise InvalidModelFileError("a gpt2 tokenizer needs tokenizer.ggml.merges, and the file has none")
    return merges
