"""Host time of every public call that is like one before: ``python -m tests.host_cost``.

On a card, through PyTorch and CuPy, whichever is installed. With ``--pretend``, where there is no
card, the calls of the driver do nothing, so that what is left is Python: CuPy's arrays lie in host
memory. ``--profile CALL`` shows where the time of one call goes.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import importlib.util
import pstats
import sys
import timeit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import nvfp4

LIMIT_US = 10.0
BATCH, BATCHES = 100, 60


class Library(NamedTuple):
    """A copy of a NumPy array on the card, and what waits for the card."""

    there: Callable[[np.ndarray], Any]
    wait: Callable[[], Any]


def cupy_library() -> Library:
    """CuPy, on a card."""
    import cupy

    return Library(cupy.asarray, cupy.cuda.runtime.deviceSynchronize)


def torch_library() -> Library:
    """PyTorch, on a card."""
    import torch

    def there(x: np.ndarray) -> Any:
        x = np.array(x, order="C")
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(x).cuda()

    return Library(there, torch.cuda.synchronize)


LIBRARIES = {"cupy": cupy_library, "torch": torch_library}


def tensor(library: Library, q: nvfp4.QTensor) -> nvfp4.QTensor:
    """A copy of a tensor on the card."""
    return nvfp4.QTensor.from_parts(
        library.there(q.codes),
        library.there(q.scales),
        q.format,
        shape=q.shape,
        decode_scale=library.there(q.decode_scale),
        scale_layout=q.scale_layout,
        groups=None if q.groups is None else library.there(q.groups),
    )


def doubled(value, row, column, expert):  # type: ignore[no-untyped-def]
    """An epilogue."""
    return value * np.float32(2)


def public_calls(library: Library) -> dict[str, Callable[[], Any]]:
    """Calls with ``out=``, of small arrays: over on the card before the next one starts."""
    there = library.there
    rng = np.random.default_rng(1)

    def values(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)

    offsets = np.array([0, 4, 8, 16], np.int32)
    x = there(values(16, 256))
    rows = [there(values(16, 256)) for _ in range(16)]
    one = there(np.ones((), np.float32))
    q = tensor(library, nvfp4.quantize(values(16, 256), "nvfp4"))
    grouped = tensor(library, nvfp4.grouped_quantize(values(16, 256), "nvfp4", row_offsets=offsets))
    ids, index = there(np.arange(3, dtype=np.int32)), there(np.arange(16, dtype=np.int32))
    a = tensor(library, nvfp4.quantize(values(16, 256), "mxfp4"))
    b = tensor(library, nvfp4.quantize(values(64, 256), "mxfp4"))
    experts = tensor(library, nvfp4.quantize(values(3, 64, 256), "mxfp4"))
    product = there(np.zeros((16, 64), ml_dtypes.bfloat16))
    plain = there(np.zeros((16, 256), np.float32))
    bias = nvfp4.epilogues.bias(there(np.zeros(64, np.float32)))
    scales, tiles = (
        there(np.zeros((200, 12), np.uint8)),
        there(np.zeros((2, 3, 32, 4, 4), np.uint8)),
    )
    step = iter(range(1 << 62))
    return {
        "quantize": lambda: nvfp4.quantize(x, "nvfp4", out=q),
        "quantize, 16 inputs": lambda: nvfp4.quantize(rows[next(step) % 16], "nvfp4", out=q),
        "quantize, scale a number": lambda: nvfp4.quantize(x, "nvfp4", encode_scale=2.0, out=q),
        "quantize, scale an array": lambda: nvfp4.quantize(x, "nvfp4", encode_scale=one, out=q),
        "grouped_quantize": lambda: nvfp4.grouped_quantize(
            x, "nvfp4", row_offsets=grouped.groups, out=grouped
        ),
        "grouped_quantize, ids and rows": lambda: nvfp4.grouped_quantize(
            x, "nvfp4", row_offsets=grouped.groups, expert_ids=ids, row_indices=index, out=grouped
        ),
        "matmul": lambda: nvfp4.matmul(x, b, out=product),
        "matmul of tensors": lambda: nvfp4.matmul(a, b, out=product),
        "matmul, bias": lambda: nvfp4.matmul(x, b, epilogue=bias, out=product),
        "matmul, a function": lambda: nvfp4.matmul(x, b, epilogue=doubled, out=product),
        "grouped_matmul": lambda: nvfp4.grouped_matmul(
            x, experts, row_offsets=grouped.groups, out=product
        ),
        "grouped_matmul, ids and rows": lambda: nvfp4.grouped_matmul(
            x, experts, row_offsets=grouped.groups, expert_ids=ids, row_indices=index, out=product
        ),
        "dequantize": lambda: q.dequantize(out=plain),
        "interleave_scales": lambda: nvfp4.interleave_scales(scales, out=tiles),
        "deinterleave_scales": lambda: nvfp4.deinterleave_scales(tiles, (200, 12), out=scales),
    }


def microseconds(call: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """The least, over batches that never fill the queue, of what one call costs the host."""
    call()
    call()
    times = []
    for _ in range(BATCHES):
        wait()
        times.append(timeit.timeit(call, number=BATCH) / BATCH)
    return min(times) * 1e6


def pretend() -> dict[str, Callable[[], Library]]:
    """No card: a driver whose calls do nothing, and a stub of CuPy over host memory."""
    from nvfp4 import driver, launch
    from tests.api import stubs
    from tests.compile.fake_driver import FakeDriver

    cupy = stubs.Cupy()
    sys.modules["cupy"] = cupy

    fake = FakeDriver()
    fake.stack.append(0)
    nothing = SimpleNamespace(cuLaunchKernelEx=lambda *args: 0, cuCtxGetDevice=lambda place: 0)
    loaded, stream = SimpleNamespace(handle=1), SimpleNamespace(ptr=0)
    driver.driver = functools.cache(lambda: fake)
    driver._library = lambda binding: nothing
    launch._ready = lambda *args: loaded  # type: ignore[assignment, return-value]
    launch.architecture = lambda device: "sm_90a"  # type: ignore[assignment]
    cupy.cuda.get_current_stream = lambda device: stream

    def there(x: np.ndarray) -> Any:
        x = np.array(x, order="C")
        memory = np.zeros(x.nbytes + 256, np.uint8)
        skip = -memory.ctypes.data % 256
        memory[skip : skip + x.nbytes] = x.reshape(-1).view(np.uint8)
        return stubs.CupyArray(np.ndarray(x.shape, x.dtype, memory, skip))

    return {"cupy": lambda: Library(there, lambda: None)}


def main() -> None:
    """Print a line for each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pretend", action="store_true", help="there is no card")
    parser.add_argument("--profile", metavar="CALL", help="where the time of one call goes")
    options = parser.parse_args()
    makers = pretend() if options.pretend else LIBRARIES
    for name, make in makers.items():
        if not options.pretend and importlib.util.find_spec(name) is None:
            continue
        library = make()
        for label, call in public_calls(library).items():
            if options.profile is None:
                print(f"{name:6s} {label:32s} {microseconds(call, library.wait):6.2f} us")
            elif options.profile == label:
                microseconds(call, library.wait)
                profile = cProfile.Profile()
                profile.enable()
                for _ in range(10_000):
                    call()
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
