"""A model is recorded once, when it loads, into a Program: a flat list of coarse ops that any executor runs.

Values are float32 rows, one row per token. An op reads earlier values and writes one new value (single
assignment), so an executor may reorder, fuse or repeat ops as long as it keeps the data flow.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Attr = int | float | str | bool | tuple[float, ...]
RopeStyle = Literal["norm", "neox"]  # rotate adjacent pairs, or the two halves


@dataclass(frozen=True, slots=True)
class Op:
    """One step. `weights` are names of checkpoint tensors; a kind's attributes are specified in `ops.py`."""

    kind: str
    inputs: tuple[int, ...]  # value ids
    output: int  # value id
    weights: tuple[str, ...] = ()
    attrs: Mapping[str, Attr] = field(default_factory=dict[str, Attr])
    layer: int = -1  # the model layer that recorded it; -1: outside of all

    def integer(self, name: str) -> int:
        """The attribute `name`, which the op's spec says is an int. So `number`, `text`, `numbers` for theirs."""
        value = self.attrs[name]
        assert isinstance(value, int)
        return value

    def number(self, name: str) -> float:
        value = self.attrs[name]
        assert isinstance(value, float)
        return value

    def text(self, name: str) -> str:
        value = self.attrs[name]
        assert isinstance(value, str)
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self.attrs[name]
        assert isinstance(value, tuple)
        return value


@dataclass(slots=True)
class Program:
    """The recorded model."""

    ops: list[Op] = field(default_factory=list[Op])
    widths: list[int] = field(default_factory=list[int])  # numbers per row, by value id
    output: int = -1  # value id of the logits

    @property
    def weight_names(self) -> set[str]:
        return {name for op in self.ops for name in op.weights}

    @property
    def attention_ops(self) -> list[Op]:
        """In order of their `layer` attribute, which counts cache layers from 0."""
        return sorted((op for op in self.ops if op.kind == "attention"), key=lambda op: op.integer("layer"))


@dataclass(frozen=True, slots=True)
class Value:
    """A handle on one value of the program being recorded."""

    builder: Builder
    id: int

    @property
    def width(self) -> int:
        return self.builder.program.widths[self.id]

    def __add__(self, other: Value) -> Value:
        return self.builder.emit("add", (self, other), self.width)

    def __mul__(self, other: Value | float) -> Value:
        if isinstance(other, Value):
            return self.builder.emit("mul", (self, other), self.width)
        return self.builder.emit("scale", (self,), self.width, by=float(other))


class Builder:
    """Records ops. Weight names are GGUF's without their suffix; inside `layer(i)` they get `blk.i.` in front."""

    def __init__(self, weights: Collection[str]) -> None:
        """`weights`: names present in the checkpoint; optional parts (biases, norms) follow from them."""
        self.program = Program()
        self._weights = weights
        self._prefix = ""
        self._num_attention_layers = 0
        self.layer_index = -1

    @contextmanager
    def layer(self, index: int) -> Generator[None]:
        self._prefix, self.layer_index = f"blk.{index}.", index
        yield
        self._prefix, self.layer_index = "", -1

    def has(self, name: str) -> bool:
        return f"{self._prefix}{name}.weight" in self._weights

    def emit(
        self, kind: str, inputs: tuple[Value, ...], width: int, weights: tuple[str, ...] = (), **attrs: Attr
    ) -> Value:
        self.program.widths.append(width)
        output = len(self.program.widths) - 1
        self.program.ops.append(Op(kind, tuple(v.id for v in inputs), output, weights, attrs, self.layer_index))
        return Value(self, output)

    def _names(self, name: str) -> tuple[str, ...]:
        full = self._prefix + name
        bias = (f"{full}.bias",) if f"{full}.bias" in self._weights else ()
        return (f"{full}.weight", *bias)

    def embed(self, name: str, width: int) -> Value:
        """Rows of the table for each token id. [vocab, width] -> [tokens, width]"""
        return self.emit("embed", (), width, self._names(name))

    def linear(self, x: Value, name: str, width: int) -> Value:
        """x W^T (+ bias), W: [width, x.width]."""
        return self.emit("linear", (x,), width, self._names(name))

    def rms_norm(self, x: Value, name: str, eps: float, *, head_dim: int = 0) -> Value:
        """Root-mean-square norm (Zhang and Sennrich 2019) over the row, or over each head of `head_dim`."""
        return self.emit("rms_norm", (x,), x.width, self._names(name), eps=eps, head_dim=head_dim)

    def layer_norm(self, x: Value, name: str, eps: float) -> Value:
        return self.emit("layer_norm", (x,), x.width, self._names(name), eps=eps)

    def rope(
        self, x: Value, head_dim: int, inv_freq: tuple[float, ...], style: RopeStyle, *, mscale: float = 1.0
    ) -> Value:
        """Rotary positions (Su et al. 2021). Pair i of each head turns by position * inv_freq[i]; sine and
        cosine are multiplied by `mscale` (YaRN). Only the first 2 * len(inv_freq) numbers of a head turn.
        Every scaling scheme is a choice of inv_freq and mscale, made when the model is recorded; a
        `rope_freqs` tensor in the checkpoint divides inv_freq.
        """
        freqs = ("rope_freqs.weight",) if "rope_freqs.weight" in self._weights else ()
        return self.emit("rope", (x,), x.width, freqs, head_dim=head_dim, inv_freq=inv_freq, style=style, mscale=mscale)

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        head_dim: int,
        scale: float,
        v_head_dim: int = 0,
        window: int = 0,
        softcap: float = 0.0,
        slopes: tuple[float, ...] = (),
        sinks: str = "",
    ) -> Value:
        """Causal attention of each token over its sequence's cached keys and its own. Appends k and v to the
        cache. Groups of query heads share a key head (Ainslie et al. 2023). window: only the last that many
        positions, its own included (0: all). softcap: scores become cap * tanh(score / cap). slopes: ALiBi (Press
        et al. 2022), one a query head, times the distance to a key, subtracted from its capped score. sinks: name
        of a tensor [query heads] of scores that take their share of the softmax and have no value (Xiao et al.
        2024; gpt-oss).
        """
        v_head_dim = v_head_dim or head_dim
        layer = self._num_attention_layers
        self._num_attention_layers += 1
        return self.emit(
            "attention",
            (q, k, v),
            q.width // head_dim * v_head_dim,
            (f"{self._prefix}{sinks}.weight",) if sinks else (),
            layer=layer,
            n_heads=q.width // head_dim,
            n_kv_heads=k.width // head_dim,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            scale=scale,
            window=window,
            softcap=softcap,
            slopes=slopes,
        )

    def slice(self, x: Value, start: int, width: int) -> Value:
        return self.emit("slice", (x,), width, start=start)

    def glu(self, gate: Value, up: Value, act: str) -> Value:
        """act(gate) * up (Shazeer 2020); act: silu, gelu_tanh, gelu."""
        return self.emit("glu", (gate, up), gate.width, act=act)

    def softcap(self, x: Value, cap: float) -> Value:
        return self.emit("softcap", (x,), x.width, cap=cap)

    def last_tokens(self, x: Value) -> Value:
        """Only the rows whose logits are wanted (`Batch.logits_rows`)."""
        return self.emit("last_tokens", (x,), x.width)
