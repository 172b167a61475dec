"""Host time of every public call that is like one before: ``python -m tests.host_cost``.

On a card, through PyTorch and CuPy, whichever is installed. With ``--pretend``, where there is no
card, the driver's call does nothing, so that what is left is Python, the libraries' look-ups and
the call of a function in C. ``--profile CALL`` shows where the time of one call goes; ``--count``
counts the functions and bytecodes of the package that a call runs, which no other process disturbs.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.util
import math
import pstats
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import nvfp4

from .pretended import pretend

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
    counted = tensor(library, nvfp4.quantize(values(2, 16, 256), "nvfp4"))
    stack, counts = there(values(2, 16, 256)), there(np.array([3, 16], np.int32))
    gate_up, weight = there(values(16, 512)), there(values(256))
    residual, summed, normed = (there(values(16, 256)) for _ in range(3))
    ids, index = there(np.arange(3, dtype=np.int32)), there(np.arange(16, dtype=np.int32))
    a = tensor(library, nvfp4.quantize(values(16, 256), "mxfp4"))
    b = tensor(library, nvfp4.quantize(values(64, 256), "mxfp4"))
    b_prepared = tensor(library, nvfp4.prepare_weights(nvfp4.quantize(values(64, 256), "mxfp4")))
    weights = nvfp4.quantize(values(3, 64, 256), "mxfp4")
    experts = tensor(library, weights)
    experts_prepared = tensor(library, nvfp4.prepare_weights(weights))
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
        "quantize, counts": lambda: nvfp4.quantize(stack, "nvfp4", row_counts=counts, out=counted),
        "swiglu_quantize": lambda: nvfp4.swiglu_quantize(gate_up, "nvfp4", out=q),
        "swiglu_quantize, ranges": lambda: nvfp4.swiglu_quantize(
            gate_up, "nvfp4", row_offsets=grouped.groups, out=grouped
        ),
        "rmsnorm_quantize": lambda: nvfp4.rmsnorm_quantize(
            x,
            weight,
            1e-5,
            "nvfp4",
            residual=residual,
            residual_out=summed,
            norm_out=normed,
            out=q,
        ),
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
        "matmul, prepared": lambda: nvfp4.matmul(x, b_prepared, out=product),
        "grouped_matmul": lambda: nvfp4.grouped_matmul(
            x, experts, row_offsets=grouped.groups, out=product
        ),
        "grouped_matmul, ids and rows": lambda: nvfp4.grouped_matmul(
            x, experts, row_offsets=grouped.groups, expert_ids=ids, row_indices=index, out=product
        ),
        "grouped_matmul, prepared": lambda: nvfp4.grouped_matmul(
            x, experts_prepared, row_offsets=grouped.groups, out=product
        ),
        "dequantize": lambda: q.dequantize(out=plain),
        "interleave_scales": lambda: nvfp4.interleave_scales(scales, out=tiles),
        "deinterleave_scales": lambda: nvfp4.deinterleave_scales(tiles, (200, 12), out=scales),
    }


def the_launch_alone(library: Library) -> Callable[[], Any]:
    """The last that a call of `quantize` does: what is left is the driver's part."""
    from nvfp4 import launch
    from nvfp4.api import _place, _repeat

    values = np.ones((16, 256), np.float32)
    x, q = library.there(values), tensor(library, nvfp4.quantize(values, "nvfp4"))
    _repeat.forget()
    with _place.noted() as notes:
        nvfp4.quantize(x, "nvfp4", out=q)
    ((_, launches, where, buffers),) = notes
    prepared = launch.prepare(launches, where.device)
    given = [buffers[name] for name in prepared.names]
    bound = prepared.bind([getattr(value, "pointer", value or 0) for value in given])
    kept = x, q
    return lambda: bound(0) if kept else None


def _known(call: Callable[[], Any]) -> None:
    """Make a call until all is ready for the next one: three times for each of 16 inputs."""
    for _ in range(3 * 16):
        call()


def microseconds(calls: dict[str, Callable[[], Any]], wait: Callable[[], Any]) -> dict[str, float]:
    """The least, over batches that never fill the queue, of what each call costs the host.

    By turns: a processor's clock changes by half from one second to the next.
    """
    times = {}
    for label, call in calls.items():
        _known(call)
        times[label] = math.inf
    for _ in range(BATCHES):
        for label, call in calls.items():
            wait()
            times[label] = min(times[label], timeit.timeit(call, number=BATCH) / BATCH * 1e6)
    return times


class Counted(NamedTuple):
    """What a call runs of this package."""

    functions: int
    bytecodes: int


def counted(call: Callable[[], Any]) -> Counted:
    """Functions that are entered, and bytecodes; of a call that has been made before."""
    package = str(Path(nvfp4.__file__).parent)
    functions = bytecodes = 0

    def entered(frame: Any, event: str, argument: Any) -> Any:
        nonlocal functions
        if not frame.f_code.co_filename.startswith(package):
            return None
        functions += 1
        frame.f_trace_opcodes = True
        return inside

    def inside(frame: Any, event: str, argument: Any) -> Any:
        nonlocal bytecodes
        bytecodes += event == "opcode"
        return inside

    _known(call)
    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(before)
    return Counted(functions, bytecodes)


def main() -> None:
    """Print a line for each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pretend", action="store_true", help="there is no card")
    parser.add_argument("--profile", metavar="CALL", help="where the time of one call goes")
    parser.add_argument("--count", action="store_true", help="count instead of measuring")
    options = parser.parse_args()
    for name, library in _libraries(options.pretend).items():
        calls = public_calls(library)
        if options.profile is not None:
            _profile(calls[options.profile])
        elif options.count:
            for label, call in calls.items():
                made = counted(call)
                print(f"{name:6s} {label:32s} {made.functions:3d} {made.bytecodes:4d}")
        else:
            calls["the launch alone"] = the_launch_alone(library)
            for label, us in microseconds(calls, library.wait).items():
                missed = "  missed" if us > LIMIT_US else ""
                print(f"{name:6s} {label:32s} {us:6.2f} us{missed}")


def _libraries(pretended: bool) -> dict[str, Library]:
    if pretended:
        return {name: Library(there, lambda: None) for name, there in pretend().items()}
    found = [name for name in LIBRARIES if importlib.util.find_spec(name) is not None]
    return {name: LIBRARIES[name]() for name in found}


def _profile(call: Callable[[], Any]) -> None:
    _known(call)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(10_000):
        call()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
