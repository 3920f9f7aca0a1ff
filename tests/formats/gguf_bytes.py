"""GGUF bytes put together by hand, without Caudal's writer, so that every field can be wrong on purpose."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def key_value(key: str | bytes, value_type: int, packed: bytes) -> bytes:
    return string(key) + u32(value_type) + packed


def array(key: str, element_type: int, count: int, packed: bytes) -> bytes:
    return key_value(key, ARRAY, u32(element_type) + u64(count) + packed)


def tensor_info(name: str | bytes, dims: list[int], ggml_type: int, offset: int, n_dims: int | None = None) -> bytes:
    return (
        string(name)
        + u32(len(dims) if n_dims is None else n_dims)
        + b"".join(map(u64, dims))
        + u32(ggml_type)
        + u64(offset)
    )


@dataclass
class File:
    """A file in parts; `data` follows the padded header."""

    magic: bytes = b"GGUF"
    version: bytes = field(default_factory=lambda: u32(3))
    key_values: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data: bytes = b""
    alignment: int = 32
    n_key_values: int | None = None
    n_tensors: int | None = None

    def header(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_key_values = len(self.key_values) if self.n_key_values is None else self.n_key_values
        counts = u64(n_tensors) + u64(n_key_values)
        return self.magic + self.version + counts + b"".join(self.key_values) + b"".join(self.tensors)

    def build(self) -> bytes:
        header = self.header()
        return header + bytes(-len(header) % self.alignment) + self.data


def sample() -> File:
    """A small valid file with every value type, three tensors of different types, and a tail of padding."""
    return File(
        key_values=[
            key_value("general.architecture", STRING, string("llama")),
            key_value("general.alignment", U32, u32(32)),
            key_value("a.u8", U8, b"\xff"),
            key_value("a.i8", I8, b"\xff"),
            key_value("a.u16", U16, struct.pack("<H", 65535)),
            key_value("a.i16", I16, struct.pack("<h", -2)),
            key_value("a.i32", I32, struct.pack("<i", -3)),
            key_value("a.f32", F32, struct.pack("<f", 0.5)),
            key_value("a.bool", BOOL, b"\x01"),
            key_value("a.u64", U64, u64(2**64 - 1)),
            key_value("a.i64", I64, struct.pack("<q", -(2**63))),
            key_value("a.f64", F64, struct.pack("<d", 0.1)),
            array("tokens", STRING, 3, string("a") + string("é") + string("")),
            array("scores", F32, 2, struct.pack("<2f", -1, 2)),
            array("flags", BOOL, 2, b"\x00\x01"),
            array("empty", I32, 0, b""),
        ],
        tensors=[
            tensor_info("norm", [4], 0, 0),
            tensor_info("weight", [32, 2], 3, 32),
            tensor_info("scalar", [], 0, 96),
        ],
        data=struct.pack("<4f", 1, 2, 3, 4)
        + bytes(16)
        + bytes(range(40))
        + bytes(24)
        + struct.pack("<f", 7)
        + bytes(28),
    )
