"""The GGUF reader and writer: against the `gguf` package, against files that are wrong on purpose, and fuzzed."""

from __future__ import annotations

import gc
import math
import os
import struct
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import (
    BOOL,
    STRING,
    U8,
    U16,
    U32,
    File,
    array,
    key_value,
    sample,
    string,
    tensor_info,
    u32,
    u64,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from caudal import quants
from caudal.core import CaudalError, InvalidModelFileError, ModelNotFoundError, UnsupportedModelError
from caudal.formats import Checkpoint, HostTensor, open_checkpoint, quantization_mix
from caudal.formats.gguf import TensorSource, TypedValue, ValueType, open_gguf, read_typed_metadata, write_gguf
from conftest import shared_dir

PEAK = 4 << 20  # bytes that a file which is refused, or has under 2 KB, may take at most


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.fixture
def traced():
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


def open_bytes(path: Path, raw: bytes) -> Checkpoint:
    path.write_bytes(raw)
    return open_gguf(path)


def tensor(name: str, values: np.ndarray, type_name: str = "f32") -> HostTensor:
    quant_type = quants.by_name(type_name)
    assert quant_type is not None
    assert quant_type.quantize is not None
    return HostTensor(name, values.shape, quant_type, quant_type.quantize(values.reshape(-1)))


# ------------------------------------------------------------------------------------------- valid files


def test_every_value_type_and_tensor(path: Path):
    model = open_bytes(path, sample().build())
    assert model.metadata == {
        "general.architecture": "llama",
        "general.alignment": 32,
        "a.u8": 255,
        "a.i8": -1,
        "a.u16": 65535,
        "a.i16": -2,
        "a.i32": -3,
        "a.f32": 0.5,
        "a.bool": True,
        "a.u64": 2**64 - 1,
        "a.i64": -(2**63),
        "a.f64": 0.1,
        "tokens": ["a", "é", ""],
        "scores": [-1.0, 2.0],
        "flags": [False, True],
        "empty": [],
    }
    assert type(model.metadata["a.bool"]) is bool
    assert model.format == "gguf"
    assert model.path == path
    assert model.files == (path,)
    assert model.file_bytes == path.stat().st_size
    assert {n: (t.shape, t.quant_type.name, t.data.nbytes) for n, t in model.tensors.items()} == {
        "norm": ((4,), "f32", 16),
        "weight": ((2, 32), "q4_1", 40),
        "scalar": ((), "f32", 4),
    }
    assert model.num_bytes == 60
    assert model.tensors["norm"].to_float32().tolist() == [1, 2, 3, 4]
    assert model.tensors["scalar"].to_float32() == 7
    assert model.tensors["weight"].data.tolist() == list(range(40))
    assert [(u.quant_type.name, u.num_tensors, u.num_elements, u.num_bytes) for u in quantization_mix(model)] == [
        ("q4_1", 1, 64, 40),
        ("f32", 2, 5, 20),
    ]


def test_version_2_is_read(path: Path):
    file = sample()
    file.version = u32(2)
    assert len(open_bytes(path, file.build()).tensors) == 3


def test_tensor_data_are_read_only_and_outlive_the_checkpoint(path: Path):
    data = open_bytes(path, sample().build()).tensors["norm"].data
    path.unlink()
    gc.collect()
    assert data.view("<f4").tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


def test_a_zero_dimension_is_valid(path: Path):
    file = File(tensors=[tensor_info("none", [4, 0], 0, 0), tensor_info("one", [1], 0, 0)], data=struct.pack("<f", 5))
    model = open_bytes(path, file.build())
    assert model.tensors["none"].to_float32().shape == (0, 4)
    assert model.tensors["one"].to_float32().tolist() == [5]


def test_other_alignment(path: Path):
    file = File(
        key_values=[key_value("general.alignment", U32, u32(128))],
        tensors=[tensor_info("a", [1], 0, 0), tensor_info("b", [1], 0, 128)],
        data=struct.pack("<f", 1) + bytes(124) + struct.pack("<f", 2),
        alignment=128,
    )
    model = open_bytes(path, file.build())
    assert [t.to_float32().item() for t in model.tensors.values()] == [1, 2]


@pytest.mark.parametrize(
    "folder", ["data/vocab", "data/models", "golden/quant", "golden/quant/moe", "golden/arch/gguf"]
)
def test_reference_files(folder: str):
    """All open; those that the `gguf` package reads in reasonable time must give the same as it gives."""
    paths = sorted(shared_dir(*folder.split("/")).glob("*.gguf"))
    assert paths
    for path in paths:
        if path.stat().st_size > 1_500_000:
            assert open_checkpoint(path).metadata["general.architecture"]
            continue
        reference = gguf.GGUFReader(path)
        model = open_checkpoint(path)
        fields = {f.name: f.contents() for f in reference.fields.values() if not f.name.startswith("GGUF.")}
        assert model.metadata == fields
        assert list(model.tensors) == [t.name for t in reference.tensors]
        for want in reference.tensors:
            got = model.tensors[want.name]
            assert got.shape == tuple(reversed(want.shape.tolist()))
            assert got.quant_type.ggml_id == want.tensor_type
            assert np.array_equal(got.data, want.data.reshape(-1).view(np.uint8))


def test_a_large_vocabulary_opens_fast(path: Path):
    rng = np.random.default_rng(0)
    tokens = [f"tok{n:x}é" for n in rng.integers(0, 1 << 40, 150_000)]
    merges = [f"{a} {b}" for a, b in pairwise(tokens)]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.scores": rng.standard_normal(150_000).astype(np.float32),
        "tokenizer.ggml.token_type": np.ones(150_000, np.int32),
    }
    write_gguf(path, metadata, [])
    seconds = []  # of CPU time: other processes may be busy
    for _ in range(3):
        start = time.process_time()
        model = open_gguf(path)
        seconds.append(time.process_time() - start)
    assert model.metadata["tokenizer.ggml.tokens"] == tokens
    assert model.metadata["tokenizer.ggml.merges"] == merges
    assert min(seconds) < 0.3


# ------------------------------------------------------------------------------------------- wrong files


def header_cases() -> list[tuple[str, bytes, type[CaudalError], str]]:
    invalid, unsupported = InvalidModelFileError, UnsupportedModelError

    def kv(*key_values: bytes) -> bytes:
        return File(key_values=list(key_values)).build()

    def cut(last: bytes) -> bytes:
        return File(key_values=[last]).header()

    return [
        ("empty", b"", invalid, "empty"),
        ("bad magic", File(magic=b"FUGG").build(), invalid, "not a GGUF file"),
        ("lfs pointer", b"version https://git-lfs.github.com/spec/v1\n", invalid, "git lfs pull"),
        ("web page", b"<!DOCTYPE html>", invalid, "web page"),
        ("old ggml", b"tjgg" + bytes(40), invalid, "old GGML"),
        ("only magic", b"GGUF", invalid, "ends inside the version"),
        ("version 0", File(version=u32(0)).build(), invalid, "version 0"),
        ("version 1", File(version=u32(1)).build(), unsupported, "version 1"),
        ("version 4", File(version=u32(4)).build(), unsupported, "version 4"),
        ("big endian", File(version=struct.pack(">I", 3)).build(), unsupported, "big-endian"),
        ("n_tensors", File(n_tensors=2**64 - 1).build(), invalid, "number of tensors"),
        ("n_tensors small", File(n_tensors=1).build(), invalid, "number of tensors"),
        ("n_kv", File(n_key_values=2**64 - 1).build(), invalid, "number of key-values"),
        ("n_kv sign", File(n_key_values=2**63).build() + bytes(99), invalid, "number of key-values"),
        ("key size", kv(u64(2**64 - 1) + bytes(99)), invalid, "length of key 0"),
        ("key size wraps", kv(u64(2**64 - 24) + bytes(99)), invalid, "length of key 0"),
        ("empty key", kv(key_value("", U32, u32(1))), invalid, "length of key 0 is 0"),
        ("long key", kv(key_value("k" * 65536, U32, u32(1))), invalid, "65536"),
        ("key not UTF-8", kv(key_value(b"\xff\xfe", U32, u32(1))), invalid, "UTF-8"),
        ("key twice", kv(key_value("k", U32, u32(1)), key_value("k", U8, b"\1")), invalid, "'k' is there twice"),
        ("value type", kv(key_value("k", 13, u32(1))), invalid, "type of 'k' is 13"),
        ("value type max", kv(key_value("k", 2**32 - 1, u32(1))), invalid, "type of 'k'"),
        ("value missing", cut(key_value("k" * 9, U32, b"")), invalid, "value of 'k"),
        ("bool 2", kv(key_value("k", BOOL, b"\2")), invalid, "neither false nor true"),
        ("string size", kv(key_value("k", STRING, u64(2**63) + b"text")), invalid, "the value of 'k'"),
        ("string not UTF-8", kv(key_value("k", STRING, string(b"a\x80"))), invalid, "the value of 'k' is not valid"),
        ("array type", kv(array("k", 77, 1, u32(1))), invalid, "element type of 'k'"),
        ("array count", kv(array("k", U32, 2**62, u32(1))), invalid, "'k' claims"),
        ("array count max", kv(array("k", U8, 2**64 - 1, u32(1))), invalid, "'k' claims"),
        ("array bool", kv(array("k", BOOL, 2, b"\1\2")), invalid, "element of 'k'"),
        ("array string size", kv(array("k", STRING, 1, u64(2**64 - 1))), invalid, "element 0 of 'k'"),
        ("array strings end", cut(array("k", STRING, 2, string("x") + u64(2) + b"y")), invalid, "element 1 of 'k'"),
        ("array length cut", cut(array("k", STRING, 2, string("x" * 9) + b"123")), invalid, "element 1 of 'k'"),
        ("array string bytes", kv(array("k", STRING, 2, string("a") + string(b"\xff"))), invalid, "element 1 of 'k'"),
        ("nested", kv(array("k", 9, 1, u32(U8) + u64(1) + b"\1")), unsupported, "array of arrays"),
        ("too many", kv(array("k", U8, 1 << 23, bytes(1 << 23))), invalid, "more than 4194304 elements"),
        ("alignment 0", kv(key_value("general.alignment", U32, u32(0))), invalid, "general.alignment is 0"),
        ("alignment 13", kv(key_value("general.alignment", U32, u32(13))), invalid, "general.alignment is 13"),
        ("alignment type", kv(key_value("general.alignment", U16, b"\x20\0")), invalid, "type u32"),
        ("alignment text", kv(key_value("general.alignment", STRING, string("32"))), invalid, "type u32"),
        ("alignments", kv(array("general.alignment", U32, 1, u32(32))), invalid, "type u32"),
    ]


def tensor_cases() -> list[tuple[str, bytes, type[CaudalError], str]]:
    invalid, unsupported = InvalidModelFileError, UnsupportedModelError

    def tensors(*infos: bytes, data: int = 256, key_values: tuple[bytes, ...] = ()) -> bytes:
        return File(tensors=list(infos), data=bytes(data), key_values=list(key_values)).build()

    one = tensor_info("a", [1], 0, 0)
    align_64 = key_value("general.alignment", U32, u32(64))
    align_2g = key_value("general.alignment", U32, u32(2**31))
    return [
        ("name size", tensors(u64(2**64 - 1) + bytes(99)), invalid, "name of tensor 0"),
        ("long name", tensors(tensor_info("n" * 65, [1], 0, 0)), invalid, "65, not 1 to 64"),
        ("empty name", tensors(tensor_info("", [1], 0, 0)), invalid, "name of tensor 0 is 0"),
        ("name not UTF-8", tensors(tensor_info(b"\xc3(", [1], 0, 0)), invalid, "UTF-8"),
        ("name twice", tensors(one, tensor_info("a", [1], 0, 32)), invalid, "'a' is there twice"),
        ("n_dims", tensors(tensor_info("a", [1] * 5, 0, 0)), invalid, "5 dimensions"),
        ("n_dims max", tensors(tensor_info("a", [1], 0, 0, n_dims=2**32 - 1)), invalid, "4294967295 dimensions"),
        ("negative dim", tensors(tensor_info("a", [2**64 - 1], 0, 0)), invalid, "impossible shape"),
        ("dim 2^63 - 1", tensors(tensor_info("a", [2**63 - 1, 2], 0, 0)), invalid, "cut short"),
        ("product wraps to 0", tensors(tensor_info("a", [2**32, 2**32], 0, 0)), invalid, "cut short"),
        ("product wraps small", tensors(tensor_info("a", [2**62, 2, 2, 3], 24, 0)), invalid, "cut short"),
        ("bytes wrap", tensors(tensor_info("a", [2**62 + 1], 0, 0)), invalid, "cut short"),
        ("dim 2^42 + 1", tensors(tensor_info("a", [2**42 + 1, 2**22], 1, 0)), invalid, "cut short"),
        ("part of a block", tensors(tensor_info("a", [48], 3, 0)), invalid, "rows of 48 numbers"),
        ("rows not blocks", tensors(tensor_info("a", [16, 2], 3, 0)), invalid, "rows of 16 numbers"),
        ("scalar block", tensors(tensor_info("a", [], 3, 0)), invalid, "single number"),
        (
            "unknown type",
            tensors(tensor_info("a", [256], 43, 0)),
            unsupported,
            "tensor a has the unknown type number 43",
        ),
        ("type max", tensors(tensor_info("a", [256], 2**32 - 1, 0)), unsupported, "4294967295"),
        ("removed type", tensors(tensor_info("a", [256], 31, 0)), unsupported, "Q4_0_4_4"),
        (
            "Q8_K",
            tensors(tensor_info("blk.0.w", [256], 15, 0)),
            unsupported,
            "tensor blk.0.w has type Q8_K.*: F32, F16",
        ),
        ("offset max", tensors(tensor_info("a", [1], 0, 2**64 - 1)), invalid, "offset 18446744073709551615"),
        ("offset unaligned", tensors(one, tensor_info("b", [1], 0, 4)), invalid, "'b' has the offset 4; it must be 32"),
        ("overlap", tensors(one, tensor_info("b", [1], 0, 0)), invalid, "'b' has the offset 0"),
        ("gap", tensors(one, tensor_info("b", [1], 0, 64)), invalid, "'b' has the offset 64"),
        ("other alignment", tensors(one, tensor_info("b", [1], 0, 32), key_values=(align_64,)), invalid, "must be 64"),
        ("huge alignment", tensors(one, key_values=(align_2g,)), invalid, "cut short"),
        ("no data", tensors(one, data=0), invalid, "cut short"),
        ("too little data", tensors(tensor_info("a", [65], 0, 0), data=256), invalid, "of 260 bytes"),
    ]


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [pytest.param(raw, error, message, id=name) for name, raw, error, message in header_cases() + tensor_cases()],
)
def test_wrong_files_are_refused(path: Path, raw: bytes, error: type[CaudalError], message: str):
    path.write_bytes(raw)
    with pytest.raises(error, match=message) as caught:
        open_gguf(path)
    assert type(caught.value) is error
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "packed",
    [key_value("k", STRING, u64(1 << 40)), array("k", STRING, 1, u64(1 << 40))],
    ids=["text", "texts"],
)
@pytest.mark.usefixtures("traced")
def test_a_huge_file_takes_little_memory(path: Path, packed: bytes):
    path.write_bytes(File(key_values=[packed]).header())
    os.truncate(path, 2 << 40)  # sparse: nearly nothing on the disk
    tracemalloc.reset_peak()
    with pytest.raises(InvalidModelFileError, match="the first 268435456 bytes, the largest header, end inside"):
        open_gguf(path)
    assert tracemalloc.get_traced_memory()[1] < PEAK


def test_what_is_no_file(tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match="no such file"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelNotFoundError, match="folder"):
        open_gguf(tmp_path)
    with pytest.raises(ModelNotFoundError, match="cannot open"):
        open_gguf(Path("nul\0byte"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelNotFoundError, match="regular"):
        open_gguf(tmp_path / "pipe")


# ---------------------------------------------------------------------------------------------- fuzzing


def check_survives(path: Path, raw: bytes) -> None:
    """Opens, or fails with a typed error; nothing else, no big allocation, and what opens lies inside the file."""
    path.write_bytes(raw)
    tracemalloc.reset_peak()
    try:
        model = open_gguf(path)
    except (InvalidModelFileError, UnsupportedModelError):
        return
    finally:
        assert tracemalloc.get_traced_memory()[1] < PEAK
    for t in model.tensors.values():
        assert t.data.nbytes <= len(raw)
        assert t.data.nbytes == t.quant_type.num_bytes(math.prod(t.shape))
        t.data.sum()


@pytest.mark.usefixtures("traced")
def test_truncation_at_every_byte(path: Path):
    raw = sample().build()
    needed = len(raw) - 28  # without the padding after the last tensor
    for length in range(len(raw) + 1):
        check_survives(path, raw[:length])
        if length < needed:
            with pytest.raises(InvalidModelFileError):
                open_gguf(path)
        else:
            open_gguf(path)


@pytest.mark.usefixtures("traced")
def test_every_byte_of_the_header_changed(path: Path):
    file = sample()
    raw = file.build()
    for i in range(len(file.header())):
        for value in {raw[i] ^ 1, raw[i] ^ 0x80, 0, 0xFF}:
            check_survives(path, raw[:i] + bytes([value]) + raw[i + 1 :])


@pytest.mark.usefixtures("traced")
def test_every_word_of_the_header_made_extreme(path: Path):
    file = sample()
    raw = file.build()
    for i in range(len(file.header()) - 8):
        for value in (1, 2**32 - 1, 2**63 - 1, 2**64 - 8, 2**64 - 1):
            check_survives(path, raw[:i] + u64(value) + raw[i + 8 :])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_damage(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    raw = bytearray(sample().build())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(raw)))
        replaced = data.draw(st.integers(0, 16))
        raw[at : at + replaced] = data.draw(st.binary(max_size=16))
    tracemalloc.start(1)
    try:
        check_survives(tmp_path_factory.getbasetemp() / "random.gguf", bytes(raw))
    finally:
        tracemalloc.stop()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_after_a_valid_start(tmp_path_factory: pytest.TempPathFactory, tail: bytes):
    tracemalloc.start(1)
    try:
        check_survives(tmp_path_factory.getbasetemp() / "tail.gguf", b"GGUF" + u32(3) + u64(2) + u64(2) + tail)
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------------------------- split models


def write_split(folder: Path, count: int, total: int | None = None) -> list[Path]:
    paths = [folder / f"model-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        metadata: dict[str, object] = {
            "split.no": np.uint16(i),
            "split.count": np.uint16(count),
            "split.tensors.count": np.int32(count if total is None else total),
        }
        if i == 0:
            metadata["general.architecture"] = "llama"
        write_gguf(path, metadata, [tensor(f"t{i}", np.full(4, i, np.float32))])
    return paths


def test_any_part_opens_the_whole_model(tmp_path: Path):
    paths = write_split(tmp_path, 3)
    for given_path in paths:
        model = open_checkpoint(given_path)
        assert model.path == paths[0]
        assert model.files == tuple(paths)
        assert model.metadata["general.architecture"] == "llama"
        assert [t.to_float32()[0] for t in model.tensors.values()] == [0, 1, 2]
        assert model.file_bytes == sum(p.stat().st_size for p in paths)


def test_a_missing_part_is_named(tmp_path: Path):
    paths = write_split(tmp_path, 3)
    paths[1].unlink()
    with pytest.raises(ModelNotFoundError, match=r"missing in .*: model-00002-of-00003\.gguf"):
        open_gguf(paths[2])


def test_a_renamed_part_is_refused(tmp_path: Path):
    paths = write_split(tmp_path, 2)
    renamed = paths[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(InvalidModelFileError, match=r"must end in -00001-of-00002\.gguf"):
        open_gguf(renamed)


def test_parts_must_agree(tmp_path: Path):
    paths = write_split(tmp_path, 2)
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(InvalidModelFileError, match="part 2 of 2"):
        open_gguf(paths[0])


def test_a_part_of_another_model_is_refused(tmp_path: Path):
    paths = write_split(tmp_path, 2, total=3)
    with pytest.raises(InvalidModelFileError, match=r"split\.tensors\.count says 3"):
        open_gguf(paths[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path):
    paths = write_split(tmp_path, 2)
    write_gguf(paths[1], read_typed_metadata(paths[1]), [tensor("t0", np.zeros(4, np.float32))])
    with pytest.raises(InvalidModelFileError, match="'t0' is in an earlier part"):
        open_gguf(paths[0])


@pytest.mark.parametrize(
    ("key", "value"), [("split.count", "two"), ("split.count", -2), ("split.no", [1]), ("split.no", None)]
)
def test_wrong_split_values_are_refused(path: Path, key: str, value: object):
    metadata = {"split.count": 2, "split.no": 0, key: value}
    write_gguf(path, {k: v for k, v in metadata.items() if v is not None}, [])
    with pytest.raises(InvalidModelFileError, match=key.replace(".", r"\.")):
        open_gguf(path)


# ---------------------------------------------------------------------------------------------- writer


def test_the_gguf_package_reads_what_is_written(path: Path):
    rng = np.random.default_rng(1)
    values = {name: rng.standard_normal((3, 64)).astype(np.float32) for name in ("f32", "f16", "bf16", "q4_1", "q8_0")}
    metadata = {
        "general.architecture": "llama",
        "int": 7,
        "negative": -7,
        "big": 2**40,
        "huge": 2**64 - 1,
        "float": 0.25,
        "double": TypedValue(ValueType.F64, 0.1),
        "byte": np.uint8(3),
        "yes": True,
        "words": ["a", "ñandú"],
        "ints": [1, -2],
        "mixed": [1, 0.5],
        "bools": [True, False],
        "none": TypedValue(ValueType.I32, [], is_array=True),
        "floats": np.array([0.5, 1.5], np.float32),
    }
    write_gguf(path, metadata, [tensor(name, v, name) for name, v in values.items()], alignment=64)
    reader = gguf.GGUFReader(path)
    assert reader.alignment == 64
    kinds = {f.name: [t.name for t in f.types] for f in reader.fields.values()}
    assert kinds["int"] == ["UINT32"]
    assert kinds["negative"] == ["INT32"]
    assert kinds["big"] == kinds["huge"] == ["UINT64"]
    assert kinds["float"] == ["FLOAT32"]
    assert kinds["double"] == ["FLOAT64"]
    assert kinds["byte"] == ["UINT8"]
    assert kinds["words"] == ["ARRAY", "STRING"]
    assert kinds["ints"] == ["ARRAY", "INT32"]
    assert kinds["mixed"] == kinds["floats"] == ["ARRAY", "FLOAT32"]
    assert reader.fields["words"].contents() == ["a", "ñandú"]
    model = open_gguf(path)
    for t in reader.tensors:
        want = gguf.quants.dequantize(t.data, t.tensor_type).reshape(3, 64)
        assert np.array_equal(model.tensors[t.name].to_float32(), want)
        assert t.data_offset % 64 == 0


def test_we_read_what_the_gguf_package_writes(path: Path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("eps", 1e-5)
    writer.add_array("tokens", ["x", "y"])
    writer.add_tensor("w", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.add_tensor("h", np.arange(6, dtype=np.float16).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = open_gguf(path)
    assert model.metadata["llama.block_count"] == 2
    assert model.metadata["tokens"] == ["x", "y"]
    assert np.array_equal(model.tensors["w"].to_float32(), np.arange(64).reshape(2, 32))
    assert np.array_equal(model.tensors["h"].to_float32(), np.arange(6).reshape(2, 3))


def test_a_model_written_again_is_the_same_file(path: Path):
    original = shared_dir("golden", "quant", "Q3_K_M.gguf")
    write_gguf(path, read_typed_metadata(original), open_gguf(original).tensors.values())
    assert path.read_bytes() == original.read_bytes()


def test_tensors_are_made_when_their_turn_comes(path: Path):
    f32 = quants.by_name("f32")
    assert f32 is not None
    made: list[str] = []

    def source(name: str) -> TensorSource:
        def produce() -> np.ndarray:
            made.append(name)
            return np.full(1, len(made), np.float32).view(np.uint8)

        return TensorSource(name, (1,), f32, produce)

    write_gguf(path, {}, [source("a"), source("b")])
    assert made == ["a", "b"]
    assert [t.to_float32().item() for t in open_gguf(path).tensors.values()] == [1, 2]


def test_a_failed_write_leaves_nothing_and_keeps_the_old_file(path: Path):
    path.write_bytes(b"old")
    f32 = quants.by_name("f32")
    assert f32 is not None

    def fail() -> np.ndarray:
        raise RuntimeError("no such weights")

    with pytest.raises(RuntimeError, match="no such weights"):
        write_gguf(path, {}, [TensorSource("a", (1,), f32, fail)])
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"": 1}, "not 1 to 65535"),
        ({"k": []}, "cannot tell the type"),
        ({"k": [1, "a"]}, "cannot tell the type"),
        ({"k": {}}, "cannot tell the type"),
        ({"k": 2**64}, "no integer type"),
        ({"k": np.zeros((2, 2), np.float32)}, "2 dimensions"),
        ({"k": np.zeros(2, np.complex64)}, "complex64"),
        ({"k": "\ud800"}, "Unicode"),
        ({"k": TypedValue(ValueType.U8, 256)}, "must be of the type u8"),
        ({"k": TypedValue(ValueType.F32, 1e300)}, "must be of the type f32"),
        ({"k": TypedValue(ValueType.STRING, 1)}, "must be text"),
        ({"k": TypedValue(ValueType.ARRAY, [])}, "array of arrays"),
    ],
)
def test_metadata_that_gguf_cannot_hold(path: Path, metadata: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        write_gguf(path, metadata, [])
    assert not path.exists()


def test_tensors_that_gguf_cannot_hold(path: Path):
    good = tensor("a", np.zeros(4, np.float32))
    q8_0 = quants.by_name("q8_0")
    assert q8_0 is not None
    cases = [
        ([good, good], "two tensors"),
        ([HostTensor("n" * 65, good.shape, good.quant_type, good.data)], "65 bytes"),
        ([HostTensor("a", (1, 1, 1, 1, 4), good.quant_type, good.data)], "shape"),
        ([HostTensor("a", (5,), good.quant_type, good.data)], "must have 20 bytes, not 16"),
        ([HostTensor("a", (2, 16), q8_0, np.zeros(34, np.uint8))], "not whole q8_0 blocks"),
    ]
    for tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            write_gguf(path, {}, tensors)
    with pytest.raises(ValueError, match="power of two"):
        write_gguf(path, {}, [good], alignment=24)
    assert list(path.parent.iterdir()) == []


scalars = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(width=32, allow_nan=False), st.text(max_size=20)
)
lists = st.one_of(
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
    st.lists(st.text(max_size=9), min_size=1, max_size=5),
)
keys = st.text(min_size=1, max_size=30).filter(lambda k: not k.startswith(("split.", "general.")))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(keys, scalars | lists, max_size=8), st.lists(st.integers(0, 5), max_size=4))
def test_written_metadata_read_back(tmp_path_factory: pytest.TempPathFactory, metadata: dict, shape: list[int]):
    path = tmp_path_factory.getbasetemp() / "round.gguf"
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    write_gguf(path, metadata, [tensor("t", values)])
    model = open_gguf(path)
    assert model.metadata == metadata
    assert np.array_equal(model.tensors["t"].to_float32(), values)
