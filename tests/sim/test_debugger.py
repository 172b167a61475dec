"""``breakpoint()`` in a kernel opens pdb in that CUDA thread, and stepping stays in the kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

SCRIPT = """
import numpy as np
import nvfp4
from nvfp4.sim import GlobalPointer, cuda

def twice(value):
    double = value * 2
    return double

def body(out):
    i = cuda.threadIdx.x
    shared = cuda.shared.array(4, np.int32)
    shared[i] = i * 10
    if i == 2:
        breakpoint()
    a = twice(i)
    cuda.syncthreads()
    b = shared[3 - i]
    out[i] = a + int(b)

out = np.zeros(4, np.int32)
with nvfp4.simulate() as machine:
    machine.run(body, 1, 4, 0, (GlobalPointer(out, "i32", "out"),))
print("result", out.tolist())
"""


def debug(tmp_path, commands):
    script = tmp_path / "kernel.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("PYTHONBREAKPOINT", None)
    done = subprocess.run(
        [sys.executable, str(script)],
        input="".join(command + "\n" for command in commands),
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    return done, done.stdout.split("(Pdb) ")


def test_variables_can_be_read_and_steps_go_over_the_barrier(tmp_path):
    done, answers = debug(tmp_path, ["p i, int(shared[2])", "n", "n", "p a", "n", "p int(b)", "c"])
    assert done.returncode == 0, done.stderr
    assert "a = twice(i)" in answers[0]
    assert answers[1].strip() == "(2, 20)"
    assert "cuda.syncthreads()" in answers[2]
    # All other threads ran to the barrier meanwhile; this one goes on where it was.
    assert "b = shared[3 - i]" in answers[3]
    assert answers[4].strip() == "4"
    assert "out[i] = a + int(b)" in answers[5]
    assert answers[6].strip() == "10"
    assert "result [30, 22, 14, 6]" in answers[7]


def test_a_step_goes_into_helpers_and_not_into_the_machine(tmp_path):
    done, answers = debug(tmp_path, ["s", "s", "s", "p double", "s", "s", "s", "p i", "c"])
    assert done.returncode == 0, done.stderr
    assert "twice()" in answers[1]
    assert "double = value * 2" in answers[2]
    assert answers[4].strip() == "4"
    assert "result [30, 22, 14, 6]" in answers[-1]
    places = re.findall(r"> (.*)\((\d+)\)", done.stdout)
    assert len(places) >= 6
    assert {file for file, _ in places} == {str(tmp_path / "kernel.py")}


def test_variables_can_be_changed(tmp_path):
    done, answers = debug(tmp_path, ["n", "!a = 1000", "c"])
    assert done.returncode == 0, done.stderr
    assert "result [30, 22, 1010, 6]" in answers[-1]


def test_quitting_ends_the_run(tmp_path):
    done, _ = debug(tmp_path, ["q"])
    assert done.returncode != 0
    assert "BdbQuit" in done.stderr
    assert "thread (2, 0, 0)" in done.stderr
    assert "result" not in done.stdout
