"""The card as the benchmarks see it, through PyTorch or CuPy, whichever is there.

A device makes arrays, captures calls into a graph, and tells the time between two marks. PyTorch is
preferred: the peers are made for it, and its elementwise kernel copies at 4.1 TB/s on an H200,
where a copy node of a graph reaches 2.7. With CuPy a kernel of ours copies.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import ToolchainError
from .timing import Clock

__all__ = ["CupyDevice", "Device", "TorchDevice", "find_device"]

Calls = Sequence[Callable[[], Any]]


class Device(Clock, Protocol):
    """What a benchmark needs of an array library and the card."""

    library: str

    def random(self, count: int, seed: int = 0, dtype: str = "bfloat16") -> Any:
        """Flat bfloat16 or float16, normally distributed."""

    def random_bytes(self, shape: tuple[int, ...], low: int = 0, high: int = 256) -> Any:
        """uint8 of `low` to ``high - 1``."""

    def full(self, shape: tuple[int, ...], value: float, dtype: str) -> Any:
        """An array with one value everywhere."""

    def fill(self, array: Any, value: float) -> None:
        """Overwrite an array."""

    def array(self, values: np.ndarray) -> Any:
        """A copy of a host array."""

    def host(self, array: Any) -> np.ndarray:
        """A copy on the host; bfloat16 as ml_dtypes has it."""

    def rows(self, array: Any, index: np.ndarray) -> np.ndarray:
        """``array[index]`` on the host."""

    def clone(self, array: Any) -> Any:
        """A copy."""

    def equal(self, a: Any, b: Any) -> bool:
        """Whether all elements are the same."""

    def copy(self, source: Any, target: Any) -> None:
        """Copy between contiguous arrays as fast as a kernel can."""

    def capture(self, calls: Calls) -> Callable[[], Any]:
        """A graph of calls, which have been made before; returns what starts it."""

    def allocations(self) -> int:
        """How often memory has been asked for so far."""

    def release(self) -> None:
        """Give cached memory back."""


class TorchDevice:
    """A card through PyTorch."""

    def __init__(self, where: str = "cuda") -> None:
        self._torch: Any = importlib.import_module("torch")
        self._where = where
        self.library = f"torch {self._torch.__version__}"

    def _like(self, dtype: str) -> Any:
        return getattr(self._torch, dtype)

    def random(self, count: int, seed: int = 0, dtype: str = "bfloat16") -> Any:
        """Flat bfloat16 or float16, normally distributed."""
        generator = self._torch.Generator(device=self._where).manual_seed(seed)
        made = self._torch.empty(count, dtype=self._like(dtype), device=self._where)
        return made.normal_(generator=generator)

    def random_bytes(self, shape: tuple[int, ...], low: int = 0, high: int = 256) -> Any:
        """uint8 of `low` to ``high - 1``."""
        made = self._torch.empty(shape, dtype=self._torch.uint8, device=self._where)
        return made.random_(low, high)

    def full(self, shape: tuple[int, ...], value: float, dtype: str) -> Any:
        """An array with one value everywhere."""
        return self._torch.full(shape, value, dtype=self._like(dtype), device=self._where)

    def fill(self, array: Any, value: float) -> None:
        """Overwrite an array."""
        array.fill_(value)

    def array(self, values: np.ndarray) -> Any:
        """A copy of a host array."""
        return self._torch.from_numpy(np.array(values)).to(self._where)

    def host(self, array: Any) -> np.ndarray:
        """A copy on the host; bfloat16 as ml_dtypes has it."""
        if array.dtype == self._torch.bfloat16:
            import ml_dtypes

            bits: np.ndarray = array.contiguous().view(self._torch.int16).cpu().numpy()
            return bits.view(ml_dtypes.bfloat16)
        values: np.ndarray = array.cpu().numpy()
        return values

    def rows(self, array: Any, index: np.ndarray) -> np.ndarray:
        """``array[index]`` on the host."""
        return self.host(array[self.array(np.asarray(index, np.int64))])

    def clone(self, array: Any) -> Any:
        """A copy."""
        return array.clone()

    def equal(self, a: Any, b: Any) -> bool:
        """Whether all elements are the same."""
        return bool(self._torch.equal(a, b))

    def copy(self, source: Any, target: Any) -> None:
        """Copy between contiguous arrays by the elementwise kernel of ``add``, as integers."""
        kind = self._torch.int16
        self._torch.add(source.view(kind), 0, out=target.view(kind))

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """``a @ b.T`` by cuBLAS."""
        self._torch.mm(a, b.t(), out=out)

    def mark(self) -> Any:
        """An event, recorded now."""
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, second: Any) -> float:
        """Seconds between two events; waits for the second."""
        second.synchronize()
        return float(first.elapsed_time(second)) * 1e-3

    def wait(self) -> None:
        """Wait for everything."""
        self._torch.cuda.synchronize()

    def capture(self, calls: Calls) -> Callable[[], Any]:
        """A graph of calls, which have been made before; returns what starts it."""
        cuda = self._torch.cuda
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.stream(cuda.Stream()):
            graph.capture_begin()
            try:
                for call in calls:
                    call()
            except BaseException:
                with contextlib.suppress(Exception):
                    graph.capture_end()
                raise
            graph.capture_end()
        replay: Callable[[], Any] = graph.replay
        return replay

    def allocations(self) -> int:
        """How often memory has been asked for so far."""
        return int(self._torch.cuda.memory_stats().get("allocation.all.allocated", 0))

    def release(self) -> None:
        """Give cached memory back."""
        self._torch.cuda.empty_cache()


class CupyDevice:
    """A card through CuPy."""

    def __init__(self) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self.library = f"cupy {self._cupy.__version__}"
        self._stream: Any = self._cupy.cuda.Stream(non_blocking=True)
        # For good: the benchmark is a process of its own, and everything belongs on one stream.
        self._stream.use()

    @staticmethod
    def _type(dtype: str) -> Any:
        from ..arrays import numpy_dtype

        return numpy_dtype(dtype)

    def random(self, count: int, seed: int = 0, dtype: str = "bfloat16") -> Any:
        """Flat bfloat16 or float16, normally distributed."""
        cupy = self._cupy
        state = cupy.random.RandomState(seed)
        out = cupy.empty(count, cupy.uint16)
        piece = 1 << 26
        for start in range(0, count, piece):
            some = out[start : start + piece]
            values = state.standard_normal(some.size, dtype=cupy.float32)
            if dtype == "bfloat16":
                some[...] = (values.view(cupy.uint32) >> 16).astype(cupy.uint16)
            else:
                some[...] = values.astype(cupy.float16).view(cupy.uint16)
        return out.view(self._type(dtype))

    def random_bytes(self, shape: tuple[int, ...], low: int = 0, high: int = 256) -> Any:
        """uint8 of `low` to ``high - 1``."""
        cupy = self._cupy
        out = cupy.empty(int(np.prod(shape)), cupy.uint8)
        piece = 1 << 26
        for start in range(0, out.size, piece):
            some = out[start : start + piece]
            some[...] = cupy.random.randint(low, high, some.size, dtype=cupy.int32)
        return out.reshape(shape)

    def full(self, shape: tuple[int, ...], value: float, dtype: str) -> Any:
        """An array with one value everywhere."""
        if dtype == "bfloat16":
            made = self._cupy.empty(shape, self._type(dtype))
            self.fill(made, value)
            return made
        return self._cupy.full(shape, value, self._type(dtype))

    def fill(self, array: Any, value: float) -> None:
        """Overwrite an array."""
        if array.dtype.name == "bfloat16":
            bits = int(np.float32(value).view(np.uint32) >> 16)
            array.view(self._cupy.uint16).fill(bits)
        else:
            array.fill(value)

    def array(self, values: np.ndarray) -> Any:
        """A copy of a host array."""
        return self._cupy.asarray(values)

    def host(self, array: Any) -> np.ndarray:
        """A copy on the host; bfloat16 as ml_dtypes has it."""
        values: np.ndarray = array.get()
        return values

    def rows(self, array: Any, index: np.ndarray) -> np.ndarray:
        """``array[index]`` on the host."""
        kind = array.dtype
        if kind.name == "bfloat16":
            array = array.view(self._cupy.uint16)
        found: np.ndarray = array[self._cupy.asarray(index)].get()
        return found.view(kind)

    def clone(self, array: Any) -> Any:
        """A copy."""
        return array.copy()

    def equal(self, a: Any, b: Any) -> bool:
        """Whether all elements are the same."""
        if a.dtype.name == "bfloat16":
            a, b = a.view(self._cupy.uint16), b.view(self._cupy.uint16)
        return bool(self._cupy.array_equal(a, b))

    def copy(self, source: Any, target: Any) -> None:
        """Copy between contiguous arrays by a kernel of ours."""
        from .. import launch
        from ..arrays import as_array, stream_pointer

        x, y = as_array(source, "source"), as_array(target, "target")
        launches = _copy_launches(int(source.nbytes))
        launch.run(launches, {"x": x, "y": y}, stream=stream_pointer(x, None), device=x.device)

    def mark(self) -> Any:
        """An event, recorded now."""
        event = self._cupy.cuda.Event()
        event.record(self._stream)
        return event

    def seconds(self, first: Any, second: Any) -> float:
        """Seconds between two events; waits for the second."""
        second.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(first, second)) * 1e-3

    def wait(self) -> None:
        """Wait for everything."""
        self._cupy.cuda.runtime.deviceSynchronize()

    def capture(self, calls: Calls) -> Callable[[], Any]:
        """A graph of calls, which have been made before; returns what starts it."""
        stream = self._stream
        stream.synchronize()
        stream.begin_capture()
        try:
            for call in calls:
                call()
        except BaseException:
            with contextlib.suppress(Exception):
                stream.end_capture()
            raise
        graph = stream.end_capture()
        return functools.partial(graph.launch, stream)

    def allocations(self) -> int:
        """How often memory has been asked for so far."""
        if not hasattr(self, "_hook"):
            self._hook = _counting_hook(self._cupy)
        return int(self._hook.count)

    def release(self) -> None:
        """Give cached memory back."""
        self._cupy.get_default_memory_pool().free_all_blocks()


def _counting_hook(cupy: Any) -> Any:
    """A memory hook of CuPy's that counts, from now on."""

    class Count(cupy.cuda.memory_hook.MemoryHook):  # type: ignore[misc]
        name = "nvfp4-count"
        count = 0

        def malloc_preprocess(self, **_: Any) -> None:
            self.count += 1

    hook = Count()
    hook.__enter__()
    return hook


@functools.cache
def _copy_launches(nbytes: int) -> Any:
    """Launches of the copy kernel; what is left of a multiple of 16 bytes is not copied."""
    from ..kernels.copy import COPY, THREADS, UNROLL
    from ..launch import Launch

    words = nbytes // 16
    grid = -(-words // (THREADS * UNROLL))
    return (Launch(COPY.program(), (grid, 1, 1), (THREADS, 1, 1), 0, ("x", "y", words)),)


def _usable() -> Iterator[Callable[[], Device]]:
    with contextlib.suppress(ImportError):
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            yield TorchDevice
    with contextlib.suppress(ImportError):
        importlib.import_module("cupy")
        yield CupyDevice


def find_device(purpose: str = "benchmarks need") -> Device:
    """The card of this machine, through the best library there is.

    Parameters
    ----------
    purpose
        What an error begins with.

    Raises
    ------
    ToolchainError
        There is no GPU, or neither PyTorch nor CuPy.
    """
    from ..driver import current_device, device_info

    try:
        device_info(current_device())
    except ToolchainError as error:
        reason = str(error).partition(";")[0]
        raise ToolchainError(f"{purpose} a GPU, and none can be used here: {reason}") from error
    for make in _usable():
        return make()
    raise ToolchainError(
        f"{purpose} PyTorch with CUDA, or CuPy, for arrays; install one with: "
        "pip install 'nvfp4[cuda13]'"
    )
