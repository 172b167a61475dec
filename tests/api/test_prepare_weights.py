"""prepare_weights: what it gives, where it may be used, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import golden, layouts
from nvfp4.formats import FORMATS, block_format
from tests import prepared
from tests.vectorlib import same_values

from . import stubs
from .conftest import Card

RNG = np.random.default_rng(11)
ALL = pytest.mark.parametrize("format", list(FORMATS))
OFFSETS = np.array([0, 2, 2, 5], np.int32)


def says(error: type[Exception], *parts: str) -> Any:
    return pytest.raises(error, match="".join(f"(?=.*{part})" for part in parts))


def weights(format: str, *shape: int, layout: str = "tcgen", **options: Any) -> nvfp4.QTensor:
    x = RNG.standard_normal(shape).astype(np.float32)
    return nvfp4.quantize(x, format, scale_layout=layout, **options)


def any_bytes(format: str, *shape: int, plain: bool = False) -> nvfp4.QTensor:
    parts = prepared.parts(4, block_format(format), shape, plain=plain)
    return nvfp4.QTensor.from_parts(*parts, format, shape=shape, scale_layout="linear")


def arrays_of(q: nvfp4.QTensor) -> list[np.ndarray]:
    return [np.asarray(array) for array in (q.codes, q.scales, q.decode_scale)]


def same_bytes(a: nvfp4.QTensor, b: nvfp4.QTensor) -> bool:
    return [x.tobytes() for x in arrays_of(a)] == [y.tobytes() for y in arrays_of(b)]


def poisoned(like: nvfp4.QTensor) -> nvfp4.QTensor:
    """A tensor of the same shapes, of bytes that were never written."""
    codes, scales, decode = (
        np.full(a.nbytes, 0xA5, np.uint8).view(a.dtype).reshape(a.shape) for a in arrays_of(like)
    )
    return dataclasses.replace(like, codes=codes, scales=scales, decode_scale=decode)


# --- what it gives --------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("layout", ["linear", "tcgen"])
def test_prepared_weights_have_the_same_values(format: str, layout: str) -> None:
    b = weights(format, 40, 96, layout=layout)
    w = nvfp4.prepare_weights(b)
    assert (w.format, w.shape, w.scale_layout, w.groups) == (b.format, b.shape, "sm90", None)
    assert w.codes.shape == layouts.codes_shape(block_format(format), (40, 96), "sm90")
    for dtype in ("float32", "bfloat16"):
        assert same_values(w.dequantize(dtype), b.dequantize(dtype))


@ALL
@pytest.mark.parametrize("plain", [False, True])
def test_so_have_those_of_any_bytes(format: str, plain: bool) -> None:
    b = any_bytes(format, 3, 17, 96, plain=plain)
    assert same_values(nvfp4.prepare_weights(b).dequantize(), b.dequantize())


@pytest.mark.parametrize("scale", [None, 3.0, "amax", "row_amax", "by matrix"])
def test_the_decode_scale_is_kept_whatever_its_shape(scale: Any) -> None:
    if scale == "by matrix":
        scale = np.array([1, 2], np.float32)
    b = weights("nvfp4", 2, 5, 64, encode_scale=scale)
    w = nvfp4.prepare_weights(b)
    assert w.decode_scale.shape == b.decode_scale.shape
    assert np.asarray(w.decode_scale).tobytes() == np.asarray(b.decode_scale).tobytes()
    assert not np.shares_memory(w.decode_scale, b.decode_scale)
    assert same_values(w.dequantize(), b.dequantize())


@ALL
def test_products_take_them(format: str) -> None:
    b = weights(format, 40, 96)
    a = RNG.standard_normal((5, 96)).astype(ml_dtypes.bfloat16)
    expected = nvfp4.matmul(a, b, out_dtype="float32")
    assert same_values(nvfp4.matmul(a, nvfp4.prepare_weights(b), out_dtype="float32"), expected)
    quantized = nvfp4.quantize(a, "mxfp8")
    expected = nvfp4.matmul(quantized, b)
    assert same_values(nvfp4.matmul(quantized, nvfp4.prepare_weights(b)), expected)
    stack = weights(format, 3, 20, 96)
    expected = nvfp4.grouped_matmul(a, stack, row_offsets=OFFSETS)
    got = nvfp4.grouped_matmul(a, nvfp4.prepare_weights(stack), row_offsets=OFFSETS)
    assert same_values(got, expected)


@ALL
def test_equal_weights_give_equal_bytes_into_whatever_memory(format: str) -> None:
    b = any_bytes(format, 2, 17, 96)
    w = nvfp4.prepare_weights(b)
    out = poisoned(w)
    pointers = [array.ctypes.data for array in arrays_of(out)]
    assert nvfp4.prepare_weights(b, out=out) is out
    assert same_bytes(out, w)
    assert pointers == [array.ctypes.data for array in arrays_of(out)]


def test_other_weights_may_be_written_over_them() -> None:
    w = nvfp4.prepare_weights(weights("mxfp4", 17, 96))
    other = weights("mxfp4", 17, 96)
    nvfp4.prepare_weights(other, out=w)
    assert same_bytes(w, nvfp4.prepare_weights(other))
    assert same_values(w.dequantize(), other.dequantize())


def test_a_view_may_be_prepared_and_written() -> None:
    whole = weights("mxfp8", 34, 96, layout="linear")
    b = nvfp4.QTensor.from_parts(
        whole.codes[::2], whole.scales[::2], "mxfp8", scale_layout="linear"
    )
    expected = nvfp4.prepare_weights(b)
    wide = np.zeros((2, 4, 1024), np.uint8)
    out = dataclasses.replace(expected, codes=wide[:, ::2])
    nvfp4.prepare_weights(b, out=out)
    assert (wide[:, ::2] == expected.codes).all() and not wide[:, 1::2].any()


@ALL
def test_they_are_saved_and_loaded_as_plain_arrays(format: str, tmp_path: Path) -> None:
    w = nvfp4.prepare_weights(any_bytes(format, 2, 17, 96))
    np.savez(tmp_path / "w.npz", codes=w.codes, scales=w.scales, decode_scale=w.decode_scale)
    with np.load(tmp_path / "w.npz") as saved:
        again = nvfp4.QTensor.from_parts(
            saved["codes"], saved["scales"], format, shape=(2, 17, 96),
            decode_scale=saved["decode_scale"], scale_layout="sm90",
        )  # fmt: skip
    assert same_bytes(again, w)
    assert same_values(again.dequantize(), w.dequantize())


def test_they_are_copied_and_pickled() -> None:
    w = nvfp4.prepare_weights(weights("nvfp4", 5, 64))
    for again in (copy.copy(w), copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert same_bytes(again, w) and same_values(again.dequantize(), w.dequantize())
    assert repr(w) == "QTensor(nvfp4, shape=(5, 64), scale_layout='sm90', decode_scale=[], " \
        "numpy on host)"  # fmt: skip


# --- what it refuses ------------------------------------------------------------------------------

B = weights("nvfp4", 17, 64)
W = nvfp4.prepare_weights(B)
STACK = nvfp4.prepare_weights(weights("nvfp4", 3, 17, 64))
A = RNG.standard_normal((5, 64)).astype(np.float16)


@pytest.mark.parametrize("value", [(B.codes, B.scales), A, None], ids=["tuple", "array", "none"])
def test_only_a_tensor_can_be_prepared(value: Any) -> None:
    with says(TypeError, "b must be a QTensor", "from_parts"):
        nvfp4.prepare_weights(value)
    if value is not None:
        with says(TypeError, "out must be a QTensor"):
            nvfp4.prepare_weights(B, out=value)


def test_what_is_prepared_is_not_prepared_again() -> None:
    with says(ValueError, "b must have linear or tcgen scales", "'sm90'", "prepared already"):
        nvfp4.prepare_weights(W)


def test_grouped_tensors_and_other_numbers_of_axes_are_refused() -> None:
    with says(ValueError, "b must not be a grouped QTensor"):
        nvfp4.prepare_weights(nvfp4.grouped_quantize(A, "nvfp4", row_offsets=OFFSETS))
    for shape in ((64,), (2, 2, 3, 64)):
        with says(ValueError, r"b must have shape \[N, K\] or \[E, N, K\]"):
            nvfp4.prepare_weights(weights("nvfp4", *shape, layout="linear"))


def test_a_scale_with_a_sign_is_refused_where_the_host_reads_it() -> None:
    b = dataclasses.replace(B, scales=np.full_like(B.scales, 0x80))
    with says(ValueError, "b.scales", "bit 7"):
        nvfp4.prepare_weights(b)


def test_an_out_must_be_prepared_weights_of_the_same_kind() -> None:
    with says(ValueError, "out must have format 'nvfp4'; got 'mxfp4'"):
        nvfp4.prepare_weights(B, out=nvfp4.prepare_weights(weights("mxfp4", 17, 64)))
    with says(ValueError, r"out must have shape \(17, 64\); got \(18, 64\)"):
        nvfp4.prepare_weights(B, out=nvfp4.prepare_weights(weights("nvfp4", 18, 64)))
    with says(ValueError, "out must have scale_layout 'sm90'; got 'tcgen'"):
        nvfp4.prepare_weights(B, out=weights("nvfp4", 17, 64))
    rows = dataclasses.replace(W, decode_scale=np.ones((17, 1), np.float32))
    with says(ValueError, r"out.decode_scale must have the shape of that of b, \(\)"):
        nvfp4.prepare_weights(B, out=rows)


def test_an_out_may_be_written_and_overlaps_nothing() -> None:
    frozen = W.codes.copy()
    frozen.flags.writeable = False
    with says(ValueError, "out.codes must be writable"):
        nvfp4.prepare_weights(B, out=dataclasses.replace(W, codes=frozen))
    with says(ValueError, "out.decode_scale must not overlap b.decode_scale"):
        nvfp4.prepare_weights(B, out=dataclasses.replace(W, decode_scale=B.decode_scale))
    memory = np.zeros(1 << 12, np.uint8)
    codes, scales = (np.asarray(a) for a in (W.codes, W.scales))
    both = [memory[: a.size].reshape(a.shape) for a in (codes, scales)]
    with says(ValueError, "out.scales must not overlap out.codes"):
        nvfp4.prepare_weights(B, out=dataclasses.replace(W, codes=both[0], scales=both[1]))


def test_prepared_weights_are_nothing_but_weights() -> None:
    with says(ValueError, "a must have linear or tcgen scales", "only b may be prepared"):
        nvfp4.matmul(W, B)
    with says(ValueError, "a must have linear or tcgen scales", "only b may be prepared"):
        nvfp4.grouped_matmul(W, STACK, row_offsets=OFFSETS)
    x = np.ones((17, 64), np.float32)
    for call in (
        lambda: nvfp4.quantize(x, "nvfp4", out=W),
        lambda: nvfp4.quantize(x[None], "nvfp4", row_counts=OFFSETS[1:2], out=STACK),
        lambda: nvfp4.grouped_quantize(x, "nvfp4", row_offsets=OFFSETS, out=W),
        lambda: nvfp4.swiglu_quantize(np.ones((17, 128), np.float32), "nvfp4", out=W),
        lambda: nvfp4.rmsnorm_quantize(x, x[0], 1e-5, "nvfp4", out=W),
        lambda: nvfp4.matmul(x.astype(np.float16), B, out_dtype="nvfp4", out=W),
    ):
        with says(ValueError, "out must have linear or tcgen scales", "'sm90'"):
            call()
    for call in (
        lambda: nvfp4.quantize(x, "nvfp4", scale_layout="sm90"),
        lambda: nvfp4.grouped_quantize(x, "nvfp4", row_offsets=OFFSETS, scale_layout="sm90"),
    ):
        with says(ValueError, "scale_layout must be one of 'linear', 'tcgen'; got 'sm90'"):
            call()
    with pytest.raises(TypeError, match="scales"):
        nvfp4.interleave_scales(W)
    with says(ValueError, r"scales must have shape \[M, blocks\]"):
        nvfp4.interleave_scales(W.scales)


def test_parts_must_have_the_shapes_of_the_layout() -> None:
    def make(**changed: Any) -> nvfp4.QTensor:
        given = {"codes": W.codes, "scales": W.scales, "shape": (17, 64)}
        given |= changed
        return nvfp4.QTensor.from_parts(**given, format="nvfp4", scale_layout="sm90")

    assert make().shape == (17, 64)
    with says(ValueError, "shape must be given with scale_layout 'sm90'"):
        make(shape=None)
    with says(ValueError, r"codes must have shape \(2, 1, 512\)", "scale_layout 'sm90'"):
        make(codes=B.codes)
    with says(ValueError, r"scales must have shape \(144,\)", "scale_layout 'sm90'"):
        make(scales=W.scales[:-1])
    with says(ValueError, r"codes must have shape \(3, 1, 512\)"):
        make(shape=(33, 64))
    with says(ValueError, "'sm90'", r"\[E, M, K\]"):
        make(shape=(2, 2, 17, 64))
    with says(ValueError, "groups must be None"):
        make(groups=OFFSETS)
    with says(ValueError, "tile_starts belong to groups"):
        dataclasses.replace(W, tile_starts=OFFSETS)
    with says(ValueError, r"codes must have shape \(17, 32\)"):
        dataclasses.replace(W, scale_layout="tcgen")


@pytest.mark.parametrize("header", [b"\xa5" * 16, b"\0\0\0\x3f" + bytes(12), bytes(15) + b"\1"])
def test_scales_that_were_never_written_are_noticed_where_the_host_reads_them(
    header: bytes,
) -> None:
    for format in ("nvfp4", "mxfp4"):
        w = nvfp4.prepare_weights(weights(format, 2, 17, 64))
        w.scales[1, :16] = np.frombuffer(header, np.uint8)
        with says(ValueError, "scales of a prepared", "nvfp4.prepare_weights writes", "got"):
            w.dequantize()
        with says(ValueError, "b.scales of a prepared", "nvfp4.prepare_weights writes"):
            nvfp4.grouped_matmul(A, w, row_offsets=OFFSETS[:3])


def test_the_golden_model_makes_the_bytes() -> None:
    expected = golden.prepare_weights(
        B.codes, B.scales, FORMATS["nvfp4"], shape=(17, 64), scale_layout="tcgen"
    )
    assert [a.tobytes() for a in arrays_of(W)[:2]] == [a.tobytes() for a in expected]


# --- on the kernels -------------------------------------------------------------------------------


def there(cupy: stubs.Cupy, q: nvfp4.QTensor) -> nvfp4.QTensor:
    codes, scales, decode = (cupy.asarray(array) for array in arrays_of(q))
    return dataclasses.replace(q, codes=codes, scales=scales, decode_scale=decode)


def back(q: nvfp4.QTensor) -> nvfp4.QTensor:
    codes, scales, decode = (a.values for a in (q.codes, q.scales, q.decode_scale))
    return dataclasses.replace(q, codes=codes, scales=scales, decode_scale=decode)


@ALL
@pytest.mark.parametrize("layout", ["linear", "tcgen"])
def test_kernels_make_the_bytes_of_the_golden_model(
    card: Card, cupy: stubs.Cupy, format: str, layout: str
) -> None:
    card.simulate = True
    for shape, scale in (((17, 96), None), ((2, 5, 64), "row_amax")):
        if format != "nvfp4" and scale:
            scale = None
        b = weights(format, *shape, layout=layout, encode_scale=scale)
        expected = nvfp4.prepare_weights(b)
        got = nvfp4.prepare_weights(there(cupy, b))
        assert got.scale_layout == "sm90" and same_bytes(back(got), expected)
        values = got.dequantize()
        assert same_values(values.values, b.dequantize())


@ALL
def test_so_they_do_on_the_simulated_machine(format: str) -> None:
    b = any_bytes(format, 2, 17, 96)
    expected, values = nvfp4.prepare_weights(b), b.dequantize("float16")
    view = dataclasses.replace(b, codes=np.repeat(b.codes, 2, axis=1)[:, ::2])
    out = poisoned(expected)
    wide = np.full((2, 2, 4, out.codes.shape[-1]), 0xA5, np.uint8)
    apart = dataclasses.replace(out, codes=wide[:, :, ::2])
    with nvfp4.simulate():
        assert same_bytes(nvfp4.prepare_weights(b), expected)
        assert same_bytes(nvfp4.prepare_weights(view, out=out), expected)
        nvfp4.prepare_weights(b, out=apart)
        assert same_values(expected.dequantize("float16"), values)
    assert (wide[:, :, ::2] == expected.codes).all() and (wide[:, :, 1::2] == 0xA5).all()


def test_with_out_nothing_is_allocated_and_pointers_stay(card: Card, cupy: stubs.Cupy) -> None:
    card.simulate = True
    b = weights("mxfp4", 3, 17, 64)
    expected = nvfp4.prepare_weights(b)
    out = there(cupy, poisoned(expected))
    pointers = [array.data.ptr for array in (out.codes, out.scales, out.decode_scale)]
    device = there(cupy, b)
    cupy.allocated.clear()
    for _ in range(3):
        out.codes.values[...] = 0xA5
        out.scales.values[...] = 0xA5
        assert nvfp4.prepare_weights(device, out=out, stream=7) is out
        assert same_bytes(back(out), expected)
    assert not cupy.allocated
    assert pointers == [array.data.ptr for array in (out.codes, out.scales, out.decode_scale)]
    assert len(card.launched) == 1 and len(card.repeated) == 2
    assert {outcome[2] for outcome in card.outcomes} == {7}


def test_what_kernels_write_starts_at_a_multiple_of_sixteen_bytes(
    card: Card, cupy: stubs.Cupy
) -> None:
    out = there(cupy, W)
    for name in ("codes", "scales"):
        array = getattr(out, name).values
        memory = np.zeros(array.nbytes + 32, np.uint8)
        start = -memory.ctypes.data % 16 + 8
        moved = memory[start : start + array.nbytes].reshape(array.shape)
        changed: Any = {name: stubs.CupyArray(moved)}
        bad = dataclasses.replace(out, **changed)
        with says(ValueError, f"out.{name} must start at a multiple of 16 bytes; got 8"):
            nvfp4.prepare_weights(there(cupy, B), out=bad)
    assert not card.launched


def test_codes_at_any_address_are_read(card: Card, cupy: stubs.Cupy) -> None:
    card.simulate = True
    memory = np.zeros(B.codes.nbytes + 17, np.uint8)
    start = -memory.ctypes.data % 16 + 1
    moved = memory[start : start + B.codes.nbytes].reshape(B.codes.shape)
    moved[...] = B.codes
    b = dataclasses.replace(there(cupy, B), codes=stubs.CupyArray(moved))
    assert same_bytes(back(nvfp4.prepare_weights(b)), W)
    assert card.facts["aligned"] is False


def test_plans_of_products_are_told_that_weights_are_prepared(card: Card, cupy: stubs.Cupy) -> None:
    a, b = cupy.asarray(A), there(cupy, W)
    nvfp4.matmul(a, b)
    assert card.facts["b_layout"] == "sm90" and card.facts["aligned"] is True
    buffers = card.buffers
    assert [buffers[name].owner for name in ("b_codes", "b_scales", "b_decode")] == [
        b.codes, b.scales, b.decode_scale,
    ]  # fmt: skip
    memory = np.zeros(W.scales.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + 4
    moved = stubs.CupyArray(memory[start : start + W.scales.nbytes])
    nvfp4.matmul(a, dataclasses.replace(b, scales=moved))
    assert card.facts["aligned"] is False
