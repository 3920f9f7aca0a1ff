"""Runs chat templates, which are programs in a model file, without letting them do more than make text.

Jinja's sandbox keeps a template away from Python's internals. It does not bound time and memory, so this environment
also counts: every loop turn, macro call, function call, filter and printed value costs a step and the characters that
it handles, from one budget for each rendering, and no step goes on after a deadline. Operations that make a large value
from small ones (multiplication, powers, formatting, padding, joining, replacing), and those that walk through all of a
nested value, are refused before they run if they would take too long. What is left to a hostile template is the time of
single operations on values below the size limits.
"""

from __future__ import annotations

import json
import operator
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import Any, NoReturn, TypeGuard, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from caudal.core import InvalidRequestError, UnsupportedModelError

MAX_SOURCE_CHARS = 1 << 20
MAX_STRING_CHARS = 1 << 24  # of one string, and of the rendered text
MAX_ITEMS = 1 << 20  # of one list or mapping
MAX_INT_BITS = 1 << 12
MAX_STEPS = 1_000_000
MAX_CHARS = 1 << 28  # handled in one rendering
MAX_SECONDS = 10.0

_BUDGET = " budget"  # of the rendering, in its context; a template cannot spell a name with a space
_CONCAT = " concat"
_OPERAND = " operand"
_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


class TemplateLimitError(TemplateRuntimeError):
    """The template used more than it may."""


class RaisedByTemplateError(TemplateRuntimeError):
    """The template called `raise_exception`: the conversation is not one that it can write."""


class TemplateFailedError(Exception):
    """The template ran into an error of its own: it is broken, or its input is not what it expects."""


class _Budget:
    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._chars = MAX_CHARS
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, chars: int) -> None:
        self._steps -= 1
        self._chars -= chars
        if self._steps < 0 or self._chars < 0:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS} steps or handles {MAX_CHARS} characters")
        if self._steps % 64 == 0 and time.monotonic() > self._deadline:
            raise TemplateLimitError(f"it takes longer than {MAX_SECONDS:g} s")


def _budget(context: Context) -> _Budget:
    return cast(_Budget, context.parent[_BUDGET])


class CompiledTemplate:
    """One template, ready to render. Raises UnsupportedModelError if it is not valid Jinja."""

    def __init__(self, source: str, clock: Callable[[], datetime]) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise UnsupportedModelError(
                f"the model's chat template has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}"
            )
        try:
            self._template = Environment(clock).from_string(source)
        except Exception as error:  # Python's own limits may stop the compiler in many ways
            raise UnsupportedModelError(f"the model's chat template is not valid: {error}") from error

    def render(self, variables: Mapping[str, object]) -> str:
        """Raises InvalidRequestError with the template's words if it rejects its input, UnsupportedModelError if it
        breaks out, TemplateLimitError if it goes too far, and TemplateFailedError if it fails in any other way."""
        try:
            return self._render(variables)
        except RaisedByTemplateError as error:
            raise InvalidRequestError(f"the model's chat template rejects this: {error}", "messages") from error
        except SecurityError as error:
            raise UnsupportedModelError(f"the model's chat template is refused: {error}") from error
        except TemplateLimitError:
            raise
        except Exception as error:  # a program that is not ours may raise anything
            raise TemplateFailedError(f"{type(error).__name__}: {error}") from error

    def _render(self, variables: Mapping[str, object]) -> str:
        chunks: list[str] = []
        size = 0
        for chunk in self._template.generate({**variables, _BUDGET: _Budget()}):
            size += len(chunk)
            if size > MAX_STRING_CHARS:
                raise TemplateLimitError(f"its text is longer than {MAX_STRING_CHARS} characters")
            chunks.append(chunk)
        return "".join(chunks)


class Environment(ImmutableSandboxedEnvironment):
    """Jinja as `transformers` sets it up for chat templates, with the limits of this module."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=(jinja2.ext.loopcontrols, _GenerationTag),
            finalize=_count_output,
        )
        self.filters["tojson"] = _tojson
        self.filters[_CONCAT] = _concat
        filters = cast("dict[str, Callable[..., Any]]", self.filters)
        for name, function in list(filters.items()):
            filters[name] = _counted(name, function)
        filters[_OPERAND] = _walkable
        tests = cast("dict[str, Callable[..., Any]]", self.tests)
        for name, function in list(tests.items()):
            if function in _COMPARISONS or name == "in":
                tests[name] = _walking(function)
        del self.globals["lipsum"]

        def strftime_now(form: str) -> str:
            return clock().strftime(form)

        names: dict[str, object] = {
            "dict": _make_dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": strftime_now,
        }
        cast("dict[str, object]", self.globals).update(names)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Templates collect things in lists. What they are given are copies, so nothing of ours changes.
        return (type(obj) is list and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if _has_length(owner):
            if isinstance(owner, str) and method.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])
                _check_join(args[0], owner)
            _check_growth(method.__name__, owner, [*args, *kwargs.values()])
            _budget(context).spend(len(owner))
        else:
            _budget(context).spend(1)
        return _check_size(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(times, int) and _has_length(sequence):
                    _check_length(sequence, len(sequence) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_INT_BITS:
                raise TemplateLimitError("a power is too large")
        elif operator == "%" and isinstance(left, str):
            _check_growth("%", left, list(right) if _has_length(right) and not isinstance(right, str) else [right])
        elif operator == "+" and _has_length(left) and _has_length(right):
            _check_length(left, len(left) + len(right))
        return _check_size(super().call_binop(context, operator, left, right))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Jinja's hook before code is generated: puts a counter into every loop and macro."""
        _WrapOperations().visit(source)
        for node in list(source.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            body = cast(nodes.For, node).body
            literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            count = nodes.Call(nodes.EnvironmentAttribute("count_turn"), [nodes.Const(literal)], [], None, None)
            body.insert(0, nodes.ExprStmt(count).set_lineno(node.lineno))
        return super()._generate(source, *args, **kwargs)

    @staticmethod
    @jinja2.pass_context
    def count_turn(context: Context, chars: int) -> None:
        _budget(context).spend(chars)


class _WrapOperations(NodeTransformer):
    """Sends through filters, which can be checked, what Jinja compiles to Python's own operators."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not any(isinstance(operand, nodes.Const) for operand in (node.expr, *(op.expr for op in node.ops))):
            node.expr = _filter(node.expr, _OPERAND)
            for op in node.ops:
                op.expr = _filter(op.expr, _OPERAND)
        return node


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training; its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(Namespace):
    """Jinja's, without names that start with an underscore: they could shadow Python's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:  # not a method: attributes of a namespace are the template's
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot have an attribute {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as `transformers` writes it for templates: not escaped for HTML, which Jinja's own filter does."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed
    )


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Iterator):  # what `map` and `select` give
        return list(islice(cast("Iterator[Any]", value), MAX_ITEMS))
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def _concat(parts: list[Any]) -> str:
    return "".join(map(str, parts))


@jinja2.pass_context
def _count_output(context: Context, value: Any) -> Any:
    """Jinja's hook for every printed value."""
    _budget(context).spend(_weight(_walkable(value)))
    return value


# --------------------------------------------------------------------------------------------- limits


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for its input and is refused if its result would be too large."""
    passes = getattr(function, "jinja_pass_arg", None)

    @jinja2.pass_context
    @wraps(function)
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "join":
            value = list(value)
            _check_join(value, args[0] if args else kwargs.get("d", ""))
        _check_growth(name, value, [*args, *kwargs.values()])
        _budget(context).spend(len(value) if _has_length(value) else 1)
        if passes is None:
            return _check_size(function(value, *args, **kwargs))
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[passes.name]
        return _check_size(function(first, value, *args, **kwargs))

    return counted


_NUMBER_IN_FORMAT = re.compile(r"\d{5,}|\*|\{[^{}]*\{")  # a large width, or one that comes from elsewhere
_PADDING = ("center", "ljust", "rjust", "zfill", "batch", "slice", "round", "truncate", "wordwrap")
_WALKING = (
    *("tojson", "string", "pprint", "urlencode", "escape", "e", "forceescape", _CONCAT),
    *("sort", "unique", "groupby", "dictsort", "min", "max", "sum", "index", "count"),
)


def _check_growth(name: str, value: Any, arguments: list[Any]) -> None:
    """Refuses a filter or a method of a string whose result can be much larger than what goes into it."""
    if name == "translate":
        raise SecurityError("str.translate is not available in chat templates")
    text = len(value) if isinstance(value, str) else 0
    number = max((abs(argument) for argument in arguments if isinstance(argument, int)), default=0)
    if name in _PADDING:
        size = number
    elif name in ("indent", "expandtabs"):
        size = text * max(number, 1)
        if isinstance(value, str) and size > MAX_STRING_CHARS:
            size = text + (value.count("\n") + value.count("\t") + 1) * number
    elif name in ("format", "format_map", "%"):
        if isinstance(value, str) and _NUMBER_IN_FORMAT.search(value):
            raise TemplateLimitError("a width in a format is too large or not constant")
        fields = value.count("%") + value.count("{") if isinstance(value, str) else 1
        size = text + fields * max(map(_weight, arguments), default=0)
    elif name == "replace":
        size = (text + 1) * max(map(_weight, arguments), default=0)
        if isinstance(value, str) and len(arguments) > 1 and size > MAX_STRING_CHARS:
            size = text + value.count(str(arguments[0])) * len(str(arguments[1]))
    elif name in _WALKING:
        size = _weight(value) * max(number, 1)
    else:
        return
    if size > MAX_STRING_CHARS:
        raise TemplateLimitError(f"{name.strip()!r} would make a value of about {size} characters")


def _walkable(value: Any) -> Any:
    """`value`, if Python can walk through it in a short time. A list of twice the same list of twice ... is small,
    but long."""
    if not isinstance(value, str) and _weight(value) > MAX_STRING_CHARS:
        raise TemplateLimitError("a value is nested too often")
    return value


def _walking(test: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*values: Any) -> Any:
        return test(*map(_walkable, values))

    return checked


def _check_join(items: list[Any], separator: Any) -> None:
    size = _weight(items) + len(items) * _weight(separator)
    if size > MAX_STRING_CHARS:
        raise TemplateLimitError(f"'join' would make a value of about {size} characters")


def _has_length(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, str | list | tuple)


def _check_length(kind: Sequence[Any], length: int) -> None:
    if length > (MAX_STRING_CHARS if isinstance(kind, str) else MAX_ITEMS):
        raise TemplateLimitError(f"a value would have a length of {length}")


def _check_size(value: Any) -> Any:
    """`value`, if it is not too large."""
    if _has_length(value):
        _check_length(value, len(value))
    elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise TemplateLimitError("a number is too large")
    return value


def _weight(value: Any) -> int:
    """Characters of all strings inside and one for anything else; more than the limit of a string if too many."""
    if type(value) is str:
        return len(value)
    chars = num_items = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            chars += len(item)
            continue
        num_items += 1
        if num_items + len(stack) > MAX_ITEMS:
            return MAX_STRING_CHARS + 1
        if isinstance(item, list | tuple):
            stack.extend(cast("list[Any]", item))
        elif isinstance(item, dict):
            members = cast("dict[Any, Any]", item)
            stack.extend(members)
            stack.extend(members.values())
    return chars + num_items
