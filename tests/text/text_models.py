"""Small vocabularies written out by hand, as the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence

from caudal.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_alphabet() -> list[str]:
    """GPT-2's characters for the bytes 0 to 255, from the published definition."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in characters:
            characters[byte] = chr(256 + len(characters) - len(printable))
    return [characters[byte] for byte in range(256)]


def metadata(model: str, tokens: Sequence[tuple[str, int]], **keys: object) -> dict[str, object]:
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [text for text, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def bpe(**keys: object) -> dict[str, object]:
    """Bytes, a few merges, and special tokens: 256 to 258 merged, 259 <|bos|>, 260 <|im_end|>, 261 <tool> (user)."""
    merges = ["h i", "Ġ hi", "Ċ Ċ"]
    tokens = [(char, NORMAL) for char in byte_alphabet()]
    tokens += [(merge.replace(" ", ""), NORMAL) for merge in merges]
    tokens += [("<|bos|>", CONTROL), ("<|im_end|>", CONTROL), ("<tool>", USER_DEFINED)]
    return metadata("gpt2", tokens, **{"pre": "gpt-2", "merges": merges, "bos_token_id": 259, **keys})


def spm(**keys: object) -> dict[str, object]:
    """<unk> <s> </s>, the bytes as tokens, then pieces with falling scores."""
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    pieces = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc", "▁▁", "é"]
    tokens += [(piece, NORMAL) for piece in pieces]
    tokens += [("<tool>", USER_DEFINED)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0]
    return metadata("llama", tokens, **{"scores": scores, "bos_token_id": 1, "eos_token_id": 2, **keys})


def wpm(**keys: object) -> dict[str, object]:
    words = ["▁hello", "▁world", "▁wor", "ld", "s", "▁,", "▁e", "▁中"]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [(text, CONTROL) for text in special] + [(text, NORMAL) for text in words]
    ids = {"padding_token_id": 0, "unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3}
    return metadata("bert", tokens, **{**ids, **keys})


def tokenizer(data: dict[str, object]) -> Tokenizer:
    return Tokenizer.from_gguf(data)
