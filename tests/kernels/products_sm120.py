"""Products of the kernels of sm_120a on the simulated machine: how tests ask for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import nvfp4
from nvfp4 import golden, plans_products
from nvfp4.formats import block_format

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Case(NamedTuple):
    """A product: its formats; rows (a number, or those of each range); columns; depth."""

    a: str
    b: str
    rows: int | tuple[int, ...]
    columns: int
    depth: int
    layouts: tuple[str, str] = ("tcgen", "tcgen")
    options: Mapping[str, Any] = NOTHING

    @property
    def id(self) -> str:
        rows = self.rows if isinstance(self.rows, int) else "+".join(map(str, self.rows))
        more = "".join(f"-{name}" for name in self.options)
        layouts = "-".join(self.layouts)
        return f"{self.a}-{self.b}-{rows}x{self.columns}x{self.depth}-{layouts}{more}"


@contextmanager
def planned() -> Iterator[None]:
    """Products of any size by these kernels."""
    saved = plans_products._FEW_PRODUCTS
    plans = (plans_products.matmul, plans_products.grouped_matmul)
    plans_products._FEW_PRODUCTS = 1
    for plan in plans:
        plan.cache_clear()
    try:
        yield
    finally:
        plans_products._FEW_PRODUCTS = saved
        for plan in plans:
            plan.cache_clear()


def values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Values that every format holds exactly, with exact sums of products.

    Blocks of 32 have different scales, and their first element the largest magnitude, 3.
    """
    rng = np.random.default_rng(seed)
    x = rng.choice(np.array([0, 0.5, 1, 1.5, 2, 3, -0.5, -1, -1.5, -2, -3]), shape)
    x[..., ::16] = 3 * rng.choice([-1, 1], x[..., ::16].shape)
    sizes = np.exp2(rng.integers(-1, 2, (*shape[:-1], -(-shape[-1] // 16))))
    return (x * np.repeat(sizes, 16, axis=-1)[..., : shape[-1]]).astype(np.float32)


def aligned(array: Any, alignment: int = 16, off: int = 0) -> Any:
    """A copy at a multiple of `alignment`, `off` bytes further on; all arrays of a QTensor."""
    if isinstance(array, nvfp4.QTensor):
        names = ("codes", "scales", "decode_scale")
        return dataclasses.replace(array, **{one: aligned(getattr(array, one)) for one in names})
    array = np.asarray(array)
    memory = np.zeros(array.nbytes + 2 * alignment, np.uint8)
    start = -memory.ctypes.data % alignment + off
    made = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def poisoned_padding(tensor: Any) -> Any:
    """A dense tensor of tcgen scales whose padding is NaN scales: nothing may read it."""
    fmt = block_format(tensor.format)
    rows, depth = tensor.shape
    blocks = depth // fmt.block
    linear = golden.deinterleave_scales(tensor.scales, (rows, blocks))
    high, wide = -(-rows // 128) * 128, -(-blocks // 4) * 4
    padded = np.full((high, wide), 0x7F if fmt.scale == "e4m3" else 0xFF, np.uint8)
    padded[:rows, :blocks] = linear
    return dataclasses.replace(tensor, scales=golden.interleave_scales(padded))


def operands(case: Case) -> tuple[Any, Any, dict[str, Any]]:
    """A, B, and the options of the call."""
    options = {"out_dtype": "float32", **case.options}
    layout_a, layout_b = case.layouts
    if isinstance(case.rows, int):
        a = nvfp4.quantize(values((case.rows, case.depth), 1), case.a, scale_layout=layout_a)
        b = nvfp4.quantize(values((case.columns, case.depth), 2), case.b, scale_layout=layout_b)
        return aligned(a), aligned(b), options
    offsets = np.concatenate([[0], np.cumsum(case.rows)]).astype(np.int32)
    count = int(offsets[-1]) + options.pop("rows_of_none", 0)
    experts = options.pop("experts", len(case.rows))
    weights = values((experts, case.columns, case.depth), 4)
    b = nvfp4.quantize(weights, case.b, scale_layout=layout_b)
    if "row_indices" in options:
        x = values((options.pop("input_rows"), case.depth), 3)
        a = nvfp4.quantize(x, case.a, scale_layout="linear")
    else:
        x = values((count, case.depth), 3)
        a = nvfp4.grouped_quantize(x, case.a, row_offsets=offsets, scale_layout=layout_a)
        offsets = a.groups
    return aligned(a), aligned(b), {"row_offsets": offsets, **options}


def on_machine(
    a: Any,
    b: Any,
    options: Mapping[str, Any],
    schedule: Any = "round_robin",
    arch: str = "sm_120a",
    off: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel gives, over poison, and what the golden model gives.

    The result begins `off` bytes behind a multiple of 16.
    """
    function = nvfp4.grouped_matmul if "row_offsets" in options else nvfp4.matmul
    expected = np.asarray(function(a, b, **options))
    out = aligned(np.full(expected.shape, 77, expected.dtype), off=off)
    names = []
    with planned(), nvfp4.simulate(arch, schedule=schedule) as machine:
        run = machine.run
        machine.run = lambda *a, **k: (names.append(k["name"]), run(*a, **k))[1]
        function(a, b, out=out, **options)
    assert len(names) == 1 and "matmul_sm120" in names[0], names
    return out, expected


def check(case: Case, **where: Any) -> None:
    """The kernel's result is the golden model's."""
    same(*on_machine(*operands(case), **where))


def same(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal values; a NaN is a NaN."""
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
