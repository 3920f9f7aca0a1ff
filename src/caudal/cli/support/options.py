"""Flags generated from the frozen settings: names, types and defaults are written once, in their dataclass."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import click

from caudal.config import EngineConfig, ServerConfig, format_size, parse_size
from caudal.core import SamplingParams

_Command = TypeVar("_Command", bound=Callable[..., Any])
_T = TypeVar("_T")

SAMPLING_HELP = {
    "max_tokens": "Tokens to generate at most; default: until the context is full.",
    "min_tokens": "Tokens to generate before an end token may come.",
    "temperature": "Randomness; 0: always the most likely token.",
    "top_k": "Choose among the K most likely tokens; 0: all.",
    "top_p": "Choose among the likeliest tokens that hold this share of the probability.",
    "min_p": "Drop tokens less likely than this share of the best one's probability.",
    "typical_p": "Keep this share of the probability, the most typical tokens first.",
    "top_n_sigma": "Keep logits within this many standard deviations of the best; 0: off.",
    "repetition_penalty": "Divide the logits of tokens that occurred already; 1: off.",
    "presence_penalty": "Subtract from the logits of tokens in the answer so far.",
    "frequency_penalty": "Subtract for each time that a token is in the answer so far.",
    "seed": "Same seed, same answer; default: a new one each time.",
    "stop": "Stop before this text; may be given several times.",
    "ignore_eos": "Go on after an end token.",
}
"""The sampling fields offered as flags, with their help (`core` has no place for it)."""


CONVERSATION_DEFAULTS = {"temperature": 0.7, "min_p": 0.05}
"""Sampling for people: the neutral values let a small model wander off. The API keeps OpenAI's defaults."""


class Size(click.ParamType[int]):
    """Bytes, written as 64MiB, 2GiB or a plain number."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class IntList(click.ParamType[tuple[int, ...]]):
    """Integers separated by commas, none below `minimum`."""

    name = "n,n,..."

    def __init__(self, minimum: int) -> None:
        self.minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if not isinstance(value, str):
            return tuple(value)
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of integers such as 1,4,16", param, ctx)
        if any(number < self.minimum for number in numbers):
            self.fail(f"{value!r} has a number below {self.minimum}", param, ctx)
        return numbers


def _flag(field: dataclasses.Field[Any]) -> str:
    return field.metadata.get("flag") or "--" + field.name.replace("_", "-")


def _option(field: dataclasses.Field[Any], hint: Any, help: str, default: Any) -> click.Option:
    """One flag for one dataclass field."""
    arguments = [a for a in typing.get_args(hint) if a is not type(None)]
    origin = typing.get_origin(hint)
    flag = _flag(field)
    common: dict[str, Any] = {"help": help, "default": default}
    if hint is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}", field.name], show_default=True, **common)
    if origin is typing.Literal:
        return click.Option([flag, field.name], type=click.Choice(arguments), show_default=True, **common)
    if origin is tuple:
        return click.Option([flag, field.name], type=arguments[0], multiple=True, **common)
    kind = hint if isinstance(hint, type) else arguments[0]
    show: bool | str = default is not None
    if field.metadata.get("size"):
        kind, show = Size(), format_size(default) if default else False
    return click.Option([flag, field.name], type=kind, show_default=show, **common)


def _add_options(
    settings: type, helps: Mapping[str, str], defaults: Mapping[str, Any] | None = None
) -> Callable[[_Command], _Command]:
    hints = typing.get_type_hints(settings)
    fields = [field for field in dataclasses.fields(settings) if field.name in helps]
    defaults = {field.name: field.default for field in fields} | dict(defaults or {})

    def decorate(function: _Command) -> _Command:
        # click collects parameters from the last decorator to the first; so do we.
        params: list[click.Parameter] = function.__dict__.setdefault("__click_params__", [])
        params += [
            _option(field, hints[field.name], helps[field.name], defaults[field.name]) for field in reversed(fields)
        ]
        return function

    return decorate


def _setting_helps(settings: type, only: Collection[str] | None = None) -> dict[str, str]:
    return {f.name: f.metadata["help"] for f in dataclasses.fields(settings) if only is None or f.name in only}


def engine_options(*only: str) -> Callable[[_Command], _Command]:
    """Flags of EngineConfig's fields (all, or only the named ones)."""
    return _add_options(EngineConfig, _setting_helps(EngineConfig, only or None))


server_options = _add_options(ServerConfig, _setting_helps(ServerConfig))
"""Flags of ServerConfig's fields."""

sampling_options = _add_options(SamplingParams, SAMPLING_HELP, CONVERSATION_DEFAULTS)
"""Flags of the SamplingParams fields named in SAMPLING_HELP."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")

model_argument = click.argument("model")


def take(settings: type[_T], values: dict[str, Any]) -> _T:
    """Build the settings from a command's keyword arguments, and remove them there."""
    names = {field.name for field in dataclasses.fields(settings)}  # type: ignore[arg-type]
    return settings(**{name: values.pop(name) for name in list(values) if name in names})


def parse_sampling(name: str, text: str) -> object:
    """The value of one sampling field from text, as its flag would read it. Raises click.UsageError."""
    field = next((f for f in dataclasses.fields(SamplingParams) if f.name == name.replace("-", "_")), None)
    if field is None or field.name not in SAMPLING_HELP:
        raise click.UsageError(f"no such setting: {name}; there are {', '.join(SAMPLING_HELP)}")
    default = CONVERSATION_DEFAULTS.get(field.name, field.default)
    option = _option(field, typing.get_type_hints(SamplingParams)[field.name], "", default)
    if text in ("none", "default"):
        return default
    value = option.type.convert(text, option, None)
    return (value,) if option.multiple else value
