"""Bodies of llama.cpp's own routes, and what they mean for the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard, cast

from pydantic import AliasChoices, Field

from caudal.api.errors import ApiError, invalid, unsupported
from caudal.api.http import Body
from caudal.api.openai_requests import MAX_CHOICES, Int64, Stop, check_length, tokenize
from caudal.api.service import ServedModel, Tokenizer
from caudal.core import Grammar, SamplingParams

RANDOM_SEED = 2**32 - 1  # llama.cpp's -1
SMALLEST = 1e-6  # of a share of probabilities: only the best token remains, as with 0 in llama.cpp
MAX_LOGIT_BIAS = 1024
MAX_BIASED_CHARACTERS = 256  # of one text in a logit_bias
# In the engine's order (engine.sampling), with llama.cpp's names.
SAMPLERS = ("penalties", "temperature", "top_n_sigma", "min_p", "top_k", "typ_p", "top_p")
# llama.cpp's default order, which clients may send without a wish behind it; the ones that Caudal does not have are
# refused where they would do something.
DEFAULT_SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
_LETTERS = dict(zip("edskypmxt", DEFAULT_SAMPLERS, strict=True))
_SYNONYMS = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature"}
# Numbers that change the answer and are not served, with what switches each off.
_OFF: dict[str, tuple[float, ...]] = {
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "min_keep": (0, 1),
    "n_indent": (0,),
}
_UPPER_OFF = ("t_max_predict_ms", "adaptive_target")  # switched off by any number that is not above 0
_REFUSED = ("grammar", "response_format", "lora", "multimodal_data", "image_data", "post_sampling_probs")


class CompletionBody(Body):
    """`POST /completion`. Ranges are checked by the engine, once for all dialects."""

    model: str | None = None
    prompt: Any = None  # `parse_prompts` checks it
    n_predict: int = Field(
        -1, ge=-2, lt=2**63, validation_alias=AliasChoices("n_predict", "max_completion_tokens", "max_tokens")
    )
    n_cmpl: int = Field(1, ge=1, le=128, validation_alias=AliasChoices("n_cmpl", "n"))
    stream: bool = False
    temperature: float = 0.8
    top_k: Int64 = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    repeat_penalty: float = 1.0
    repeat_last_n: Int64 = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Int64 = -1
    stop: Stop = Field(default=[])
    n_probs: int = Field(0, validation_alias=AliasChoices("n_probs", "logprobs"))
    logit_bias: Any = None  # `bias` checks it
    samplers: list[str] | str | None = None
    json_schema: dict[str, Any] | bool | None = None
    cache_prompt: bool = True
    ignore_eos: bool = False
    return_tokens: bool = False
    response_fields: list[str] | None = None

    def grammar(self) -> Grammar | None:
        """What the output must look like; None: anything."""
        if self.json_schema is None:
            return None
        return Grammar("json_schema", json.dumps(self.json_schema), "json_schema")

    def order(self) -> list[str]:
        """The names of the samplers that are to run; others are off. Raises a 400 `ApiError` for another order."""
        if self.samplers is None:
            return list(DEFAULT_SAMPLERS)
        sent = [_LETTERS.get(c, c) for c in self.samplers] if isinstance(self.samplers, str) else self.samplers
        names = [_SYNONYMS.get(name, name) for name in sent]
        if names == [name for name in DEFAULT_SAMPLERS if name in names]:
            return names
        unknown = [name for name in names if name not in DEFAULT_SAMPLERS]
        if unknown:
            raise unsupported("samplers", f"The sampler '{unknown[0][:40]}'")
        steps = [name for name in names if name in SAMPLERS]
        if steps != [name for name in SAMPLERS if name in steps]:
            raise ApiError(
                400,
                "Samplers in this order are not supported. Leave 'samplers' out, or send them in llama.cpp's default "
                f"order or in Caudal's: {', '.join(SAMPLERS)}.",
                param="samplers",
                code="unsupported_parameter",
            )
        return names

    def sampling(self, tokenizer: Tokenizer) -> SamplingParams:
        """The engine's parameters, which it checks. Raises a 400 `ApiError`."""
        on = self.order()
        has_penalties = "penalties" in on and self.repeat_last_n != 0
        biased, banned = self.bias(tokenizer)
        return SamplingParams(
            n=self.n_cmpl,
            max_tokens=None if self.n_predict < 0 else max(1, self.n_predict),
            temperature=max(0.0, self.temperature) if "temperature" in on else 1.0,
            top_k=max(0, self.top_k) if "top_k" in on else 0,
            top_p=_share(self.top_p) if "top_p" in on else 1.0,
            min_p=self.min_p if "min_p" in on else 0.0,
            typical_p=_share(self.typical_p) if "typ_p" in on else 1.0,
            top_n_sigma=max(0.0, self.top_n_sigma) if "top_n_sigma" in on else 0.0,
            repetition_penalty=self.repeat_penalty if has_penalties else 1.0,
            presence_penalty=self.presence_penalty if has_penalties else 0.0,
            frequency_penalty=self.frequency_penalty if has_penalties else 0.0,
            seed=None if self.seed in (-1, RANDOM_SEED) else self.seed,
            stop=tuple(self.stop),
            logit_bias=tuple(biased.items()),
            bad_token_ids=tuple(banned),
            ignore_eos=self.ignore_eos,
            logprobs=self.n_probs or None,
        )

    def bias(self, tokenizer: Tokenizer) -> tuple[dict[int, float], list[int]]:
        """What is added to the logits of tokens, and the tokens that are never chosen. A text stands for all of its
        tokens, `false` for never. Raises a 400 `ApiError`."""
        biased: dict[int, float] = {}
        banned: list[int] = []
        for key, value in _pairs(self.logit_bias):
            for token_id in [key] if isinstance(key, int) else tokenizer.encode(key, add_special=False):
                if value is False:
                    banned.append(token_id)
                else:
                    biased[token_id] = value
        return biased, banned

    def settings(self, params: SamplingParams, max_model_len: int) -> dict[str, Any]:
        """`generation_settings` of a reply: what was done."""
        steps = self.order()
        return {
            "n_ctx": max_model_len,
            "n_predict": self.n_predict,
            "max_tokens": self.n_predict,
            "seed": RANDOM_SEED if params.seed is None else params.seed,
            "temperature": params.temperature,
            "dynatemp_range": 0.0,
            "dynatemp_exponent": 1.0,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "top_n_sigma": params.top_n_sigma or -1.0,
            "xtc_probability": 0.0,
            "xtc_threshold": 0.1,
            "typical_p": params.typical_p,
            "repeat_last_n": -1,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "dry_multiplier": 0.0,
            "mirostat": 0,
            "stop": list(params.stop),
            "n_keep": 0,
            "n_discard": 0,
            "ignore_eos": params.ignore_eos,
            "stream": self.stream,
            "logit_bias": [{"id": token_id, "bias": bias} for token_id, bias in params.logit_bias],
            "n_probs": self.n_probs,
            "min_keep": 0,
            "grammar": "",
            "samplers": [name for name in SAMPLERS if name in steps],
            "lora": [],
        }


class ExtraFile(Body):
    """A file that the model may look at."""

    text: str
    filename: str = "tmp"


class InfillBody(CompletionBody):
    """`POST /infill`."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] = Field(default=[])
    prompt: str = ""


class ContentBody(Body):
    """llama.cpp's `POST /tokenize`."""

    model: str | None = None
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises a 400 `ApiError` when a body asks for something that Caudal would have to ignore."""
    for name in _REFUSED:
        if body.get(name):
            raise unsupported(name, f"'{name}'")
    for name, off in _OFF.items():
        if body.get(name, off[0]) not in off:
            raise unsupported(name, f"'{name}' other than {off[0]}")
    for name in _UPPER_OFF:
        value: object = body.get(name, 0)
        if not isinstance(value, int | float) or value > 0:
            raise unsupported(name, f"'{name}' above 0")


def _share(value: float) -> float:
    return min(1.0, max(SMALLEST, value))


def _pairs(value: Any) -> Iterator[tuple[int | str, float | bool]]:
    """The entries of a `logit_bias`, an object or a list of pairs."""
    if value is None:
        return
    if isinstance(value, dict):
        entries: list[Any] = [[_token(key), bias] for key, bias in cast("dict[str, Any]", value).items()]
    elif isinstance(value, list):
        entries = cast("list[Any]", value)
    else:
        raise invalid("logit_bias", "must be an object or a list of pairs")
    if len(entries) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"may have at most {MAX_LOGIT_BIAS} entries")
    for entry in entries:
        pair = cast("list[Any]", entry) if isinstance(entry, list) else []
        if len(pair) != 2 or not (_is_int(pair[0]) or isinstance(pair[0], str)):
            raise invalid("logit_bias", "must consist of pairs of a token id or text and a number or false")
        if pair[1] is True or not isinstance(pair[1], int | float):
            raise invalid("logit_bias", "a bias must be a number, or false for never")
        if isinstance(pair[0], str) and len(pair[0]) > MAX_BIASED_CHARACTERS:
            raise invalid("logit_bias", f"a text may have at most {MAX_BIASED_CHARACTERS} characters")
        yield pair[0], pair[1]


def _token(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() and len(key) < 10 else key


def _is_int(value: Any) -> TypeGuard[int]:
    return type(value) is int  # bool is another type


# --------------------------------------------------------------------------------------------- prompts


def _is_mixed(value: Any) -> TypeGuard[list[int | str]]:
    """Token ids and texts that make one prompt together; a list of texts only is a list of prompts."""
    items = cast("list[Any]", value) if isinstance(value, list) else []
    return all(_is_int(item) or isinstance(item, str) for item in items) and any(map(_is_int, items))


def parse_prompts(body: CompletionBody) -> list[list[int | str]]:
    """Each prompt as its parts. Raises a 400 `ApiError`."""
    value: Any = body.prompt
    if value is None:
        raise ApiError(400, "Missing required parameter: 'prompt'.", param="prompt")
    given = cast("list[Any]", value) if isinstance(value, list) and not _is_mixed(value) else [value]
    if not given:
        raise invalid("prompt", "must not be empty")
    if len(given) * body.n_cmpl > MAX_CHOICES:
        raise ApiError(400, f"Prompts times 'n_cmpl' must be at most {MAX_CHOICES}.", param="prompt")
    return [_parts(prompt) for prompt in given]


def _parts(prompt: Any) -> list[int | str]:
    if isinstance(prompt, dict):
        fields = cast("dict[str, Any]", prompt)
        if fields.get("multimodal_data"):
            raise unsupported("prompt.multimodal_data", "'multimodal_data'")
        prompt = fields.get("prompt_string")
    if isinstance(prompt, str):
        return [prompt]
    if _is_mixed(prompt):
        return prompt
    raise invalid("prompt", "must be text, token ids, a list of both, or a list of such prompts")


async def encode_prompts(model: ServedModel, prompts: Sequence[Sequence[int | str]]) -> list[list[int]]:
    """Token ids of each prompt; BOS comes before a text at its start. Raises as `tokenize` does."""
    starts: list[str] = []
    others: list[str] = []
    for parts in prompts:
        check_length(model, "".join(part for part in parts if isinstance(part, str)))
        starts += [part for part in parts[:1] if isinstance(part, str)]
        others += [part for part in parts[1:] if isinstance(part, str)]
    encoded_starts = iter(await tokenize(model, starts, add_special=True))
    encoded_others = iter(await tokenize(model, others, add_special=False))
    result: list[list[int]] = []
    for parts in prompts:
        ids: list[int] = []
        for i, part in enumerate(parts):
            ids += [part] if isinstance(part, int) else next(encoded_others if i else encoded_starts)
        result.append(ids)
    return result


async def encode_infill(model: ServedModel, body: InfillBody) -> list[int]:
    """The prompt for the text between prefix and suffix. Raises a 400 `ApiError` if the model has no such prompts."""
    fim = model.tokenizer.fim_ids
    if not {"fim_pre", "fim_suf", "fim_mid"} <= fim.keys():
        raise ApiError(
            400,
            "Infill is not supported by this model: its vocabulary has no tokens for prefix, suffix and middle.",
            type="not_supported_error",
        )
    parts: list[int | str] = []
    if body.input_extra and {"fim_rep", "fim_sep"} <= fim.keys():
        parts += [fim["fim_rep"], "myproject\n"]
        for extra in body.input_extra:
            parts += [fim["fim_sep"], f"{extra.filename}\n", extra.text]
        parts += [fim["fim_sep"], "filename\n"]
    else:
        parts += [extra.text for extra in body.input_extra]
    parts += [fim["fim_pre"], body.input_prefix, fim["fim_suf"], body.input_suffix, fim["fim_mid"], body.prompt]
    texts = [part for part in parts if isinstance(part, str)]
    check_length(model, "".join(texts))
    # what people wrote is text, also where it looks like a marker
    encoded = iter(await tokenize(model, texts, add_special=False, parse_special=False))
    ids: list[int] = model.tokenizer.encode("")  # BOS, if the model has one
    for part in parts:
        ids += next(encoded) if isinstance(part, str) else [part]
    return ids


async def tokenize_content(model: ServedModel, body: ContentBody) -> dict[str, Any]:
    """The reply to llama.cpp's `/tokenize`. Raises as `tokenize` does."""
    (ids,) = await tokenize(model, [body.content], add_special=body.add_special, parse_special=body.parse_special)
    if not body.with_pieces:
        return {"tokens": ids}

    def pieces() -> list[dict[str, Any]]:
        return [{"id": token_id, "piece": _piece(model.tokenizer.token_bytes(token_id))} for token_id in ids]

    return {"tokens": await asyncio.to_thread(pieces)}


def _piece(raw: bytes) -> str | list[int]:
    """A token as text; as its bytes, if it is a part of a character."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)
