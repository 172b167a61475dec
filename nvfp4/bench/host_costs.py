"""What a call costs the host: calls with ``out=``, launches, the first call of a process."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .. import api, launch
from ..arrays import as_array, stream_pointer
from ..formats import FORMATS
from ..layouts import codes_shape, scale_shape
from ..tensor import QTensor
from .outputs import outputs
from .report import Row, failed, row, skipped
from .run import Run
from .targets import Target
from .timing import host_seconds

__all__ = ["GROUP", "LABEL", "calls", "first_call", "measure"]

GROUP = "The host's time"
#: What ``--only`` calls all this.
LABEL = "host"
LIMIT = Target(us=10.0)
ROWS, COLUMNS, EXPERTS = 32, 7168, 256
PRODUCT = (16, 128, 128)  # rows, columns, depth: over before the next call

#: A process that makes its first call; prints seconds and what was imported for it. Without a
#: format it only starts the driver's Python package: the part of a first call that is not ours.
FIRST_CALL = """
import json, sys, time
now = time.perf_counter
start = now()
import nvfp4
imported = now() - start
early = [m for m in ("numba", "cupy", "torch", "cuda") if m in sys.modules]
library, fmt = sys.argv[1:]
if library == "cupy":
    import cupy, ml_dtypes
    x = cupy.ones((512, 7168), cupy.uint16).view(ml_dtypes.bfloat16)
    wait = cupy.cuda.runtime.deviceSynchronize
else:
    import torch
    x = torch.ones((512, 7168), dtype=torch.bfloat16, device="cuda")
    wait = torch.cuda.synchronize
wait()
def start_driver():
    from cuda.bindings import driver
    driver.cuInit(0)
call = start_driver if not fmt else lambda: nvfp4.quantize(x, fmt)
numba_before = "numba" in sys.modules
times = []
for _ in range(2):
    start = now()
    call()
    wait()
    times.append(now() - start)
numba = "numba" in sys.modules and not numba_before
print(json.dumps({"import": imported, "early": early, "first": times[0], "second": times[1],
                  "numba": numba}))
"""


def calls() -> list[dict[str, Any]]:
    """What is called here, as ``nvfp4 compile --shapes`` takes it."""
    m, n, k = PRODUCT
    return [
        {"call": "quantize", "format": ["nvfp4", "mxfp8_e4m3"], "shape": [ROWS, COLUMNS]},
        {"call": "grouped_quantize", "format": ["nvfp4", "mxfp8_e4m3"],
         "shape": [64, 4096], "groups": EXPERTS},
        {"call": "matmul", "a": "bfloat16", "b": "mxfp4", "m": m, "n": n, "k": k},
        {"call": "quantize", "format": "nvfp4", "shape": [512, 7168]},
    ]  # fmt: skip


def measure(run: Run) -> None:
    """Everything about the host."""
    for shape, fmt, call in _public_calls(run):
        if run.late(GROUP, shape, fmt, "nvfp4", LIMIT):
            continue
        run.say(f"host: {shape} {fmt}")
        try:
            run.add(_repeated(run, shape, fmt, call))
        except Exception as error:  # the other rows are worth having
            run.add(failed(GROUP, shape, fmt, error, LIMIT))
    for shape, call in _launches(run):
        if run.late(GROUP, shape, "", "nvfp4", LIMIT):
            continue
        run.say(f"host: {shape}")
        run.add(row(GROUP, shape, "", "nvfp4", host_seconds(call, run.device.wait), target=LIMIT))
    _first_calls(run)


def _repeated(run: Run, shape: str, fmt: str, call: Callable[[], Any]) -> Row:
    """A public call, over and over, and what it allocates."""
    timing = host_seconds(call, run.device.wait)
    before = run.device.allocations()
    for _ in range(10):
        call()
    made = run.device.allocations() - before
    run.device.wait()
    found = row(GROUP, shape, fmt, "nvfp4", timing, target=LIMIT)
    if made:
        found.met, found.note = False, f"{made} allocations in 10 calls, none are allowed"
    else:
        found.checked = "allocates nothing"
    return found


def _public_calls(run: Run) -> list[tuple[str, str, Callable[[], Any]]]:
    device = run.device
    made: list[tuple[str, str, Callable[[], Any]]] = []
    x = device.random(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    few = device.random(64 * 4096).reshape(64, 4096)
    bounds = np.minimum(np.arange(EXPERTS + 1), 64).astype(np.int32)
    offsets = device.array(bounds)

    def dense(fmt: str) -> Callable[[], Any]:
        (q,) = outputs(run.device, FORMATS[fmt], ROWS, COLUMNS, 1)
        return lambda: api.quantize(x, fmt, out=q)

    def grouped(fmt: str) -> Callable[[], Any]:
        (q,) = outputs(run.device, FORMATS[fmt], 64, 4096, 1, offsets)
        return lambda: api.grouped_quantize(few, fmt, row_offsets=offsets, out=q)

    formats = run.options.chosen(("nvfp4", "mxfp8_e4m3"))
    made += [(f"quantize(out=), {ROWS} x {COLUMNS}", fmt, dense(fmt)) for fmt in formats]
    shape = f"grouped_quantize(out=), {EXPERTS} experts, 64 rows"
    made += [(shape, fmt, grouped(fmt)) for fmt in formats]
    m, n, k = PRODUCT
    a = device.random(m * k).reshape(m, k)
    fmt = FORMATS["mxfp4"]
    b = QTensor.from_parts(
        device.random_bytes(codes_shape(fmt, (n, k))),
        device.random_bytes(scale_shape(fmt, (n, k), "tcgen"), 117, 123),
        fmt,
        shape=(n, k),
        decode_scale=device.full((), 1.0, "float32"),
    )
    out = device.full((m, n), 0.0, "bfloat16")
    made.append((f"matmul(out=), {m} x {n} x {k}", fmt.name, lambda: api.matmul(a, b, out=out)))
    return made


def _launches(run: Run) -> list[tuple[str, Callable[[], Any]]]:
    """Launches alone, below the public functions: of the copy kernel."""
    from .devices import _copy_launches

    x = as_array(run.device.random(1 << 14), "x")
    y = as_array(run.device.full((1 << 14,), 0, "bfloat16"), "y")
    if x.device is None:  # the host's arrays: there is nothing to launch
        return []
    launches = _copy_launches(1 << 15)
    stream = stream_pointer(x, None)
    buffers = {"x": x, "y": y}
    ready = launch.prepare(launches, x.device)
    values = tuple(buffers[name].pointer for name in ready.names)
    return [
        ("launch.run", lambda: launch.run(launches, buffers, stream=stream, device=x.device)),
        ("prepared launch", lambda: ready(values, stream)),
    ]


# --- first calls ----------------------------------------------------------------------------------


def first_call(
    library: str, fmt: str, cache: Path | None = None, bytecode: Path | None = None
) -> dict[str, Any]:
    """Seconds of the first call of a new process.

    Parameters
    ----------
    library : {"cupy", "torch"}
    fmt
        Of the quantiser; "": nothing but the driver's Python package is started.
    cache
        The directory of kernels to use; None: that of this process.
    bytecode
        Where Python finds, and writes, the bytecode of all modules; None: wherever it does.

    Raises
    ------
    RuntimeError
        The process failed; the message has the end of what it printed.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    environment = {**os.environ, "PYTHONPATH": path}
    if cache is not None:
        environment["NVFP4_CACHE_DIR"] = str(cache)
    if bytecode is not None:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, library, fmt],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr else "no output")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


_FIRST = (
    ("import nvfp4", "import", Target(us=300_000)),
    ("first call of a process, kernel on disk", "first", Target(us=50_000)),
    ("first call of a process, nothing on disk", "first", Target(us=3_000_000)),
)


def _first_calls(run: Run, repeats: int = 3) -> None:
    """Three processes with a warm disk cache, one with an empty one; CuPy's start is quicker.

    All find their modules' bytecode, as they do where pip has installed them: a process before them
    has written it. Where it is not written, as in a checkout under PYTHONDONTWRITEBYTECODE, Python
    compiles the sources of every module anew, which takes longer than everything that is measured
    here.
    """
    library = "cupy" if importlib.util.find_spec("cupy") else run.device.library.split()[0]
    if run.deadline.over(35):
        for label, _, target in _FIRST:
            run.add(skipped(GROUP, label, "nvfp4", "nvfp4", "the budget is spent", target))
        return
    run.say("host: first calls of new processes")
    try:
        with tempfile.TemporaryDirectory(prefix="nvfp4-bench-") as folder:
            bytecode, built, empty = (Path(folder) / name for name in ("bytecode", "1", "2"))
            first_call(library, "nvfp4", built, bytecode)
            warm = [first_call(library, "nvfp4", built, bytecode) for _ in range(repeats)]
            driver = first_call(library, "", built, bytecode)["first"]
            cold = [first_call(library, "nvfp4", empty, bytecode)]
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        for label, _, target in _FIRST:
            run.add(skipped(GROUP, label, "nvfp4", "nvfp4", str(error), target))
        return
    extra = sorted({name for one in warm for name in one["early"]})
    run.add(_first_row(*_FIRST[0], warm, f"imports {', '.join(extra)}" if extra else ""))
    numba = "imports numba" if any(one["numba"] for one in warm) else ""
    note = f"beside {library}'s own start; {driver * 1e3:.0f} ms of it import cuda.bindings"
    run.add(_first_row(*_FIRST[1], warm, numba, note))
    run.add(_first_row(*_FIRST[2], cold, ""))


def _first_row(
    label: str, key: str, target: Target, found: list[dict[str, Any]], fault: str, note: str = ""
) -> Row:
    """Median of processes; a `fault` is a target missed, whatever the time."""
    seconds = [one[key] for one in found]
    us = statistics.median(seconds) * 1e6
    return Row(
        GROUP, label, "" if key == "import" else "nvfp4", "nvfp4",
        us=us, low_us=min(seconds) * 1e6, high_us=max(seconds) * 1e6,
        target=str(target), met=False if fault else target.met(ratio=None, us=us),
        note="; ".join(part for part in (fault, note) if part),
        calls=1, replays=len(found),
    )  # fmt: skip
