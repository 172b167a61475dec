"""The kernels of ``async_kernels``, run on the simulated machine or the card, against NumPy."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from nvfp4 import golden, launch
from nvfp4.arrays import as_array
from nvfp4.ptx.tensor_map import TensorMap, encode
from tests.ptx.async_kernels import (
    BULK_RING,
    COPY_LINES,
    GROUP_PRODUCT,
    GROUP_PRODUCT_REGISTERS,
    LOAD_MATRICES,
    PIPELINE,
    ROWS_OF_SUMS,
    STORE_MATRICES,
    TENSOR_COPY,
    TENSOR_TILE,
    warp_program,
)

POISON = 0xAAAAAAAA


# Running them ------------------------------------------------------------------------------------


def aligned(values: np.ndarray, alignment: int = 128) -> np.ndarray:
    """A copy whose address is a multiple of `alignment`."""
    memory = np.zeros(values.nbytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    made = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    made[...] = values
    return made


class Place:
    """Where a test runs: makes arrays and maps, launches, and brings results back."""

    def __init__(
        self,
        array: Callable[[np.ndarray], Any],
        pointer: Callable[[Any], int],
        encode: Callable[[TensorMap], bytes],
        host: Callable[[Any], np.ndarray],
        machine: Any = None,
    ) -> None:
        self.array = array
        self.pointer = pointer
        self.encode = encode
        self.host = host
        self.machine = machine

    def maps(self, *tensors: TensorMap) -> Any:
        """An array of tensor maps."""
        return self.array(np.frombuffer(b"".join(map(self.encode, tensors)), np.uint64))

    def run(
        self, program: Any, block: int, shared: int, buffers: dict[str, Any], *args: Any
    ) -> None:
        """Launch one block; `args` are names of buffers and numbers."""
        call = launch.Launch(program, 1, block, shared, args)
        arrays = {name: as_array(value, name) for name, value in buffers.items()}
        launch.run([call], arrays, machine=self.machine)


def simulated(machine: Any) -> Place:
    """On the simulated machine."""
    return Place(aligned, lambda array: array.ctypes.data, encode, lambda array: array, machine)


# What the tests on both compare ------------------------------------------------------------------


def check_bulk_ring(place: Place, stages: int = 3, steps: int = 7) -> None:
    x = np.random.default_rng(1).integers(0, 1 << 32, 128 * steps, np.uint32)
    out = place.array(np.full(128 * steps + 4, POISON, np.uint32))
    program = BULK_RING.program(STAGES=stages)
    place.run(
        program, 160, 1536 + 512 * stages, {"x": place.array(x), "out": out}, "x", "out", steps
    )
    got = place.host(out)
    assert np.array_equal(got[:-4], x + np.uint32(1))
    assert (got[-4:] == POISON).all()


def check_copy_lines(place: Place, valid: int) -> None:
    x = np.random.default_rng(2).integers(1, 1 << 32, 512, np.uint32)
    out = place.array(np.full(512, POISON, np.uint32))
    buffers = {"x": place.array(x[:valid] if place.machine else x), "out": out}
    place.run(COPY_LINES.program(), 64, 128 + 2048, buffers, "x", "out", valid)
    want = np.where(np.arange(512) < valid, x, np.uint32(0))
    assert np.array_equal(place.host(out), want)


def check_tensor_tile(place: Place, swizzle: int, x: int, y: int) -> None:
    """A box of 16 rows of 128 bytes, partly outside of a tensor of 21 x 40 words."""
    words = np.random.default_rng(3).integers(1, 1 << 32, (21, 40), np.uint32)
    other = np.full((21, 40), POISON, np.uint32)
    source, target = place.array(words), place.array(other)
    inner = swizzle // 4 or 32
    box = (32, 16) if inner == 32 else (inner, 16 * 32 // inner)
    made = [
        TensorMap(place.pointer(array), "u32", (40, 21), (160,), box, swizzle)
        for array in (source, target)
    ]
    out = place.array(np.full(512, POISON, np.uint32))
    buffers = {"maps": place.maps(*made), "out": out, "source": source, "target": target}
    names = ("maps", "out", "source", "target")
    to = max(x, 0), max(y + 1, 0)  # stores have no negative coordinates
    place.run(TENSOR_TILE.program(), 32, 1024 + 2048, buffers, *names, x, y, *to)
    rows, columns = box[1], box[0]
    whole = np.zeros((rows, columns), np.uint32)
    for row in range(rows):
        for column in range(columns):
            if 0 <= y + row < 21 and 0 <= x + column < 40:
                whole[row, column] = words[y + row, x + column]
    got = place.host(out).reshape(rows, columns // 4 or 1, -1)
    lines = whole.reshape(rows, columns // 4, 4)
    for row in range(rows):
        for chunk in range(columns // 4):
            byte = (row * columns + 4 * chunk) * 4
            moved = chunk
            if swizzle:
                moved = ((byte ^ (byte >> 3 & swizzle - 16)) - row * columns * 4) // 16
            assert np.array_equal(got[row, moved], lines[row, chunk]), (row, chunk)
    want = other.copy()
    for row in range(rows):
        for column in range(columns):
            if to[1] + row < 21 and to[0] + column < 40:
                want[to[1] + row, to[0] + column] = whole[row, column]
    assert np.array_equal(place.host(target), want)


def operands(kind: str, shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Small integers as words of `kind`, and as float64: all sums are exact in float32."""
    values = np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)
    if kind == "bf16":
        codes = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    elif kind == "f16":
        codes = values.astype(np.float16).view(np.uint16)
    else:
        codes = (golden.encode_e4m3 if kind == "e4m3" else golden.encode_e5m2)(values)
    return np.ascontiguousarray(codes).view(np.uint32), values.astype(np.float64)


def check_warp_product(place: Place, kind: str) -> None:
    steps = 3
    depth = steps * (32 if kind in ("e4m3", "e5m2") else 16)
    x, a = operands(kind, (16, depth), 4)
    w, b = operands(kind, (8, depth), 5)
    out = place.array(np.full((16, 8), np.nan, np.float32))
    buffers = {"x": place.array(x), "w": place.array(w), "out": out}
    program = warp_program(kind)
    place.run(program, 32, 1024 * steps, buffers, "x", "w", "out", steps)
    assert np.array_equal(place.host(out), (a @ b.T).astype(np.float32))


def check_load_matrices(place: Place) -> None:
    x = np.random.default_rng(6).integers(0, 1 << 32, 128, np.uint32)
    out = place.array(np.full((14, 32), POISON, np.uint32))
    place.run(LOAD_MATRICES.program(), 32, 512, {"x": place.array(x), "out": out}, "x", "out")
    matrices = x.view(np.uint16).reshape(4, 8, 8)
    plain = matrices.reshape(4, 64).view(np.uint32)
    turned = np.ascontiguousarray(matrices.transpose(0, 2, 1)).reshape(4, 64).view(np.uint32)
    want = [plain[:1], turned[:1], plain[:2], turned[:2], plain, turned]
    assert np.array_equal(place.host(out), np.concatenate(want))


def check_store_matrices(place: Place) -> None:
    x = np.random.default_rng(7).integers(0, 1 << 32, 128, np.uint32)
    out = place.array(np.full(128, POISON, np.uint32))
    place.run(STORE_MATRICES.program(), 32, 512, {"x": place.array(x), "out": out}, "x", "out")
    want = np.empty((32, 4), np.uint32)
    want[(np.arange(32) * 5 + 3) % 32] = x.reshape(32, 4)
    assert np.array_equal(place.host(out).reshape(32, 4), want)


def _map(place: Place, array: Any, kind: str, rows: int, depth: int, swizzle: int) -> TensorMap:
    size = 1 if kind in ("e4m3", "e5m2") else 2
    element = {"e4m3": "u8", "e5m2": "u8"}.get(kind, kind)
    box = (swizzle // size, rows)
    pitch = (depth * size,)
    return TensorMap(place.pointer(array), element, (depth, rows), pitch, box, swizzle)


def check_group_product(place: Place, kind: str, columns: int, swizzle: int = 128) -> None:
    steps = 2
    depth = steps * swizzle // (1 if kind in ("e4m3", "e5m2") else 2)
    x, a = operands(kind, (64, depth), 7)
    w, b = operands(kind, (columns, depth), 8)
    left, right = place.array(x), place.array(w)
    maps = place.maps(
        _map(place, left, kind, 64, depth, swizzle),
        _map(place, right, kind, columns, depth, swizzle),
    )
    out = place.array(np.full((64, columns), np.nan, np.float32))
    buffers = {"maps": maps, "out": out, "left": left, "right": right}
    program = GROUP_PRODUCT.program(KIND=kind, HALF=columns // 2, SWIZZLE=swizzle)
    shared = 1024 + max(8192 + 128 * columns, 256 * columns)
    place.run(program, 128, shared, buffers, "maps", "out", "left", "right", steps)
    assert np.array_equal(place.host(out), (a @ b.T).astype(np.float32))


def check_group_product_registers(
    place: Place, kind: str, columns: int, groups: bool = False
) -> None:
    steps = 2
    depth = steps * 128 // (1 if kind in ("e4m3", "e5m2") else 2)
    x, a = operands(kind, (64, depth), 9)
    w, b = operands(kind, (columns, depth), 10)
    right = place.array(w)
    maps = place.maps(_map(place, right, kind, columns, depth, 128))
    out = place.array(np.full((64, columns), np.nan, np.float32))
    buffers = {"x": place.array(x), "maps": maps, "out": out, "right": right}
    program = GROUP_PRODUCT_REGISTERS.program(KIND=kind, HALF=columns // 2, GROUPS=groups)
    shared = 1024 + 256 * columns
    place.run(program, 128, shared, buffers, "x", "maps", "out", "right", steps)
    assert np.array_equal(place.host(out), (a @ b.T).astype(np.float32))


def check_rows_of_sums(place: Place, kind: str, first: int) -> None:
    rng = np.random.default_rng(first + len(kind))
    x = rng.standard_normal((64, 24)).astype(np.float32)
    factors = rng.standard_normal(24).astype(np.float32)
    both = np.float32(0.7)
    count = min(16, 24 - first)
    out = place.array(np.full((count, 32), 0xAAAAAAAA, np.uint32))
    buffers = {"x": place.array(x), "factors": place.array(factors), "out": out}
    program = ROWS_OF_SUMS.program(KIND=kind, FIRST=first)
    place.run(program, 128, 24 * 144, buffers, "x", "factors", "out", float(both))
    rows = np.arange(1, 65, dtype=np.float32)[:, None]
    times = factors[None, :] * rows if kind == "bf16" else np.broadcast_to(rows, (64, 24))
    dtype = ml_dtypes.bfloat16 if kind == "bf16" else np.float16
    want = ((x * both) * times).astype(dtype)[:, first : first + count].T
    assert np.array_equal(
        place.host(out).view(np.uint16), np.ascontiguousarray(want).view(np.uint16)
    )


def check_pipeline(place: Place) -> None:
    x, a = operands("bf16", (64, 16), 11)
    w, b = operands("bf16", (8, 128), 12)
    left, right = place.array(x), place.array(w)
    maps = place.maps(_map(place, right, "bf16", 8, 128, 128))
    out = place.array(np.full((2, 64, 8), np.nan, np.float32))
    buffers = {"maps": maps, "out": out, "left": left, "right": right}
    place.run(PIPELINE.program(), 128, 1024 + 2048, buffers, *buffers)
    one = a @ b[:, :16].T
    want = np.stack([one, one + a @ b[:, 64:80].T]).astype(np.float32)
    assert np.array_equal(place.host(out), want)


def check_ranks(place: Place, rank: int) -> None:
    """A box of 256 8-byte elements out of a tensor whose rows have gaps."""
    shape = (6, 5, 7, 6, 12)[5 - rank :] if rank > 1 else (300,)
    box = {1: (256,), 3: (8, 4, 8), 4: (8, 4, 4, 2), 5: (8, 4, 4, 2, 1)}[rank]
    words = np.random.default_rng(rank).integers(1, 1 << 62, shape).astype(np.uint64)
    source, target = place.array(words), place.array(np.full(shape, POISON, np.uint64))
    extents = tuple(reversed(shape))
    strides = tuple(8 * int(np.prod(extents[: at + 1])) for at in range(rank - 1))
    maps = place.maps(
        *(
            TensorMap(place.pointer(array), "u64", extents, strides, box, 0)
            for array in (source, target)
        )
    )
    buffers = {"maps": maps, "source": source, "target": target}
    place.run(TENSOR_COPY.program(RANK=rank), 1, 1024 + 2048, buffers, *buffers)
    want = np.full(shape, POISON, np.uint64)
    part = tuple(
        slice(start, min(start + extent, whole))
        for start, extent, whole in zip((2, 2, 3, 4, 5), box, extents, strict=False)
    )[::-1]
    want[part] = words[part]
    assert np.array_equal(place.host(target), want)
