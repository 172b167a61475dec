"""What ``cuda`` is in a kernel that runs on the simulated machine.

One object for all launches: each attribute asks the running thread. Our own bodies are bound to it
(``nvfp4.program.SimulatorWorld``), users' kernels get it in a process with
``NUMBA_ENABLE_CUDASIM=1``.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import numpy as np

from . import scalar
from .arrays import CheckedArray, local_array
from .block import Block, Dim3
from .current import this_thread
from .errors import InvalidOperand
from .location import call_site
from .memory import GlobalPointer
from .order import Clock, fence
from .shared import SHARED_BASE, CheckedSharedMemory, SharedMemory
from .thread import FULL_MASK

#: Bytes of shared memory that a kernel may declare; the rest is for dynamic shared memory.
STATIC_SHARED_LIMIT = 49152

#: Code of device functions that the compiler inlines: each call has shared arrays of its own.
inlined: set[CodeType] = set()

#: Turns a compiler's type into a dtype, where NumPy cannot; set by ``nvfp4.sim.cudasim``.
type_to_dtype: Callable[[Any], np.dtype] | None = None


def _dtype(value: Any) -> np.dtype:
    try:
        return np.dtype(value)
    except TypeError:
        if type_to_dtype is not None:
            return type_to_dtype(value)
        return np.dtype(str(value))


# Memories ----------------------------------------------------------------------------------------


class Shared:
    """``cuda.shared``."""

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
        """Return the block's array that this call declares; shape 0: dynamic shared memory.

        A declaration is one array for the block, however often and by whichever thread it is
        reached. Two on a line are two; in a function that is inlined, each call of the function has
        its own.
        """
        block = this_thread().block
        frame = sys._getframe(1)
        key: Any = (frame.f_code, frame.f_lasti)
        if frame.f_code in inlined:
            sites = call_site(frame)
            depth = 1
            while depth < len(sites) and sites[depth - 1][0] in inlined:
                depth += 1
            key = sites[:depth]
        found = block.arrays.get(key)
        if found is None:
            found = block.arrays[key] = (
                _declared(block, shape, dtype, alignment, frame),
                shape,
                dtype,
            )
        elif found[1] != shape or (found[2] is not dtype and _dtype(found[2]) != _dtype(dtype)):
            raise InvalidOperand(
                f"a shared array is declared as {shape}, {dtype} here and as {found[1]}, "
                f"{found[2]} by another thread: "
                "shape and type are compile-time constants"
            )
        return found[0]


def _declared(block: Block, shape: Any, dtype: Any, alignment: int | None, frame: FrameType) -> Any:
    """Return a new shared array of the block, or a view of its dynamic shared memory."""
    kind = _dtype(dtype)
    extents = tuple(int(size) for size in shape) if isinstance(shape, tuple) else (int(shape),)
    if extents == (0,):
        memory = block.shared
        return _shared_view(memory, kind, (memory.size // kind.itemsize,), "dynamic shared memory")
    nbytes = math.prod(extents) * kind.itemsize
    align = max(alignment or kind.itemsize, 1)
    start = -(-block.static_bytes // align) * align
    block.static_bytes = start + nbytes
    if block.static_bytes > STATIC_SHARED_LIMIT:
        raise InvalidOperand(
            f"the block's shared arrays take {block.static_bytes} bytes, more than "
            f"{STATIC_SHARED_LIMIT}: use dynamic "
            "shared memory for large ones"
        )
    limit = block.machine.shared_limit
    if block.static_bytes + block.shared.size > limit:
        raise InvalidOperand(
            f"shared arrays of {block.static_bytes} bytes and {block.shared.size} bytes of dynamic "
            "shared memory are "
            f"more than the {limit} of a block on {block.machine.arch}"
        )
    base = SHARED_BASE + block.shared.size + start
    name = f"shared array of {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    checks = block.machine.checks
    memory = SharedMemory(nbytes, base, name)
    if checks.unwritten or checks.races:
        memory = CheckedSharedMemory(
            nbytes, base, name, unwritten=checks.unwritten, races=checks.races
        )
    return _shared_view(memory, kind, extents, name)


def _shared_view(memory: SharedMemory, kind: np.dtype, shape: tuple[int, ...], name: str) -> Any:
    count = math.prod(shape)
    array = np.frombuffer(memory.data, kind, count) if count else np.zeros(0, kind)
    array = array.reshape(shape)
    if kind.names is not None:
        return array.view(np.recarray)
    if not isinstance(memory, CheckedSharedMemory):
        return array
    return CheckedArray(array, memory, memory.base - array.ctypes.data, name)


class Local:
    """``cuda.local``."""

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
        """Return an array of this thread."""
        return local_array(shape, _dtype(dtype), this_thread().machine.checks.unwritten)


class Const:
    """``cuda.const``."""

    def array_like(self, array: Any) -> Any:
        """Return the array."""
        return array


# Atomic operations -------------------------------------------------------------------------------


class Atomic:
    """``cuda.atomic``: each operation returns what the element held."""

    def _apply(self, array: Any, index: Any, function: Callable[[Any], Any]) -> Any:
        thread = this_thread()
        if isinstance(array, CheckedArray):
            old = array.atomic(index, function)
        else:
            old = array[index]
            array[index] = function(old)
        thread.spin()
        return old

    def add(self, array: Any, index: Any, value: Any) -> Any:
        """Add."""
        return self._named("add", array, index, value, lambda old: old + value)

    def sub(self, array: Any, index: Any, value: Any) -> Any:
        """Subtract."""
        return self._named("sub", array, index, value, lambda old: old - value)

    def and_(self, array: Any, index: Any, value: Any) -> Any:
        """Bitwise and."""
        return self._named("and", array, index, value, lambda old: old & value)

    def or_(self, array: Any, index: Any, value: Any) -> Any:
        """Bitwise or."""
        return self._named("or", array, index, value, lambda old: old | value)

    def xor(self, array: Any, index: Any, value: Any) -> Any:
        """Bitwise exclusive or."""
        return self._named("xor", array, index, value, lambda old: old ^ value)

    def inc(self, array: Any, index: Any, value: Any) -> Any:
        """Add 1, or begin again at 0 where the element is `value` or more."""
        return self._named("inc", array, index, value, lambda old: 0 if old >= value else old + 1)

    def dec(self, array: Any, index: Any, value: Any) -> Any:
        """Subtract 1, or begin again at `value` where the element is 0 or more than it."""
        return self._named(
            "dec", array, index, value, lambda old: value if old == 0 or old > value else old - 1
        )

    def exch(self, array: Any, index: Any, value: Any) -> Any:
        """Replace."""
        return self._named("exch", array, index, value, lambda old: value)

    def max(self, array: Any, index: Any, value: Any) -> Any:
        """Replace by the larger."""
        return self._named("max", array, index, value, lambda old: max(old, value))

    def min(self, array: Any, index: Any, value: Any) -> Any:
        """Replace by the smaller."""
        return self._named("min", array, index, value, lambda old: min(old, value))

    def nanmax(self, array: Any, index: Any, value: Any) -> Any:
        """Replace by the larger; a NaN counts as missing."""
        return self._named("max", array, index, value, lambda old: np.fmax(old, value))

    def nanmin(self, array: Any, index: Any, value: Any) -> Any:
        """Replace by the smaller; a NaN counts as missing."""
        return self._named("min", array, index, value, lambda old: np.fmin(old, value))

    def cas(self, array: Any, index: Any, old: Any, value: Any) -> Any:
        """Replace where the element equals `old`."""
        if isinstance(array, GlobalPointer):
            return array.atomic("cas", index, value, old)
        return self._apply(array, index, lambda held: value if held == old else held)

    def compare_and_swap(self, array: Any, old: Any, value: Any) -> Any:
        """Replace the first element where it equals `old`."""
        return self.cas(array, (0,) * array.ndim, old, value)

    def _named(
        self, name: str, array: Any, index: Any, value: Any, function: Callable[[Any], Any]
    ) -> Any:
        if isinstance(array, GlobalPointer):
            return array.atomic(name, index, value)
        return self._apply(array, index, function)


# Groups ------------------------------------------------------------------------------------------


class GridGroup:
    """``cuda.cg.this_grid()``."""

    def sync(self) -> None:
        """Wait for all threads of the grid."""
        thread = this_thread()
        launch = thread.block.launch
        state = launch.grid_barrier
        state.clock.release(thread)
        state.arrived += 1
        phase = state.phase
        if state.arrived == launch.threads:
            state.arrived = 0
            state.phase += 1
            state.done, state.clock = state.clock, Clock()
        thread.wait_until(
            lambda: state.phase != phase,
            f"grid sync, reached by {state.arrived} of {launch.threads} threads",
        )
        state.done.acquire(thread)


class Groups:
    """``cuda.cg``."""

    def this_grid(self) -> GridGroup:
        """Return the group of all threads."""
        return GridGroup()


# The module --------------------------------------------------------------------------------------


def _same_for_all(
    function: Callable[[dict[int, Any]], Any],
) -> Callable[[dict[int, Any]], Mapping[int, Any]]:
    return lambda payloads: dict.fromkeys(payloads, function(payloads))


class Cuda:
    """Stands for the module ``numba.cuda`` in a kernel."""

    shared = Shared()
    local = Local()
    const = Const()
    atomic = Atomic()
    fp16 = scalar.Float16()
    cg = Groups()
    warpsize = 32

    popc = staticmethod(scalar.popc)
    brev = staticmethod(scalar.brev)
    clz = staticmethod(scalar.clz)
    ffs = staticmethod(scalar.ffs)
    selp = staticmethod(scalar.selp)
    fma = staticmethod(scalar.fma)
    cbrt = staticmethod(np.cbrt)

    def __repr__(self) -> str:
        return "<cuda of the simulated machine>"

    # Who and where

    @property
    def threadIdx(self) -> Dim3:
        """The thread's index in its block."""
        return this_thread().thread_index

    @property
    def blockIdx(self) -> Dim3:
        """The block's index in the grid."""
        return this_thread().block.block_index

    @property
    def blockDim(self) -> Dim3:
        """Extents of a block."""
        return this_thread().block.block_dim

    @property
    def gridDim(self) -> Dim3:
        """Extents of the grid, in blocks."""
        return this_thread().block.grid_dim

    @property
    def laneid(self) -> int:
        """The thread's place in its warp."""
        return this_thread().lane

    def grid(self, ndim: int) -> Any:
        """Return the thread's index in the grid: an int, or a tuple of two or three."""
        thread = this_thread()
        if ndim == 1:
            return thread.block.block_index.x * thread.block.block_dim.x + thread.thread_index.x
        at = tuple(
            block * size + index
            for block, size, index in zip(
                thread.block.block_index, thread.block.block_dim, thread.thread_index, strict=True
            )
        )
        return _by_dimensions(at, ndim)

    def gridsize(self, ndim: int) -> Any:
        """Return the extents of the grid in threads: an int, or a tuple of two or three."""
        block = this_thread().block
        size = tuple(a * b for a, b in zip(block.grid_dim, block.block_dim, strict=True))
        return _by_dimensions(size, ndim)

    # Barriers

    def syncthreads(self) -> None:
        """Wait for all threads of the block."""
        this_thread().syncthreads()

    def syncthreads_count(self, predicate: Any) -> int:
        """Wait for all, and return on how many `predicate` is true."""
        return int(this_thread().barrier(0, payload=bool(predicate), resolve=sum))

    def syncthreads_and(self, predicate: Any) -> int:
        """Wait for all, and return 1 if `predicate` is true on all, else 0."""
        return int(this_thread().barrier(0, payload=bool(predicate), resolve=all))

    def syncthreads_or(self, predicate: Any) -> int:
        """Wait for all, and return 1 if `predicate` is true on any, else 0."""
        return int(this_thread().barrier(0, payload=bool(predicate), resolve=any))

    def threadfence(self) -> None:
        """Publish what the thread has written, before its next atomic operation."""
        fence(this_thread())

    threadfence_block = threadfence
    threadfence_system = threadfence

    def nanosleep(self, duration: Any) -> None:
        """Let others run."""
        this_thread().yield_now()

    # Warp operations

    def syncwarp(self, mask: int = FULL_MASK) -> None:
        """Wait for the lanes of the mask, and see what they have written."""
        this_thread().sync_warp(int(mask) & FULL_MASK)

    def activemask(self) -> int:
        """Return the lanes that are here together."""
        return this_thread().active_mask()

    def lanemask_lt(self) -> int:
        """Return the lanes below this one."""
        return (1 << this_thread().lane) - 1

    def _shuffle(self, name: str, mask: Any, value: Any, source: int) -> Any:
        def resolve(payloads: dict[int, Any]) -> dict[int, Any]:
            return {
                lane: own if other == lane else payloads[other][0]
                for lane, (own, other) in payloads.items()
            }

        return this_thread().collective(name, int(mask) & FULL_MASK, (value, source), resolve)

    def shfl_sync(self, mask: Any, value: Any, src_lane: Any) -> Any:
        """Return the value of lane `src_lane`."""
        return self._shuffle("shfl_sync", mask, value, int(src_lane) & 31)

    def shfl_up_sync(self, mask: Any, value: Any, delta: Any) -> Any:
        """Return the value of the lane `delta` below; the own where there is none."""
        lane = this_thread().lane
        source = lane - (int(delta) & 31)
        return self._shuffle("shfl_up_sync", mask, value, source if source >= 0 else lane)

    def shfl_down_sync(self, mask: Any, value: Any, delta: Any) -> Any:
        """Return the value of the lane `delta` above; the own where there is none."""
        lane = this_thread().lane
        source = lane + (int(delta) & 31)
        return self._shuffle("shfl_down_sync", mask, value, source if source < 32 else lane)

    def shfl_xor_sync(self, mask: Any, value: Any, lane_mask: Any) -> Any:
        """Return the value of the lane whose number differs in the bits of `lane_mask`."""
        source = this_thread().lane ^ (int(lane_mask) & 31)
        return self._shuffle("shfl_xor_sync", mask, value, source)

    def _vote(
        self, name: str, mask: Any, value: Any, function: Callable[[dict[int, Any]], Any]
    ) -> Any:
        return this_thread().collective(name, int(mask) & FULL_MASK, value, _same_for_all(function))

    def all_sync(self, mask: Any, predicate: Any) -> bool:
        """Return whether `predicate` is true on all lanes of the mask."""
        return bool(
            self._vote("all_sync", mask, bool(predicate), lambda lanes: all(lanes.values()))
        )

    def any_sync(self, mask: Any, predicate: Any) -> bool:
        """Return whether `predicate` is true on any lane of the mask."""
        return bool(
            self._vote("any_sync", mask, bool(predicate), lambda lanes: any(lanes.values()))
        )

    def eq_sync(self, mask: Any, predicate: Any) -> bool:
        """Return whether `predicate` is the same on all lanes of the mask."""
        return bool(
            self._vote(
                "eq_sync", mask, bool(predicate), lambda lanes: len(set(lanes.values())) == 1
            )
        )

    def ballot_sync(self, mask: Any, predicate: Any) -> int:
        """Return the lanes of the mask on which `predicate` is true."""
        return int(
            self._vote(
                "ballot_sync",
                mask,
                bool(predicate),
                lambda lanes: sum(1 << lane for lane, value in lanes.items() if value),
            )
        )

    def match_any_sync(self, mask: Any, value: Any) -> int:
        """Return the lanes of the mask that have this lane's value."""

        def resolve(payloads: dict[int, Any]) -> dict[int, int]:
            same: dict[Any, int] = {}
            for lane, held in payloads.items():
                same[held] = same.get(held, 0) | 1 << lane
            return {lane: same[held] for lane, held in payloads.items()}

        return int(
            this_thread().collective("match_any_sync", int(mask) & FULL_MASK, _key(value), resolve)
        )

    def match_all_sync(self, mask: Any, value: Any) -> tuple[int, bool]:
        """Return (the mask, True) where all its lanes have one value, else (0, False)."""

        def decide(lanes: dict[int, Any]) -> tuple[int, bool]:
            same = len(set(lanes.values())) == 1
            return (sum(1 << lane for lane in lanes) if same else 0), same

        result: tuple[int, bool] = self._vote("match_all_sync", mask, _key(value), decide)
        return result


def _by_dimensions(values: tuple[int, ...], ndim: int) -> Any:
    if ndim not in (1, 2, 3):
        raise InvalidOperand(f"grid and gridsize take 1, 2 or 3 dimensions; got {ndim}")
    return values[0] if ndim == 1 else values[:ndim]


def _key(value: Any) -> Any:
    """Return what `match` compares: the bits of a float, the number of an integer."""
    if isinstance(value, (float, np.floating)):
        return np.asarray(value).tobytes()
    return int(value)


cuda: Any = Cuda()
