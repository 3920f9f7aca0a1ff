"""GGUF, version 2 and 3, little endian: reader and writer.

Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file is a header (magic, version,
numbers of tensors and of key-values), the key-values, a table of tensors (name, dimensions, type, offset), and
the tensors' data, each aligned. A model may be split into files NAME-00001-of-0000N.gguf.

The reader maps the file and copies only the metadata. It trusts nothing: every count, length, type, dimension
and offset is checked against the bytes that are there before anything is allocated or looked up by it. Python's
integers do not overflow, so a product of dimensions is what it says. What the checks cannot help is a file that
another process cuts short while it is mapped; the system then ends this process (SIGBUS).
"""

from __future__ import annotations

import enum
import math
import mmap
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from caudal import quants
from caudal.core import InvalidModelFileError, ModelNotFoundError, UnsupportedModelError
from caudal.formats import Checkpoint, HostTensor
from caudal.quants import QuantType

DEFAULT_ALIGNMENT = 32

_MAGIC = b"GGUF"
_READ_VERSIONS = (2, 3)
_WRITE_VERSION = 3
_MAX_KEY_BYTES = 65535  # by the specification
_MAX_NAME_BYTES = 64  # by the specification
_MAX_DIMS = 4
_MAX_DIM = 2**63 - 1
_MAX_HEADER_BYTES = 1 << 28  # all before the tensors' data; the largest known are under 64 MiB
_MAX_KEY_VALUES = 1 << 16
_MAX_TENSORS = 1 << 20
# Elements of all metadata arrays together. The largest vocabularies have under a million entries with their
# merges; an element costs up to about 60 bytes as a Python object, so this and the size of the header bound what a
# hostile file can take.
_MAX_ARRAY_ELEMENTS = 1 << 22
_MIN_KEY_VALUE_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8

# Numbers of types that are not in the registry, to name them in errors.
_OTHER_TYPES = {9: "Q8_1", 15: "Q8_K", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0"}
_REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class ValueType(enum.IntEnum):
    """Types of metadata values; the numbers are those in the file."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


@dataclass(frozen=True, slots=True)
class TypedValue:
    """A metadata value with the type that it has in the file, which Python's own types cannot say."""

    type: ValueType  # for an array: that of its elements
    value: Any  # bool, int, float or str, or a list of them
    is_array: bool = False


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor for `write_gguf` whose bytes are made only when their turn comes."""

    name: str
    shape: tuple[int, ...]  # row-major, as in HostTensor
    quant_type: QuantType
    produce: Callable[[], NDArray[np.uint8]]  # [quant_type.num_bytes(product of shape)]


_SCALARS: dict[ValueType, struct.Struct] = {
    ValueType.U8: struct.Struct("<B"),
    ValueType.I8: struct.Struct("<b"),
    ValueType.U16: struct.Struct("<H"),
    ValueType.I16: struct.Struct("<h"),
    ValueType.U32: struct.Struct("<I"),
    ValueType.I32: struct.Struct("<i"),
    ValueType.F32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<B"),
    ValueType.U64: struct.Struct("<Q"),
    ValueType.I64: struct.Struct("<q"),
    ValueType.F64: struct.Struct("<d"),
}
_DTYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.U8: np.dtype("<u1"),
    ValueType.I8: np.dtype("<i1"),
    ValueType.U16: np.dtype("<u2"),
    ValueType.I16: np.dtype("<i2"),
    ValueType.U32: np.dtype("<u4"),
    ValueType.I32: np.dtype("<i4"),
    ValueType.F32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.U64: np.dtype("<u8"),
    ValueType.I64: np.dtype("<i8"),
    ValueType.F64: np.dtype("<f8"),
}
_U32 = _SCALARS[ValueType.U32]
_U64 = _SCALARS[ValueType.U64]


# ---------------------------------------------------------------------------------------------- reader


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file; of a split model, any part opens all.

    Metadata values are bool, int, float and str, and lists of these; those of a split model are the first
    part's. Tensor data are read-only views that keep the mapping of their file alive.

    Raises ModelNotFoundError (no such file or part), InvalidModelFileError (what is wrong, and where) or
    UnsupportedModelError (another version, byte order or tensor type).
    """
    part = _open_part(path)
    count = _split_number(part, "split.count", 1)
    if count <= 1:
        parts = [part]
        expected = len(part.tensors)
    else:
        parts = _open_parts(part, count)
        expected = _split_number(parts[0], "split.tensors.count", None)
    tensors: dict[str, HostTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise InvalidModelFileError(f"{part.path}: tensor {name!r} is in an earlier part of the model too")
            tensors[name] = tensor
    if len(tensors) != expected:
        raise InvalidModelFileError(
            f"{parts[0].path}: the parts hold {len(tensors)} tensors, but split.tensors.count says {expected}"
        )
    metadata = {key: typed.value for key, typed in parts[0].metadata.items()}
    return Checkpoint(parts[0].path, "gguf", metadata, tensors, tuple(part.path for part in parts))


def read_typed_metadata(path: Path) -> dict[str, TypedValue]:
    """The metadata of one file with their types, as `write_gguf` takes them. Raises as `open_gguf` does."""
    return _open_part(path).metadata


@dataclass(frozen=True, slots=True)
class _Part:
    """One opened file."""

    path: Path
    metadata: dict[str, TypedValue]
    tensors: dict[str, HostTensor]


class _Cursor:
    """Reads the mapped bytes from front to back; every failure names the file, the thing and the place."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.end = min(len(buffer), _MAX_HEADER_BYTES)
        self.pos = 0
        self.array_elements = 0

    @property
    def rest(self) -> int:
        return self.end - self.pos

    def fail(self, problem: str, at: int | None = None) -> NoReturn:
        raise InvalidModelFileError(f"{self.path}: {problem} (at byte {self.pos if at is None else at})")

    def fail_at_end(self, what: str, num_bytes: int, at: int) -> NoReturn:
        end = (
            "the file ends" if self.end == len(self.buffer) else f"the first {self.end} bytes, the largest header, end"
        )
        self.fail(f"{end} inside {what}, which needs {num_bytes} bytes", at)

    def need(self, num_bytes: int, what: str) -> int:
        """Step over `num_bytes` that must be there; their position."""
        if num_bytes > self.rest:
            self.fail_at_end(what, num_bytes, self.pos)
        start = self.pos
        self.pos += num_bytes
        return start

    def number(self, form: struct.Struct, what: str) -> Any:
        return form.unpack_from(self.buffer, self.need(form.size, what))[0]

    def string(self, what: str, max_bytes: int | None = None) -> str:
        length = self.number(_U64, f"the length of {what}")
        if max_bytes is not None and not 0 < length <= max_bytes:
            self.fail(f"the length of {what} is {length}, not 1 to {max_bytes}", self.pos - 8)
        start = self.need(length, what)
        try:
            return self.buffer[start : self.pos].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8", start)

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings in a row: a hundred thousand cost some tens of milliseconds, so nothing else is done here."""
        buffer, last, unpack = self.buffer, self.end, _U64.unpack_from
        out: list[str] = []
        pos = self.pos
        try:
            for _ in range(count):
                start = pos + 8
                if start > last:
                    self.fail_at_end(f"element {len(out)} of {what}", 8, pos)
                end = start + unpack(buffer, pos)[0]
                if end > last:
                    self.fail_at_end(f"element {len(out)} of {what}", end - start, pos)
                out.append(buffer[start:end].decode())
                pos = end
        except UnicodeDecodeError:
            self.fail(f"element {len(out)} of {what} is not valid UTF-8", pos)
        self.pos = pos
        return out


def _open_part(path: Path) -> _Part:
    cursor = _Cursor(path, _map(path))
    _check_magic(cursor)
    n_tensors = cursor.number(_U64, "the number of tensors")
    n_key_values = cursor.number(_U64, "the number of key-values")
    if n_tensors > min(cursor.rest // _MIN_TENSOR_BYTES, _MAX_TENSORS):
        cursor.fail(f"impossible number of tensors: {n_tensors}", 8)
    if n_key_values > min(cursor.rest // _MIN_KEY_VALUE_BYTES, _MAX_KEY_VALUES):
        cursor.fail(f"impossible number of key-values: {n_key_values}", 16)
    metadata: dict[str, TypedValue] = {}
    for i in range(n_key_values):
        at = cursor.pos
        key = cursor.string(f"key {i}", _MAX_KEY_BYTES)
        if key in metadata:
            cursor.fail(f"the key {key!r} is there twice", at)
        metadata[key] = _read_value(cursor, key)
    return _Part(path, metadata, _read_tensors(cursor, n_tensors, _alignment(path, metadata)))


def _map(path: Path) -> mmap.mmap:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelNotFoundError(f"{path} is a folder, not a GGUF file")
        if not stat.S_ISREG(mode):
            raise ModelNotFoundError(f"{path} is not a regular file")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise InvalidModelFileError(f"{path}: the file is empty; download it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFoundError(f"no such file: {path}") from None
    except OSError as error:
        raise ModelNotFoundError(f"cannot open {path}: {error.strerror}") from error
    except ValueError:  # a NUL in the path, or a file that shrank to nothing since its size was asked
        raise ModelNotFoundError(f"cannot open {str(path)!r}") from None


def _check_magic(cursor: _Cursor) -> None:
    """Check magic and version, with a hint for what people take for a GGUF file."""
    start = cursor.buffer[: len(_MAGIC)]
    if start != _MAGIC:
        hints = {
            b"vers": "; it looks like a Git LFS pointer: run `git lfs pull`, or download the file itself",
            b"<!DO": "; it looks like a web page: download the file itself",
            b"<htm": "; it looks like a web page: download the file itself",
            b"PK\x03\x04": "; it is a ZIP archive or a PyTorch file",
            b"tjgg": "; it is an old GGML file: convert the model again",
            b"lmgg": "; it is an old GGML file: convert the model again",
            b"fmgg": "; it is an old GGML file: convert the model again",
        }
        raise InvalidModelFileError(f"{cursor.path} is not a GGUF file{hints.get(start, '')}")
    cursor.pos = len(_MAGIC)
    version = cursor.number(_U32, "the version")
    if version in _READ_VERSIONS:
        return
    if version == 0:
        cursor.fail("GGUF version 0 does not exist", 4)
    if version & 0xFFFF == 0:  # a small number with its bytes the other way round
        raise UnsupportedModelError(f"{cursor.path} is a big-endian GGUF file; convert it to little endian")
    if version == 1:
        raise UnsupportedModelError(f"{cursor.path} has GGUF version 1, long out of use; convert the model again")
    raise UnsupportedModelError(f"{cursor.path} has GGUF version {version}; this Caudal reads versions 2 and 3")


def _read_value(cursor: _Cursor, key: str) -> TypedValue:
    value_type = _read_value_type(cursor, f"the type of {key!r}")
    what = f"the value of {key!r}"
    if value_type == ValueType.STRING:
        return TypedValue(value_type, cursor.string(what))
    if value_type != ValueType.ARRAY:
        value = cursor.number(_SCALARS[value_type], what)
        if value_type == ValueType.BOOL:
            if value > 1:
                cursor.fail(f"{what} is {value}, neither false nor true", cursor.pos - 1)
            value = bool(value)
        return TypedValue(value_type, value)
    element_type = _read_value_type(cursor, f"the element type of {key!r}")
    if element_type == ValueType.ARRAY:
        raise UnsupportedModelError(f"{cursor.path}: {key!r} is an array of arrays, which no known model needs")
    at = cursor.pos
    count = cursor.number(_U64, f"the length of {key!r}")
    element_bytes = 8 if element_type == ValueType.STRING else _SCALARS[element_type].size
    if count > cursor.rest // element_bytes:
        cursor.fail(f"{key!r} claims {count} elements, more than the rest of the file can hold", at)
    cursor.array_elements += count
    if cursor.array_elements > _MAX_ARRAY_ELEMENTS:
        cursor.fail(f"the arrays up to {key!r} have more than {_MAX_ARRAY_ELEMENTS} elements", at)
    if element_type == ValueType.STRING:
        return TypedValue(element_type, cursor.strings(count, repr(key)), is_array=True)
    start = cursor.need(count * element_bytes, what)
    raw = cursor.buffer[start : cursor.pos]
    if element_type == ValueType.BOOL and raw.strip(b"\x00\x01"):
        cursor.fail(f"an element of {key!r} is neither false nor true", start)
    return TypedValue(element_type, np.frombuffer(raw, _DTYPES[element_type]).tolist(), is_array=True)


def _read_value_type(cursor: _Cursor, what: str) -> ValueType:
    number = cursor.number(_U32, what)
    if number > max(ValueType):
        cursor.fail(f"{what} is {number}, which does not exist", cursor.pos - 4)
    return ValueType(number)


def _alignment(path: Path, metadata: Mapping[str, TypedValue]) -> int:
    typed = metadata.get("general.alignment")
    if typed is None:
        return DEFAULT_ALIGNMENT
    if typed.type != ValueType.U32 or typed.is_array:
        raise InvalidModelFileError(f"{path}: general.alignment is not of the type u32")
    if not _valid_alignment(typed.value):
        raise InvalidModelFileError(f"{path}: general.alignment is {typed.value}, not a power of two from 8 up")
    return typed.value


def _valid_alignment(alignment: int) -> bool:
    return alignment >= 8 and alignment & (alignment - 1) == 0  # a multiple of 8 by the specification


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _read_tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> dict[str, HostTensor]:
    infos: dict[str, tuple[tuple[int, ...], QuantType, int, int]] = {}
    for i in range(n_tensors):
        at = cursor.pos
        name = cursor.string(f"the name of tensor {i}", _MAX_NAME_BYTES)
        if name in infos:
            cursor.fail(f"the tensor {name!r} is there twice", at)
        n_dims = cursor.number(_U32, f"the number of dimensions of {name!r}")
        if n_dims > _MAX_DIMS:
            cursor.fail(f"tensor {name!r} has {n_dims} dimensions; {_MAX_DIMS} is the most", cursor.pos - 4)
        dims = [cursor.number(_U64, f"the dimensions of {name!r}") for _ in range(n_dims)]
        if any(dim > _MAX_DIM for dim in dims):
            cursor.fail(f"tensor {name!r} has an impossible shape {dims}", at)
        quant_type = _quant_type(cursor.path, name, cursor.number(_U32, f"the type of {name!r}"))
        if n_dims and dims[0] % quant_type.block_size:
            cursor.fail(
                f"tensor {name!r} has rows of {dims[0]} numbers, not whole {quant_type.name} blocks "
                f"of {quant_type.block_size}",
                at,
            )
        if not n_dims and quant_type.block_size > 1:
            cursor.fail(f"tensor {name!r} is a single number, less than a {quant_type.name} block", at)
        offset = cursor.number(_U64, f"the offset of {name!r}")
        infos[name] = (tuple(reversed(dims)), quant_type, offset, at)

    data_start = _align(cursor.pos, alignment)
    mapped = np.frombuffer(cursor.buffer, np.uint8)
    tensors: dict[str, HostTensor] = {}
    expected = 0  # the specification lays the tensors one after another, each padded to the alignment
    for name, (shape, quant_type, offset, at) in infos.items():
        if offset != expected:
            cursor.fail(f"tensor {name!r} has the offset {offset}; it must be {expected}", at)
        num_bytes = quant_type.num_bytes(math.prod(shape))
        start = data_start + offset
        if start + num_bytes > len(cursor.buffer):
            cursor.fail(
                f"tensor {name!r} of {num_bytes} bytes begins at byte {start}, but the file has only "
                f"{len(cursor.buffer)} bytes: it is cut short or damaged; download it again",
                at,
            )
        tensors[name] = HostTensor(name, shape, quant_type, mapped[start : start + num_bytes])
        expected = _align(offset + num_bytes, alignment)
    return tensors


def _quant_type(path: Path, name: str, ggml_id: int) -> QuantType:
    quant_type = quants.by_ggml_id(ggml_id)
    if quant_type is not None:
        return quant_type
    if ggml_id in _REMOVED_TYPES:
        reason = f"type {_REMOVED_TYPES[ggml_id]}, which was taken out of GGUF; convert or download the model again"
    else:
        supported = ", ".join(t.name.upper() for t in quants.all_types())
        if ggml_id in _OTHER_TYPES:
            reason = f"type {_OTHER_TYPES[ggml_id]}, which is not supported yet; supported: {supported}"
        else:
            reason = f"the unknown type number {ggml_id}; supported: {supported}"
    raise UnsupportedModelError(f"{path}: tensor {name} has {reason}")


def _split_number(part: _Part, key: str, default: int | None) -> int:
    typed = part.metadata.get(key)
    if typed is None and default is not None:
        return default
    if typed is None or typed.is_array or not isinstance(typed.value, int) or typed.value < 0:
        raise InvalidModelFileError(f"{part.path}: a split model needs {key}, a number that is not negative")
    return typed.value


def _open_parts(given: _Part, count: int) -> list[_Part]:
    """All parts of a split model in order, of which one is open already."""
    number = _split_number(given, "split.no", None)
    match = _SPLIT_NAME.fullmatch(given.path.name)
    if match is None or int(match[2]) != number + 1 or int(match[3]) != count:
        raise InvalidModelFileError(
            f"{given.path} is part {number + 1} of {count}, so its name must end in "
            f"-{number + 1:05}-of-{count:05}.gguf; give the parts their original names"
        )
    paths = [given.path.with_name(f"{match[1]}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelNotFoundError(
            f"{given.path} is one of {count} parts; missing in {given.path.parent}: {', '.join(missing[:3])}{more}"
        )
    parts: list[_Part] = []
    for i, path in enumerate(paths):
        part = given if i == number else _open_part(path)
        if (_split_number(part, "split.no", None), _split_number(part, "split.count", None)) != (i, count):
            raise InvalidModelFileError(f"{path} does not say that it is part {i + 1} of {count}")
        parts.append(part)
    return parts


# ---------------------------------------------------------------------------------------------- writer


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Iterable[HostTensor | TensorSource],
    alignment: int = DEFAULT_ALIGNMENT,
) -> None:
    """Write a GGUF file, one tensor after another; `path` appears only when all is written.

    A metadata value is a bool, int (stored as u32, i32, u64 or i64, the first that fits), float (f32), str, a
    numpy scalar or one-dimensional array (its own type), a list of bool, int (i32 or i64), float (f32) or str,
    or a `TypedValue`. `general.alignment` is written from `alignment`, whatever `metadata` says.

    Raises ValueError for what GGUF cannot hold, and OSError.
    """
    if not _valid_alignment(alignment) or alignment >= 2**32:
        raise ValueError(f"the alignment must be a power of two from 8 up, not {alignment}")
    typed = {key: _typed_value(key, value) for key, value in metadata.items() if key != "general.alignment"}
    if alignment != DEFAULT_ALIGNMENT:
        typed["general.alignment"] = TypedValue(ValueType.U32, alignment)
    tensors = list(tensors)
    header = bytearray(_MAGIC + _U32.pack(_WRITE_VERSION) + _U64.pack(len(tensors)) + _U64.pack(len(typed)))
    for key, value in typed.items():
        header += _packed_string(key, f"the key {key!r}", _MAX_KEY_BYTES) + _packed_value(key, value)
    header += _packed_tensor_table(tensors, alignment)

    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(header)
            _pad(file, alignment)
            for tensor in tensors:
                file.write(_tensor_bytes(tensor).data)
                _pad(file, alignment)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _pad(file: BinaryIO, alignment: int) -> None:
    position = file.tell()
    file.write(bytes(_align(position, alignment) - position))


def _tensor_bytes(tensor: HostTensor | TensorSource) -> NDArray[np.uint8]:
    data = tensor.data if isinstance(tensor, HostTensor) else tensor.produce()
    expected = tensor.quant_type.num_bytes(math.prod(tensor.shape))
    if data.dtype != np.uint8 or data.nbytes != expected:
        raise ValueError(f"tensor {tensor.name!r} must have {expected} bytes, not {data.nbytes} of {data.dtype}")
    return np.ascontiguousarray(data).reshape(-1)


def _packed_tensor_table(tensors: list[HostTensor | TensorSource], alignment: int) -> bytes:
    table = bytearray()
    names: set[str] = set()
    offset = 0
    for tensor in tensors:
        if tensor.name in names:
            raise ValueError(f"two tensors have the name {tensor.name!r}")
        names.add(tensor.name)
        if len(tensor.shape) > _MAX_DIMS or any(not 0 <= dim <= _MAX_DIM for dim in tensor.shape):
            raise ValueError(f"tensor {tensor.name!r} has the shape {tensor.shape}, which GGUF cannot hold")
        if (tensor.shape[-1] if tensor.shape else 1) % tensor.quant_type.block_size:
            raise ValueError(f"the rows of tensor {tensor.name!r} are not whole {tensor.quant_type.name} blocks")
        table += _packed_string(tensor.name, f"the tensor name {tensor.name!r}", _MAX_NAME_BYTES)
        table += _U32.pack(len(tensor.shape)) + b"".join(_U64.pack(dim) for dim in reversed(tensor.shape))
        table += _U32.pack(tensor.quant_type.ggml_id) + _U64.pack(offset)
        offset = _align(offset + tensor.quant_type.num_bytes(math.prod(tensor.shape)), alignment)
    return bytes(table)


def _packed_string(text: str, what: str, max_bytes: int | None = None) -> bytes:
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is not valid Unicode") from None
    if max_bytes is not None and not 0 < len(raw) <= max_bytes:
        raise ValueError(f"{what} has {len(raw)} bytes, not 1 to {max_bytes}")
    return _U64.pack(len(raw)) + raw


def _packed_value(key: str, typed: TypedValue) -> bytes:
    """Type and value."""
    what = f"the value of {key!r}"
    if typed.type == ValueType.ARRAY:
        raise ValueError(f"{what} is an array of arrays")
    if not typed.is_array:
        return _U32.pack(typed.type) + _packed_element(typed.value, typed.type, what)
    start = _U32.pack(ValueType.ARRAY) + _U32.pack(typed.type) + _U64.pack(len(typed.value))
    return start + b"".join(_packed_element(element, typed.type, what) for element in typed.value)


def _packed_element(value: Any, value_type: ValueType, what: str) -> bytes:
    if value_type == ValueType.STRING:
        if not isinstance(value, str):
            raise ValueError(f"{what} must be text, not {value!r}")
        return _packed_string(value, what)
    try:
        return _SCALARS[value_type].pack(value)
    except (struct.error, OverflowError):
        raise ValueError(f"{what} must be of the type {value_type.name.lower()}, not {value!r}") from None


def _typed_value(key: str, value: object) -> TypedValue:
    if isinstance(value, TypedValue):
        return value
    if isinstance(value, np.ndarray | np.generic):
        array = cast("NDArray[Any]", value)
        little = array.dtype.newbyteorder("<")
        value_type = next((t for t, dtype in _DTYPES.items() if dtype == little), None)
        if value_type is None or array.ndim > 1:
            raise ValueError(f"{key!r}: GGUF has no type for {array.dtype} of {array.ndim} dimensions")
        return TypedValue(value_type, array.tolist(), is_array=array.ndim == 1)
    if isinstance(value, list | tuple):
        elements = cast("list[object] | tuple[object, ...]", value)
        return TypedValue(_element_type(key, elements), list(elements), is_array=True)
    if isinstance(value, int) and not isinstance(value, bool):
        return TypedValue(_first_that_holds(key, (value,), "U32", "I32", "U64", "I64"), value)
    return TypedValue(_element_type(key, (value,)), value)


def _element_type(key: str, elements: list[object] | tuple[object, ...]) -> ValueType:
    kinds = {type(element) for element in elements}
    if kinds == {int}:
        return _first_that_holds(key, cast("tuple[int, ...]", elements), "I32", "I64", "U64")
    if kinds == {int, float}:
        return ValueType.F32
    simple: dict[type[object], ValueType] = {bool: ValueType.BOOL, float: ValueType.F32, str: ValueType.STRING}
    found = simple.get(kinds.pop()) if len(kinds) == 1 else None
    if found is None:
        raise ValueError(f"{key!r}: cannot tell the type of {elements!r:.80}; give a TypedValue")
    return found


def _first_that_holds(key: str, values: Iterable[int], *names: str) -> ValueType:
    values = list(values)
    for name in names:
        limits = np.iinfo(_DTYPES[ValueType[name]])
        if min(values) >= limits.min and max(values) <= limits.max:
            return ValueType[name]
    raise ValueError(f"{key!r}: no integer type of GGUF holds {values!r:.80}")
