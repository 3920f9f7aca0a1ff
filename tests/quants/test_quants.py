"""Every tensor type against the `gguf` package and the golden blocks, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from caudal import quants
from caudal.quants import QuantType
from conftest import shared_dir

PLAIN_INTS_AND_F64 = {"i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "f64": np.float64}
TYPES = quants.all_types()
BLOCK_TYPES = [t for t in TYPES if t.name not in PLAIN_INTS_AND_F64]
QUANTIZABLE = [t for t in BLOCK_TYPES if t.quantize is not None]


def by_name(types: list[QuantType]) -> list[object]:
    return [pytest.param(t, id=t.name) for t in types]


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    """Equal down to the sign of zero; any NaN equals any NaN."""
    got, want = got.reshape(-1), want.reshape(-1)
    nan = np.isnan(want)
    return np.array_equal(np.isnan(got), nan) and np.array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


def package_type(t: QuantType) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[t.name.upper()]


def test_registry():
    assert [t.ggml_id for t in TYPES] == sorted({t.ggml_id for t in TYPES})
    for t in TYPES:
        assert quants.by_ggml_id(t.ggml_id) is t
        assert quants.by_name(t.name) is quants.by_name(t.name.upper()) is t
        assert t.ggml_id == package_type(t)
        assert (t.block_size, t.block_bytes) == gguf.GGML_QUANT_SIZES[package_type(t)]
    assert quants.by_ggml_id(4) is None
    assert quants.by_name("q3") is None
    names = {t.name for t in TYPES}
    assert {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"} <= names
    assert {"q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"} <= names
    assert {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "tq1_0", "tq2_0", "mxfp4"} <= names


def test_sizes():
    q4_1 = quants.by_name("q4_1")
    assert q4_1 is not None
    assert q4_1.num_bytes(64) == 40
    assert q4_1.bits_per_weight == 5
    with pytest.raises(ValueError, match="blocks of 32"):
        q4_1.num_bytes(33)


@pytest.mark.parametrize("t", by_name([t for t in BLOCK_TYPES if t.name != "f32"]))
def test_dequantize_equals_the_golden_blocks(t: QuantType):
    with np.load(shared_dir("golden", "quant", "blocks.npz")) as golden:
        raw, values = golden[f"{t.name.upper()}_raw"], golden[f"{t.name.upper()}_values"]
    assert same_bits(t.dequantize(raw.reshape(-1)), values)


@pytest.mark.parametrize("t", by_name(BLOCK_TYPES))
def test_dequantize_equals_the_gguf_package_on_any_bytes(t: QuantType):
    raw = np.random.default_rng(t.ggml_id).integers(0, 256, 3000 * t.block_bytes, dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw.reshape(3000, -1), package_type(t))
    got = t.dequantize(raw)
    assert got.dtype == np.float32
    assert got.shape == (3000 * t.block_size,)
    assert same_bits(got, want)


@pytest.mark.parametrize(("name", "dtype"), PLAIN_INTS_AND_F64.items())
def test_plain_numbers(name: str, dtype: type[np.generic]):
    t = quants.by_name(name)
    assert t is not None
    values = np.array([0, 1, -3, 100], dtype)
    assert t.dequantize(values.view(np.uint8)).tolist() == [0, 1, -3, 100]


def test_dequantize_takes_any_view_and_copies():
    t = quants.by_name("f32")
    assert t is not None
    raw = np.arange(33, dtype=np.uint8)[1:]  # not aligned
    out = t.dequantize(raw)
    assert not np.shares_memory(out, raw)
    q8_0 = quants.by_name("q8_0")
    assert q8_0 is not None
    strided = np.repeat(np.arange(68, dtype=np.uint8), 2)[::2]
    assert np.array_equal(q8_0.dequantize(strided), q8_0.dequantize(strided.copy()))
    strided.flags.writeable = False
    assert len(q8_0.dequantize(strided)) == 64


@pytest.mark.parametrize("t", by_name(TYPES))
def test_wrong_lengths_are_refused(t: QuantType):
    assert len(t.dequantize(np.empty(0, np.uint8))) == 0
    if t.block_bytes > 1:
        with pytest.raises(ValueError, match=t.name):
            t.dequantize(np.zeros(t.block_bytes + 1, np.uint8))
    with pytest.raises(ValueError, match="uint8"):
        t.dequantize(np.zeros(t.block_bytes, np.float32))  # type: ignore[arg-type]
    if t.quantize is not None and t.block_size > 1:
        with pytest.raises(ValueError, match=t.name):
            t.quantize(np.zeros(t.block_size + 1, np.float32))


def hard_numbers(seed: int) -> np.ndarray:
    """Rows of many sizes, with zeros, ties, equal numbers, extremes of one sign, and single outliers."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((400, 256)) * 10.0 ** rng.integers(-7, 5, (400, 1))
    rows[::10] = 0
    rows[1::10] = np.round(rows[1::10] * 2) / 2
    rows[2::10] = rows[2::10, :1]
    rows[3::10] = np.abs(rows[3::10])
    rows[4::10] = -np.abs(rows[4::10])
    rows[5::10, ::33] *= 1000
    rows[6::10] = rng.integers(-127, 128, (40, 256)) / 2
    return rows.astype(np.float32)


@pytest.mark.parametrize("t", by_name(QUANTIZABLE))
def test_quantize_equals_the_gguf_package(t: QuantType):
    assert t.quantize is not None
    rows = hard_numbers(t.ggml_id)
    with np.errstate(all="ignore"):
        want = gguf.quants.quantize(rows, package_type(t))
    got = t.quantize(rows.reshape(-1))
    assert got.dtype == np.uint8
    assert np.array_equal(got, want.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("t", by_name(QUANTIZABLE))
def test_quantize_of_decoded_numbers_loses_nothing(t: QuantType):
    """A block whose numbers already lie on the grid comes back as the same numbers (within F16 of the scale)."""
    assert t.quantize is not None
    values = np.random.default_rng(7).standard_normal(64 * 256).astype(np.float32)
    once = t.dequantize(t.quantize(values))
    twice = t.dequantize(t.quantize(once))
    step = 2.0 ** -(t.bits_per_weight - 3) if t.block_size > 1 else 2.0**-8
    assert np.abs(once - values).max() < step * np.abs(values).max()
    assert np.abs(twice - once).max() < 0.002 * np.abs(values).max()


@pytest.mark.parametrize("t", by_name([t for t in QUANTIZABLE if t.block_size > 1]))
def test_quantize_refuses_what_no_block_can_hold(t: QuantType):
    assert t.quantize is not None
    for bad in (np.inf, -np.inf, np.nan):
        values = np.zeros(t.block_size * 3, np.float32)
        values[-1] = bad
        with pytest.raises(ValueError, match="infinite or NaN"):
            t.quantize(values)


@pytest.mark.parametrize("t", by_name([t for t in QUANTIZABLE if t.block_size > 1]))
def test_quantize_of_tiny_numbers_gives_zeros(t: QuantType):
    """Below the range of F16 (and where 1 / d overflows) the scale is 0."""
    assert t.quantize is not None
    values = np.full(t.block_size, 1e-42, np.float32)
    values[0] = -1e-42
    assert not t.dequantize(t.quantize(values)).any()


def test_bf16_rounds_to_even_and_keeps_nan():
    t = quants.by_name("bf16")
    assert t is not None
    assert t.quantize is not None
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0xFFC00000, 0x7F7FFFFF, 0xFF800000], np.uint32)
    want = [0x3F80, 0x3F82, 0x3F81, 0x7FC0, 0xFFC0, 0x7F80, 0xFF80]
    assert t.quantize(bits.view(np.float32)).view(np.uint16).tolist() == want
