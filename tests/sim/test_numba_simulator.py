"""Users' own ``@cuda.jit`` kernels on the simulated machine, in processes with "
"NUMBA_ENABLE_CUDASIM=1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

KERNELS = Path(__file__).with_name("cudasim_kernels.py")


def environment(**more):
    path = os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))
    return {**os.environ, "PYTHONPATH": path, **more}


@pytest.fixture(scope="module")
def reports():
    done = subprocess.run(
        [sys.executable, "-W", "error", str(KERNELS)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(NUMBA_ENABLE_CUDASIM="1"),
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["scenario"]: line for line in lines}


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("sums_of_blocks", [[2016.0, 6112.0, 10208.0, 14304.0]] * 5),
        ("sums_of_warps", [[496, 0], [1520, 32], [2544, 32], [3568, 32]]),
        ("device_functions_and_inlined_shared_arrays", [2 * i + 21 for i in range(64)]),
        ("a_kernel_whose_cuda_is_a_closure", [0, 1, 2, 3] * 2),
        ("atomics_and_device_arrays", [165, 164]),
        ("arrays_of_records", [[0, 0.0], [1, 0.5], [2, 1.0], [3, 1.5]]),
        ("cooperative_groups", list(range(63, -1, -1))),
        ("slices_and_shapes", True),
        (
            "functions_of_libdevice",
            [
                2.0**-24,
                1 + 2.0**-12,
                -1 - 2.0**-11,
                1 + 2.0**-23,
                1.0,
                float(np.float32(1) / 3),
                64.0,
                -2.0,
            ],
        ),
        ("an_empty_grid_does_nothing", [0.0]),
        ("launches_from_several_threads_of_the_host", [2016.0] * 4),
        ("the_name_cuda_is_numbas_again_after_a_launch", [True, True]),
    ],
)
def test_right_kernels_give_right_results(reports, scenario, expected):
    assert reports[scenario].get("result") == expected, reports[scenario]


MISTAKES = {
    # scenario: error, words of the message, source of the line that is reported
    "exceptions_say_where_as_numba_does": (
        "ValueError",
        ["tid=[0, 0, 0] ctaid=[0, 0, 0]: not this way"],
        None,
    ),
    "out_of_bounds_of_an_argument": (
        "OutOfBounds",
        ["out[7]", "(7,)", "thread (3, 0, 0)"],
        "out[cuda.grid(1)] = 1",
    ),
    "out_of_bounds_without_checks": ("IndexError", ["tid=[3, 0, 0] ctaid=[1, 0, 0]"], None),
    "a_function_that_is_missing": (
        "UnsupportedError",
        ["libdevice.erfcxf", "tid=[0, 0, 0]"],
        None,
    ),
    "a_divergent_barrier": ("DivergentBarrier", ["left the kernel"], "cuda.syncthreads()"),
    "numba_issue_9770": (
        "DivergentBarrier",
        ["at another instruction"],
        "while cuda.syncthreads_or",
    ),
    "a_lane_that_never_comes": (
        "WarpMaskError",
        ["never comes", "lane"],
        "cuda.shfl_down_sync(FULL, i, 1)",
    ),
    "a_deadlock": (
        "WarpMaskError",
        ["waits at cudasim_kernels.py"],
        "cuda.syncwarp(FULL)",
    ),
    "an_unwritten_read": (
        "UnwrittenRead",
        ["shared array of cudasim_kernels.py"],
        "out[i] = shared[31 - i]",
    ),
    "a_race_in_shared_memory": ("DataRace", ["wrote at"], "out[i] = shared[i - 32]"),
    "a_race_of_blocks": (
        "DataRace",
        ["of out", "of block (0, 0, 0)"],
        "out[0] = cuda.blockIdx.x",
    ),
}


@pytest.mark.parametrize("scenario", MISTAKES)
def test_mistakes_are_reported_with_their_line(reports, scenario):
    error, words, source = MISTAKES[scenario]
    report = reports[scenario]
    assert report.get("error") == error, report
    for word in words:
        assert word in report["text"]
    if source is not None:
        assert source in KERNELS.read_text().splitlines()[report["line"] - 1]
        assert "SimulationError" in report["bases"]


def test_every_scenario_is_looked_at(reports):
    (mark,) = test_right_kernels_give_right_results.pytestmark
    assert {case[0] for case in mark.args[1]} | MISTAKES.keys() == set(reports)


PLAIN = """
import sys
import numpy as np
import {first}
import {second}
from numba import cuda

@cuda.jit
def kernel(out):
    i = cuda.threadIdx.x
    out[i] = cuda.shfl_xor_sync(0xFFFFFFFF, i, 3)

out = np.zeros(32, np.int32)
kernel[1, 32](out)
print(out.tolist() == [i ^ 3 for i in range(32)])
from nvfp4.sim import cudasim
cudasim.uninstall()
try:
    kernel[1, 32](out)
except AttributeError as error:
    print("shfl_xor_sync" in str(error))
"""


@pytest.mark.parametrize(("first", "second"), [("nvfp4", "numba.cuda"), ("numba.cuda", "nvfp4")])
def test_importing_the_package_is_enough_and_can_be_undone(first, second):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PLAIN.format(first=first, second=second)],
        capture_output=True,
        text=True,
        env=environment(NUMBA_ENABLE_CUDASIM="1"),
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_process_with_the_variable_and_without_numba_imports_the_package():
    code = "import sys; sys.modules['numba'] = None; import nvfp4; print(nvfp4.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(NUMBA_ENABLE_CUDASIM="1"),
    )
    assert done.returncode == 0, done.stderr


def test_without_the_variable_the_mode_refuses_to_start():
    code = "import nvfp4.sim.cudasim"
    plain = environment()
    plain.pop("NUMBA_ENABLE_CUDASIM", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=plain)
    assert done.returncode != 0
    assert "ToolchainError" in done.stderr
    assert "NUMBA_ENABLE_CUDASIM=1" in done.stderr


def test_the_simulator_needs_no_cuda_package():
    code = """
import sys
for name in ("numba", "numba_cuda", "llvmlite", "cupy", "cuda"):
    sys.modules[name] = None
import numpy as np, nvfp4
from nvfp4.sim import GlobalPointer, cuda
out = np.zeros(64, np.uint32)
def body(out):
    out[cuda.grid(1)] = cuda.shfl_xor_sync(0xFFFFFFFF, cuda.threadIdx.x, 1)
with nvfp4.simulate("sm_100a") as machine:
    machine.run(body, 2, 32, 0, (GlobalPointer(out, "u32", "out"),))
print(out.tolist() == [i ^ 1 for i in range(32)] * 2)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.stdout.strip() == "True", done.stderr


def test_it_is_twenty_times_faster_than_numbas_simulator():
    done = subprocess.run(
        [sys.executable, "-m", "nvfp4.bench.simulator", "--json", "--repeats", "5"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
    )
    seconds = json.loads(done.stdout)["seconds"]
    assert seconds["numba"] / seconds["nvfp4, checks off"] >= 20, seconds
