"""What is asked of each kernel: bytes, in poisoned memory, wherever it runs.

Each function here plans a call, runs it by a *runner* and compares every byte of the results with
what is expected. The tests of this folder run them on the simulated machine, those of ``tests/gpu``
the same cases on a card. A runner is called as ``run(plan, facts, buffers, outputs)`` and returns
the outputs as NumPy arrays, which had been filled with poison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from nvfp4 import golden, layouts, plans
from nvfp4.epilogue import Epilogue
from nvfp4.formats import FORMATS, BlockFormat
from nvfp4.golden.grouped import assign_rows
from tests.vectorlib import same_values

Run = Callable[[str, Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]

#: What every output holds before a call.
POISON = 0xA5
ONE = np.float32(1)


class Out:
    """The shape and dtype of an output, and by how many bytes it is off a multiple of 16."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, off: int = 0) -> None:
        self.shape, self.dtype, self.off = tuple(shape), np.dtype(dtype), off

    def poisoned(self) -> np.ndarray:
        """An array of this kind, full of poison."""
        count = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        memory = np.full(count + 32, POISON, np.uint8)
        start = -memory.ctypes.data % 16 + self.off
        return memory[start : start + count].view(self.dtype).reshape(self.shape)


def launches(plan: str, arch: str, facts: Mapping[str, Any]) -> Any:
    """What a plan's name and facts stand for."""
    return getattr(plans, plan)(arch, **facts)


def assert_bytes(name: str, got: np.ndarray, expected: np.ndarray) -> None:
    """Equal dtypes, shapes and bytes."""
    expected = np.asarray(expected)
    assert got.dtype == expected.dtype and got.shape == expected.shape, name
    if got.tobytes() != expected.tobytes():
        unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[got.dtype.itemsize]
        wrong = np.argwhere(got.view(unsigned) != expected.view(unsigned))
        at = tuple(int(i) for i in wrong[0])
        raise AssertionError(
            f"{name}: {len(wrong)} of {got.size} wrong, the first at {at}: {got[at]!r}, "
            f"expected {expected[at]!r}"
        )


def assert_values(
    name: str, got: np.ndarray, expected: np.ndarray, zero_sign_free: bool = False
) -> None:
    """Equal but for the pattern of a NaN (and the sign of a zero, if said)."""
    assert same_values(got, expected, zero_sign_free), name


def kind_of(encode_scale: Any, batches: int | None, fmt: BlockFormat, grouped: bool = False) -> str:
    """What plans call an encode scale."""
    if encode_scale is None:
        return "none"
    if isinstance(encode_scale, str):
        return encode_scale if fmt.scale == "e4m3" else "none"
    if fmt.element != "e2m1":
        return "none"
    if np.ndim(encode_scale) == 0:
        return "array" if isinstance(encode_scale, np.ndarray) else "scalar"
    if np.ndim(encode_scale) == 1:
        return "expert" if grouped else "batch"
    return "row"


def dtype_name(x: np.ndarray) -> str:
    return x.dtype.name


# Quantisers --------------------------------------------------------------------------------------


def quantize(
    run: Run,
    x: np.ndarray,
    fmt: BlockFormat,
    *,
    encode_scale: Any = None,
    scale_rounding: str = "rceil",
    scale_layout: str = "tcgen",
    expected: tuple[Any, Any, Any] | None = None,
    gap: int = 0,
    off: int = 0,
    aligned: bool | None = None,
) -> None:
    """The dense quantiser on x [M, K] or [E, M, K].

    `gap` elements of NaN lie between rows; x starts `off` elements off a multiple of 16 bytes, and
    the codes `off` bytes.
    """
    if expected is None:
        more = {"encode_scale": encode_scale, "scale_rounding": scale_rounding}
        expected = golden.quantize(x, fmt, scale_layout=scale_layout, **more)
    lead, columns = x.shape[:-1], x.shape[-1]
    if scale_layout == "linear" and x.ndim != 3:
        batches, rows = 1, int(np.prod(lead, dtype=np.int64))
    else:
        batches, rows = (lead[0], lead[1]) if x.ndim == 3 else (1, lead[0])
    memory = spread(x.reshape(batches * rows, columns), gap, off)
    kind = kind_of(encode_scale, batches, fmt)
    if aligned is None:
        aligned = not off and not (columns + gap) * x.dtype.itemsize % 16
    facts = {
        "format": fmt.name,
        "dtype": dtype_name(x),
        "rows": rows,
        "columns": columns,
        "batches": batches,
        "row_stride": columns + gap,
        "batch_stride": rows * (columns + gap),
        "scale_layout": scale_layout,
        "scale_rounding": scale_rounding,
        "encode": kind,
        "aligned": aligned,
    }
    given = None if kind in ("none", "amax", "row_amax") else encode_scale
    decode = np.shape(expected[2])
    outputs = {
        "codes": Out(layouts.codes_shape(fmt, x.shape), np.uint8, off),
        "scales": Out(layouts.scale_shape(fmt, x.shape, scale_layout), np.uint8),
        "decode_scale": Out(decode if kind in ("batch", "row", "row_amax") else (), np.float32),
    }
    for got in by_each_kernel(
        run, "quantize", facts, {"x": memory, "encode_scale": given}, outputs
    ):
        assert_bytes("codes", got["codes"], expected[0])
        assert_bytes("scales", got["scales"], expected[1])
        whole = np.broadcast_to(got["decode_scale"], decode).copy()
        assert_bytes("decode_scale", whole, expected[2])


def by_each_kernel(
    run: Run,
    plan: str,
    facts: dict[str, Any],
    buffers: Mapping[str, Any],
    outputs: Mapping[str, Out],
) -> Iterator[dict[str, np.ndarray]]:
    """The results of the reference kernel and, where the plan has another one, of that."""
    yield run(plan, {**facts, "reference": True}, buffers, outputs)
    if getattr(run, "reference_only", False):
        return
    arch = getattr(run, "arch", "sm_90a")
    planned = [launches(plan, arch, {**facts, "reference": flag}) for flag in (False, True)]
    programs = [[one.program for one in chosen] for chosen in planned]
    if programs[0] != programs[1]:
        yield run(plan, facts, buffers, outputs)


def spread(x: np.ndarray, gap: int, off: int) -> np.ndarray:
    """Rows of x with `gap` elements of NaN behind each, `off` elements off a multiple of 16
    bytes."""
    rows, columns = x.shape
    size = x.dtype.itemsize
    memory = np.full((rows * (columns + gap) + off + 16) * size, 0xFF, np.uint8)
    start = -memory.ctypes.data % 16 + off * size
    made = memory[start : start + rows * (columns + gap) * size].view(x.dtype)
    made = made.reshape(rows, columns + gap)
    made[:, :columns] = x
    return made


def grouped_quantize(
    run: Run,
    x: np.ndarray,
    fmt: BlockFormat,
    *,
    row_offsets: np.ndarray,
    expert_ids: np.ndarray | None = None,
    row_indices: np.ndarray | None = None,
    encode_scale: Any = None,
    scale_rounding: str = "rceil",
    scale_layout: str = "tcgen",
    tile_starts: np.ndarray | None = None,
    tiles: int | None = None,
    expected: tuple[Any, Any, Any] | None = None,
    gap: int = 0,
    off: int = 0,
) -> None:
    """The grouped quantiser on x [M, K]."""
    if expected is None:
        expected = golden.grouped_quantize(
            x,
            fmt,
            row_offsets=row_offsets,
            expert_ids=expert_ids,
            row_indices=row_indices,
            encode_scale=encode_scale,
            scale_rounding=scale_rounding,
            scale_layout=scale_layout,
            tile_starts=tile_starts,
            tiles=tiles,
        )
    columns = x.shape[1]
    rows = x.shape[0] if row_indices is None else len(row_indices)
    kind = kind_of(encode_scale, None, fmt, grouped=True)
    facts = {
        "format": fmt.name,
        "dtype": dtype_name(x),
        "input_rows": x.shape[0],
        "rows": rows,
        "columns": columns,
        "row_stride": columns + gap,
        "groups": len(row_offsets) - 1,
        "tiles": expected[1].shape[0] if scale_layout == "tcgen" else None,
        "scale_layout": scale_layout,
        "scale_rounding": scale_rounding,
        "encode": kind,
        "experts": len(encode_scale) if kind == "expert" else None,
        "aligned": not off and not (columns + gap) * x.dtype.itemsize % 16,
        **index_facts(row_offsets, expert_ids, row_indices, tile_starts),
    }
    buffers = {
        "x": spread(x, gap, off),
        "encode_scale": None if kind in ("none", "row_amax") else encode_scale,
        "row_offsets": row_offsets,
        "expert_ids": expert_ids,
        "row_indices": row_indices,
        "tile_starts": tile_starts,
    }
    outputs = {
        "codes": Out(expected[0].shape, np.uint8, off),
        "scales": Out(expected[1].shape, np.uint8),
        "decode_scale": Out(expected[2].shape, np.float32),
    }
    for got in by_each_kernel(run, "grouped_quantize", facts, buffers, outputs):
        for name, right in zip(("codes", "scales", "decode_scale"), expected, strict=True):
            assert_bytes(name, got[name], right)


def index_facts(
    row_offsets: np.ndarray,
    expert_ids: np.ndarray | None,
    row_indices: np.ndarray | None,
    tile_starts: np.ndarray | None,
) -> dict[str, Any]:
    """What plans are told of index arrays."""

    def name(array: np.ndarray | None) -> str | None:
        return None if array is None else array.dtype.name

    return {
        "offsets_dtype": name(row_offsets),
        "ids_dtype": name(expert_ids),
        "indices_dtype": name(row_indices),
        "starts_dtype": name(tile_starts),
    }


# Readers -----------------------------------------------------------------------------------------


def dequantize(
    run: Run,
    codes: np.ndarray,
    scales: np.ndarray,
    decode_scale: np.ndarray,
    fmt: BlockFormat,
    *,
    shape: tuple[int, ...],
    scale_layout: str,
    dtype: str = "float32",
    row_offsets: np.ndarray | None = None,
    tile_starts: np.ndarray | None = None,
    expected: np.ndarray | None = None,
    aligned: bool = True,
) -> None:
    """The values of a quantised array, dense [M, K] or [E, M, K], or grouped."""
    if expected is None:
        expected = golden.dequantize(
            codes,
            scales,
            decode_scale,
            fmt,
            shape=shape,
            scale_layout=scale_layout,
            dtype=dtype,
            row_offsets=row_offsets,
            tile_starts=tile_starts,
        )
    batches, rows = (shape[0], shape[1]) if len(shape) == 3 else (1, shape[0])
    decode = {0: "scalar", 1: "batch" if row_offsets is None else "group", 2: "row", 3: "batch_row"}
    grouped = row_offsets is not None
    facts = {
        "format": fmt.name,
        "rows": rows,
        "columns": shape[-1],
        "batches": batches,
        "scale_layout": scale_layout,
        "dtype": dtype,
        "decode": decode[np.ndim(decode_scale)],
        "groups": len(row_offsets) - 1 if row_offsets is not None else None,
        "tiles": scales.shape[0] if grouped and scale_layout == "tcgen" else None,
        "offsets_dtype": row_offsets.dtype.name if row_offsets is not None else None,
        "starts_dtype": tile_starts.dtype.name if tile_starts is not None else None,
        "aligned": aligned,
    }
    buffers = {
        "codes": spread(codes.reshape(1, -1), 0, 0 if aligned else 1),
        "scales": scales,
        "decode_scale": decode_scale,
        "row_offsets": row_offsets,
        "tile_starts": tile_starts,
    }
    size = expected.dtype.itemsize
    outputs = {"out": Out(shape, expected.dtype, 0 if aligned else size)}
    got = run("dequantize", facts, buffers, outputs)
    assert_values("values", got["out"], expected)


def interleave(run: Run, scales: np.ndarray) -> None:
    """Linear scales [E, M, blocks] to the tcgen layout and back, over poisoned padding."""
    batches, rows, blocks = scales.shape
    facts = {"rows": rows, "blocks": blocks, "batches": batches}
    tiled = golden.interleave_scales(scales)
    got = run("interleave_scales", facts, {"scales": scales}, {"out": Out(tiled.shape, np.uint8)})
    assert_bytes("tiles", got["out"], tiled)
    # The way back must not look at padding.
    padding = golden.interleave_scales(np.ones_like(scales)) == 0
    tiled = np.where(padding, np.uint8(0xFF), tiled)
    got = run("deinterleave_scales", facts, {"scales": tiled}, {"out": Out(scales.shape, np.uint8)})
    assert_bytes("rows", got["out"], scales)


# Products ----------------------------------------------------------------------------------------


class Quantized:
    """A quantised operand: its arrays, and element * scale for the golden model."""

    def __init__(
        self,
        fmt: BlockFormat,
        codes: np.ndarray,
        scales: np.ndarray,
        decode_scale: np.ndarray,
        scale_layout: str,
        row_offsets: np.ndarray | None = None,
        tile_starts: np.ndarray | None = None,
    ) -> None:
        self.fmt, self.codes, self.decode_scale = fmt, codes, np.asarray(decode_scale)
        self.scale_layout, self.row_offsets, self.tile_starts = (
            scale_layout,
            row_offsets,
            tile_starts,
        )
        self.shape = (*codes.shape[:-1], codes.shape[-1] * fmt.codes_per_byte)
        self.values = golden.element_scale_product(
            codes,
            scales,
            fmt,
            shape=self.shape,
            scale_layout=scale_layout,
            row_offsets=row_offsets,
            tile_starts=tile_starts,
        )
        self.scales = scales

    def poison_padding(self, byte: int) -> Quantized:
        """Fill what is no block's scale: products must not look at it."""
        if self.scale_layout == "tcgen":
            rows = np.ones((*self.shape[:-1], self.shape[-1] // self.fmt.block), np.uint8)
            if self.row_offsets is None:
                used = golden.interleave_scales(rows) == 1
            else:
                where = assign_rows(
                    self.shape[0], self.row_offsets, tile_starts=self.tile_starts
                ).scale_row
                marks = np.zeros((self.scales.shape[0] * 128, rows.shape[1]), np.uint8)
                marks[where[where >= 0]] = 1
                used = golden.interleave_scales(marks) == 1
            self.scales = np.where(used, self.scales, np.uint8(byte))
        return self


def quantized(
    rng: np.random.Generator,
    fmt: BlockFormat,
    shape: tuple[int, ...],
    *,
    scale_layout: str = "tcgen",
    encode_scale: Any = None,
    row_offsets: np.ndarray | None = None,
    expert_ids: np.ndarray | None = None,
    tile_starts: np.ndarray | None = None,
    tiles: int | None = None,
) -> Quantized:
    """A quantised operand of random values of very different sizes."""
    size = np.exp2(rng.integers(-6, 6, (*shape[:-1], 1))).astype(np.float32)
    x = rng.standard_normal(shape, np.float32) * size
    if row_offsets is None:
        made = golden.quantize(x, fmt, encode_scale=encode_scale, scale_layout=scale_layout)
    else:
        made = golden.grouped_quantize(
            x,
            fmt,
            row_offsets=row_offsets,
            expert_ids=expert_ids,
            encode_scale=encode_scale,
            scale_layout=scale_layout,
            tile_starts=tile_starts,
            tiles=tiles,
        )
    return Quantized(fmt, *made, scale_layout, row_offsets, tile_starts)


def _operand(letter: str, operand: Any, off: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts and buffers of an operand, whose codes are `off` bytes off a multiple of 16."""
    if isinstance(operand, np.ndarray):
        facts = {
            f"{letter}_format": None,
            f"{letter}_dtype": operand.dtype.name,
            f"{letter}_layout": None,
            f"decode_{letter}": "none",
        }
        names = (f"{letter}_codes", f"{letter}_scales", f"{letter}_decode")
        return facts, {letter: operand} | dict.fromkeys(names)
    grouped = operand.row_offsets is not None
    stacked = len(operand.shape) == 3
    decode = {
        0: "scalar",
        1: "group" if grouped else "batch",
        2: "row",
        3: "batch_row",
    }[operand.decode_scale.ndim]
    layout = operand.scale_layout
    if grouped and layout == "tcgen":
        layout = "tcgen_grouped"
    facts = {
        f"{letter}_format": operand.fmt.name,
        f"{letter}_dtype": None,
        f"{letter}_layout": layout,
        f"decode_{letter}": decode,
    }
    if layout == "tcgen_grouped":
        facts[f"{letter}_tiles"] = operand.scales.shape[0]
    assert stacked == (letter == "b" and len(operand.shape) == 3)
    buffers = {
        letter: None,
        f"{letter}_codes": spread(operand.codes.reshape(1, -1), 0, off),
        f"{letter}_scales": operand.scales,
        f"{letter}_decode": operand.decode_scale,
    }
    return facts, buffers


def _call(
    a: Any, b: Any, alpha: Any, out_dtype: str, epilogue: Epilogue | None, gap: int, off: int
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Facts, buffers, and the golden model's arguments, of what all products have."""
    facts_a, buffers_a = _operand("a", a, off)
    facts_b, buffers_b = _operand("b", b, off)
    kind = "value"
    if isinstance(alpha, np.ndarray):
        kind = "expert" if alpha.ndim else "array"
    facts = {**facts_a, **facts_b, "alpha": kind, "out_dtype": out_dtype, "aligned": not off}
    buffers = {**buffers_a, **buffers_b, "alpha": alpha}
    more = {
        "alpha": alpha,
        "decode_a": None if isinstance(a, np.ndarray) else a.decode_scale,
        "decode_b": b.decode_scale,
        "out_dtype": "float32" if out_dtype in FORMATS else out_dtype,
        "epilogue": None,
    }
    if isinstance(a, np.ndarray):
        facts["a_row_stride"] = a.shape[1] + gap
        facts["aligned"] = not off and not (a.shape[1] + gap) % 8
        buffers["a"] = spread(a, gap, off)
    if epilogue is not None:
        facts["epilogue"] = epilogue.code(tuple(array.dtype.name for array in epilogue.arrays))
        buffers |= {f"epilogue_{i}": array for i, array in enumerate(epilogue.arrays)}
        more["epilogue"] = epilogue.on_host
    return facts, buffers, more


def _values(operand: Any) -> np.ndarray:
    return operand if isinstance(operand, np.ndarray) else operand.values


def _compare(
    run: Run,
    plan: str,
    facts: dict[str, Any],
    buffers: dict[str, Any],
    expected: np.ndarray,
    parts: tuple[Any, ...] | None,
    zero_sign_free: bool,
) -> None:
    if parts is None:
        got = run(plan, facts, buffers, {"out": Out(expected.shape, expected.dtype)})
        assert_values("product", got["out"], expected, zero_sign_free)
        return
    names = ("out_codes", "out_scales", "out_decode")
    outputs = {
        name: Out(np.shape(part), np.asarray(part).dtype)
        for name, part in zip(names, parts, strict=True)
    }
    got = run(plan, facts, buffers, outputs)
    for name, part in zip(names, parts, strict=True):
        assert_bytes(name, got[name], part)


def matmul(
    run: Run,
    a: Any,
    b: Quantized,
    *,
    alpha: Any = ONE,
    out_dtype: str = "float32",
    out_layout: str = "tcgen",
    epilogue: Epilogue | None = None,
    expected: np.ndarray | None = None,
    gap: int = 0,
    off: int = 0,
) -> None:
    """A product; `a` is an array or Quantized. Exactly the golden model's bits, signs of zeros
    included."""
    facts, buffers, more = _call(a, b, alpha, out_dtype, epilogue, gap, off)
    facts |= {"rows": a.shape[0], "columns": b.shape[0], "depth": b.shape[1]}
    free = expected is not None
    if expected is None:
        expected = golden.matmul(_values(a), b.values, **more)
    parts = None
    if out_dtype in FORMATS:
        parts = golden.quantize(expected, FORMATS[out_dtype], scale_layout=out_layout)
        facts["out_layout"] = out_layout
    _compare(run, "matmul", facts, buffers, expected, parts, free)


def grouped_matmul(
    run: Run,
    a: Any,
    b: Quantized,
    *,
    row_offsets: np.ndarray,
    expert_ids: np.ndarray | None = None,
    row_indices: np.ndarray | None = None,
    alpha: Any = ONE,
    out_dtype: str = "float32",
    out_layout: str = "tcgen",
    out_starts: np.ndarray | None = None,
    out_tiles: int | None = None,
    epilogue: Epilogue | None = None,
    expected: np.ndarray | None = None,
    gap: int = 0,
    off: int = 0,
) -> None:
    """A grouped product; b is [E, N, K]."""
    facts, buffers, more = _call(a, b, alpha, out_dtype, epilogue, gap, off)
    rows = a.shape[0] if row_indices is None else len(row_indices)
    starts = None if isinstance(a, np.ndarray) else a.tile_starts
    facts |= {
        "input_rows": a.shape[0],
        "rows": rows,
        "columns": b.shape[1],
        "depth": b.shape[2],
        "experts": b.shape[0],
        "groups": len(row_offsets) - 1,
        **index_facts(row_offsets, expert_ids, row_indices, starts),
    }
    buffers |= {
        "row_offsets": row_offsets,
        "expert_ids": expert_ids,
        "row_indices": row_indices,
        "tile_starts": starts,
        "out_tile_starts": out_starts,
    }
    free = expected is not None
    ranges = {"row_offsets": row_offsets, "expert_ids": expert_ids, "row_indices": row_indices}
    if expected is None:
        expected = golden.grouped_matmul(_values(a), b.values, **ranges, **more)
    parts = None
    if out_dtype in FORMATS:
        parts = golden.grouped_quantize(
            expected,
            FORMATS[out_dtype],
            row_offsets=row_offsets,
            scale_layout=out_layout,
            tile_starts=out_starts,
            tiles=out_tiles,
        )
        facts["out_layout"] = out_layout
        facts["out_tiles"] = parts[1].shape[0] if out_layout == "tcgen" else None
        facts["out_starts_dtype"] = None if out_starts is None else out_starts.dtype.name
    _compare(run, "grouped_matmul", facts, buffers, expected, parts, free)
