"""Instructions with tensor memory: their words, their machine code, their order.

The products themselves are held against the golden model by ``tests/kernels/test_matmul_sm100``.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nvfp4 import compile as compiling
from nvfp4 import sim
from nvfp4.errors import ToolchainError, UnsupportedError
from nvfp4.program import Kernel
from nvfp4.ptx.mbarrier import (
    fence_mbarrier_init,
    fence_proxy_async_shared,
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_wait_parity,
)
from nvfp4.ptx.memory import ld_shared_u32, shared_base, st_shared_u32
from nvfp4.ptx.tcgen05 import (
    st_shared_row,
    tcgen05_alloc,
    tcgen05_commit,
    tcgen05_cp_scales,
    tcgen05_dealloc,
    tcgen05_fence_after_thread_sync,
    tcgen05_fence_before_thread_sync,
    tcgen05_ld,
    tcgen05_mma_mxf4,
    tcgen05_mma_mxf8f6f4,
    tcgen05_mma_nvf4,
    tcgen05_relinquish,
    tcgen05_st,
    tcgen05_wait_ld,
    tcgen05_wait_st,
)
from nvfp4.ptx.tcgen05_descriptors import (
    KINDS,
    Product,
    decode_operand,
    decode_product,
    tcgen05_descriptor,
    tcgen05_product,
)
from nvfp4.sim import GlobalPointer, Machine, cuda
from tests.ptx.async_checks import aligned

# Words -------------------------------------------------------------------------------------------


def test_instruction_descriptors_have_the_bits_that_other_compilers_write() -> None:
    nvf4 = ("mxf4nvf4", 16, "e2m1", "e2m1", "ue4m3", 128)
    mxf8 = ("mxf8f6f4", 32, "e4m3", "e4m3", "ue8m0", 128)
    assert tcgen05_product(*nvf4) == 0x08200480
    words = [tcgen05_product(*mxf8) | place << 29 | place << 4 for place in range(4)]
    assert words == [0x08A00000, 0x28A00010, 0x48A00020, 0x68A00030]
    assert [decode_product(word, "mxf8f6f4", 32).b_id for word in words] == [0, 1, 2, 3]


def test_operand_descriptors_have_the_bits_that_other_compilers_write() -> None:
    steps = [tcgen05_descriptor(0xA400, 128, 16, 1024) + 2 * step for step in range(4)]
    assert steps == [0x4000404000010A40 + 2 * step for step in range(4)]
    assert tcgen05_descriptor(0x32400, 0, 16, 128) == 0x0000400800013240


PRODUCTS = [
    Product(kind, block, a, b, scale, columns, place, place)
    for kind, block, scale in [
        ("mxf4nvf4", 16, "ue4m3"),
        ("mxf4nvf4", 16, "ue8m0"),
        ("mxf4nvf4", 32, "ue8m0"),
        ("mxf4", 32, "ue8m0"),
        ("mxf8f6f4", 32, "ue8m0"),
    ]
    for a, b in (
        [("e4m3", "e2m1"), ("e5m2", "e4m3"), ("e2m3", "e3m2")]
        if kind == "mxf8f6f4"
        else [("e2m1", "e2m1")]
    )
    for columns in (8, 64, 256)
    for place in range(0, 4, KINDS[kind] // block)
]


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_an_instruction_descriptor_says_what_it_was_made_of(product: Product) -> None:
    assert decode_product(product.encode(), product.kind, product.block) == product


@pytest.mark.parametrize("kind, block", [("mxf4nvf4", 16), ("mxf4", 32), ("mxf8f6f4", 32)])
def test_every_bit_of_an_instruction_descriptor_counts(kind: str, block: int) -> None:
    scale = "ue4m3" if block == 16 else "ue8m0"
    element = "e5m2" if kind == "mxf8f6f4" else "e2m1"
    product = Product(kind, block, element, element, scale, 128)
    for bit in range(32):
        try:
            assert decode_product(product.encode() ^ 1 << bit, kind, block) != product
        except ValueError as error:
            assert str(error)
        else:
            meaning = {4, 5, 7, 8, 9, 10, 11, 12, *range(17, 23), 23, 29, 30}
            assert bit in meaning, bit


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"kind": "f16"}, "kind must be one of"),
        ({"block": 32}, "scale of mxf4nvf4 with blocks of 32"),
        ({"block": 8}, "block of mxf4nvf4 must be one of"),
        ({"a": "e4m3"}, "a of mxf4nvf4"),
        ({"scale": "e8m0"}, "scale of mxf4nvf4"),
        ({"columns": 12}, "columns must be a multiple of 8"),
        ({"columns": 264}, "columns must be a multiple of 8"),
        ({"a_id": 1}, "a_id must be one of"),
    ],
)
def test_a_product_that_does_not_exist_is_refused(fields: dict[str, Any], words: str) -> None:
    good = {"kind": "mxf4nvf4", "block": 16, "a": "e2m1", "b": "e2m1", "scale": "ue4m3"}
    with pytest.raises(ValueError, match=words):
        Product(**{**good, "columns": 64, **fields})


def test_every_bit_of_an_operand_descriptor_counts() -> None:
    bits = tcgen05_descriptor(0x4000, 128, 16, 1024)
    whole = decode_operand(bits)
    for bit in range(64):
        try:
            assert decode_operand(bits ^ 1 << bit) != whole, bit
        except ValueError as error:
            assert str(error)
        else:
            assert bit in {*range(14), *range(16, 30), *range(32, 46), 61, 62, 63}, bit


@pytest.mark.parametrize("swizzle", [128, 64, 32, 0])
def test_chunks_of_an_operand_are_where_a_tensor_copy_puts_them(swizzle: int) -> None:
    start, width = 0x4000, swizzle or 16
    bits = tcgen05_descriptor(start, swizzle, 256, 8 * width)
    found = decode_operand(bits).chunks(16)
    for row, chunk in itertools.product(range(16), range(2)):
        place = start + row * width + 16 * chunk
        if not swizzle:
            place = start + row * 16 + 256 * chunk
        expected = place ^ (place >> 3 & (swizzle - 16 if swizzle else 0))
        assert found[row, chunk] == expected


# Machine code ------------------------------------------------------------------------------------


def everything(w, i, x):
    base = w[0]
    tcgen05_alloc(base, 256)
    tcgen05_relinquish()
    tcgen05_fence_before_thread_sync()
    tcgen05_fence_after_thread_sync()
    memory = ld_shared_u32(base)
    if w[1] == 0:
        tcgen05_cp_scales(memory, i[0])
        tcgen05_mma_nvf4(memory, i[1], i[2], w[2], w[3], w[4], w[5] > 5)
        tcgen05_mma_mxf4(memory, i[1], i[2], w[2], w[3], w[4], w[5] > 5)
        tcgen05_mma_mxf8f6f4(memory, i[1], i[2], w[2], w[3], w[4], w[5] > 5)
        tcgen05_commit(w[6])
    values = tcgen05_wait_ld(tcgen05_ld(memory, 4))
    st_shared_row(w[7], values)
    tcgen05_st(memory, (values[1], values[0], values[3], values[2]))
    tcgen05_wait_st()
    x[0] = values[0]
    i[3] = tcgen05_descriptor(w[8], 128, 16, 1024)
    w[9] = tcgen05_product("mxf4", 32, "e2m1", "e2m1", "ue8m0", 64)
    tcgen05_dealloc(memory, 256)


EVERYTHING = Kernel("every_tcgen05", everything, ("u32*", "i64*", "f32*"), threads=128)
CODES = (
    "UTCATOMSWS.FIND_AND_SET.ALIGN",
    "UTCCP.T.S.4x32dp128bit",
    "UTCQMMA",
    "UTCBAR",
    "LDTM.x4",
    "STTM.x4",
    "FENCE.VIEW.ASYNC.T",
    "STS.128",
)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_every_instruction_assembles(arch: str) -> None:
    binary, ptx = compiling.inspect(EVERYTHING.program(), arch)
    assert compiling.faults(binary, ptx) == ()
    code = set(re.findall(r"\b[A-Z][A-Z0-9]+(?:\.[\w]+)*", compiling.sass(binary)))
    for name in CODES:
        assert any(found.startswith(name) for found in code), name
    assert {"UTCOMMA", {"sm_100a": "UTCOMMA.4X", "sm_103a": "UTCOMMA.BLOCK16"}[arch]} <= code
    for kind in ("mxf4nvf4.block_scale.block16", "mxf4.block_scale.block32"):
        assert f"kind::{kind}" in ptx


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_elsewhere_they_do_not_exist(arch: str) -> None:
    with pytest.raises(ToolchainError, match="tcgen05"):
        compiling.inspect(EVERYTHING.program(), arch)


# Order -------------------------------------------------------------------------------------------

#: Is the mistake in? Set by the tests, read by the kernels.
BUG = False
COUNT = 64
#: One product of zeros: 128 rows, and 8 columns.
WORD = tcgen05_product("mxf8f6f4", 32, "e4m3", "e4m3", "ue8m0", 8)


@dataclass(frozen=True)
class Plant:
    """A kernel of one block with a mistake; `threads` of it."""

    body: Callable[..., Any]
    error: type[sim.Finding]
    words: str
    threads: int


TABLE: list[Plant] = []


def plant(error: type[sim.Finding], words: str, threads: int = 32) -> Callable[..., Any]:
    def add(body: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.append(Plant(body, error, words, threads))
        return body

    return add


def begin(columns: int = COUNT) -> tuple[int, int]:
    """Columns for warp 0, an mbarrier of one arrival; zeros in shared memory from 1024 on."""
    at = shared_base()
    thread = cuda.threadIdx.x
    if thread == 0:
        mbarrier_init(at + 8, 1)
        mbarrier_init(at + 16, 1)
        fence_mbarrier_init()
    for word in range(thread, 3 * 1024, cuda.blockDim.x):
        st_shared_u32(at + 1024 + 4 * word, 0)
    fence_proxy_async_shared()
    if thread < 32:
        tcgen05_alloc(at, columns)
    tcgen05_fence_before_thread_sync()
    cuda.syncthreads()
    tcgen05_fence_after_thread_sync()
    return ld_shared_u32(at), at


def end(memory: int, columns: int = COUNT) -> None:
    tcgen05_fence_before_thread_sync()
    cuda.syncthreads()
    if cuda.threadIdx.x < 32:
        tcgen05_dealloc(memory, columns)


def some(count: int = 4) -> tuple[Any, ...]:
    return tuple(np.float32(cuda.threadIdx.x + i) for i in range(count))


def multiply(memory: int, at: int) -> None:
    """Scales in columns 16 to 23, a product to columns 0 to 7."""
    scales = tcgen05_descriptor(at + 1024 + 8192, 0, 16, 128)
    tcgen05_cp_scales(memory + 16, scales)
    tcgen05_cp_scales(memory + 20, scales)
    operand = tcgen05_descriptor(at + 1024, 0, 2048, 128)
    tcgen05_mma_mxf8f6f4(memory, operand, operand, WORD, memory + 16, memory + 20, False)


def wait(at: int, parity: int = 0) -> None:
    mbarrier_wait_parity(at + 8, parity)
    tcgen05_fence_after_thread_sync()


@plant(sim.NotAwaited, "tcgen05.wait::st")
def loads_what_is_being_stored(out):
    memory, _ = begin()
    tcgen05_st(memory, some())
    if not BUG:
        tcgen05_wait_st()
    values = tcgen05_wait_ld(tcgen05_ld(memory, 4))  # here
    out[cuda.threadIdx.x] = values[2]
    end(memory)


@plant(sim.NotAwaited, "tcgen05.wait::ld")
def stores_over_what_is_being_loaded(out):
    memory, _ = begin()
    tcgen05_st(memory, some())
    tcgen05_wait_st()
    values = tcgen05_ld(memory, 4)
    if not BUG:
        values = tcgen05_wait_ld(values)
    tcgen05_st(memory, some())  # here
    tcgen05_wait_st()
    out[cuda.threadIdx.x] = tcgen05_wait_ld(values)[0]
    end(memory)


@plant(sim.NotAwaited, "before tcgen05.wait::ld")
def looks_at_what_is_being_loaded(out):
    memory, _ = begin()
    tcgen05_st(memory, some())
    tcgen05_wait_st()
    values = tcgen05_ld(memory, 4)
    if not BUG:
        values = tcgen05_wait_ld(values)
    out[cuda.threadIdx.x] = values[3]  # here
    tcgen05_wait_ld(values)
    end(memory)


@plant(sim.InvalidOperand, "lane 0; warp 1", 64)
def loads_lanes_of_another_warp(out):
    memory, _ = begin()
    warp = cuda.threadIdx.x // 32
    tcgen05_st(memory + (0 if BUG else warp << 21), some())  # here
    tcgen05_wait_st()
    end(memory)


@plant(sim.InvalidOperand, "the lanes of the warp disagree about the address")
def loads_at_an_address_for_each_lane(out):
    memory, _ = begin()
    tcgen05_st(memory, some())
    tcgen05_wait_st()
    tcgen05_wait_ld(tcgen05_ld(memory + (cuda.threadIdx.x & 1 if BUG else 0), 2))  # here
    end(memory)


@plant(sim.UnwrittenRead, "of tensor memory was never written")
def loads_what_nobody_stored(out):
    memory, _ = begin()
    tcgen05_st(memory + COUNT - 2, some(2))
    tcgen05_wait_st()
    tcgen05_wait_ld(tcgen05_ld(memory + COUNT - (3 if BUG else 2), 1))  # here
    end(memory)


@plant(sim.TensorMemoryError, "before its allocation")
def stores_beyond_its_columns(out):
    memory, _ = begin()
    tcgen05_st(memory + (-2 if BUG else 0), some())  # here
    tcgen05_wait_st()
    end(memory)


@plant(sim.TensorMemoryError, "after its release")
def loads_after_the_release(out):
    memory, _ = begin()
    tcgen05_st(memory, some())
    tcgen05_wait_st()
    if not BUG:
        tcgen05_wait_ld(tcgen05_ld(memory, 4))
    end(memory)
    if BUG:
        tcgen05_wait_ld(tcgen05_ld(memory, 4))  # here


@plant(sim.TensorMemoryError, "must not grow")
def allocates_more_than_the_time_before(out):
    memory, at = begin()
    tcgen05_alloc(at + 4, 128 if BUG else 32)  # here
    cuda.syncthreads()
    tcgen05_dealloc(ld_shared_u32(at + 4), 32)
    end(memory)


@plant(sim.Deadlock, "512 free columns of tensor memory")
def allocates_what_it_holds_already(out):
    memory, at = begin(512)
    if not BUG:
        tcgen05_dealloc(memory, 512)
    tcgen05_alloc(at + 4, 512)  # here
    tcgen05_dealloc(memory, 512)


@plant(sim.NotAwaited, "tcgen05.commit and a wait")
def loads_sums_that_are_not_there(out):
    memory, at = begin()
    if cuda.threadIdx.x == 0:
        multiply(memory, at)
        tcgen05_commit(at + 8)
    elif BUG:
        while not sim.this_thread().block.state["tensor memory"].defined[0, memory]:
            sim.this_thread().yield_now()
    if not BUG:
        wait(at)
    tcgen05_wait_ld(tcgen05_ld(memory, 8))  # here
    wait(at)
    end(memory)


@plant(sim.NotAwaited, "writes columns", 64)
def two_threads_multiply_to_the_same_columns(out):
    memory, at = begin()
    thread = cuda.threadIdx.x
    if thread == 0:
        multiply(memory, at)  # here
        tcgen05_commit(at + 8)
    if not BUG:
        wait(at)
    if thread == 32:
        multiply(memory, at)  # here
        tcgen05_commit(at + 16)
    mbarrier_wait_parity(at + 16, 0)
    wait(at)
    end(memory)


@plant(sim.NotAwaited, "scale factors")
def copies_scales_over_sums(out):
    memory, at = begin()
    if cuda.threadIdx.x == 0:
        multiply(memory, at)
        tcgen05_commit(at + 8)
        if not BUG:
            wait(at)
        tcgen05_cp_scales(memory + 4, tcgen05_descriptor(at + 1024, 0, 16, 128))  # here
        tcgen05_commit(at + 16)
    mbarrier_wait_parity(at + 16, 0)
    wait(at)
    end(memory)


@plant(sim.MissingFence, "fence.proxy.async of shared")
def multiplies_what_was_stored_without_a_fence(out):
    memory, at = begin()
    if cuda.threadIdx.x == 0:
        st_shared_u32(at + 1024, 1)
        if not BUG:
            fence_proxy_async_shared()
        multiply(memory, at)  # here
        tcgen05_commit(at + 8)
    wait(at)
    end(memory)


@plant(sim.DataRace, "wrote", 64)
def multiplies_what_another_thread_stores(out):
    memory, at = begin()
    thread = cuda.threadIdx.x
    if thread == 0:
        st_shared_u32(at + 1024, 1)
        fence_proxy_async_shared()
        mbarrier_arrive(at + 16)
    if thread == 32:
        if not BUG:
            mbarrier_wait_parity(at + 16, 0)
            tcgen05_fence_after_thread_sync()
        multiply(memory, at)  # here
        tcgen05_commit(at + 8)
    wait(at)
    end(memory)


@plant(sim.NotAwaited, "tcgen05.mma")
def stores_over_what_a_product_reads(out):
    memory, at = begin()
    if cuda.threadIdx.x == 0:
        multiply(memory, at)
        tcgen05_commit(at + 8)
        if not BUG:
            wait(at)
        st_shared_u32(at + 1024, 1)  # here
    wait(at)
    end(memory)


@plant(sim.InvalidOperand, "is in lane 32, not 0")
def multiplies_to_a_quarter(out):
    memory, at = begin()
    if cuda.threadIdx.x == 0:
        multiply(memory + (32 << 16 if BUG else 0), at)  # here
        tcgen05_commit(at + 8)
    wait(at)
    end(memory)


def run(row: Plant, schedule: Any = "round_robin", arch: str = "sm_100a") -> np.ndarray:
    out = aligned(np.zeros(128, np.float32))
    machine = Machine(arch, schedule)
    machine.spin_limit = 300
    pointer = GlobalPointer(out, "f32", "out")
    machine.run(row.body, 1, row.threads, 1024 + 3 * 4096, [pointer])
    return out


@pytest.fixture
def bug(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def put(value: bool) -> None:
        monkeypatch.setattr(inspect.getmodule(run), "BUG", value)

    return put


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.body.__name__)
def test_a_mistake_is_reported_with_its_line(row: Plant, bug: Callable[[bool], None]) -> None:
    bug(True)
    with pytest.raises(row.error) as caught:
        run(row)
    assert type(caught.value) is row.error
    assert row.words in str(caught.value)
    lines, first = inspect.getsourcelines(row.body)
    here = {first + i for i, line in enumerate(lines) if line.rstrip().endswith("# here")}
    traceback = caught.value.__traceback__
    reported = {caught.value.line}
    while traceback is not None:
        reported.add(traceback.tb_lineno)
        traceback = traceback.tb_next
    assert here & reported


@pytest.mark.parametrize("schedule", ["round_robin", 1, 2])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.body.__name__)
def test_without_the_mistake_it_passes(
    row: Plant, schedule: Any, bug: Callable[[bool], None]
) -> None:
    bug(False)
    run(row, schedule)


def test_what_is_stored_is_loaded(bug: Callable[[bool], None]) -> None:
    bug(False)
    row = next(row for row in TABLE if row.body is loads_what_is_being_stored)
    assert np.array_equal(run(row)[:32], np.arange(32) + 2)


def test_other_cards_have_no_tensor_memory(bug: Callable[[bool], None]) -> None:
    bug(False)
    for arch in ("sm_90a", "sm_100", "sm_120a"):
        with pytest.raises(UnsupportedError, match="sm_100a"):
            run(TABLE[0], arch=arch)
