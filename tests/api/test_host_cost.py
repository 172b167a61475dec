"""What a repeated call costs the host, without a card.

Counted, so that it is the same on a busy machine; the times of the tool are for quiet ones.
"""

from __future__ import annotations

import subprocess
import sys

from .. import host_cost

#: Call -> functions of the package that it enters, and bytecodes that they run (Python 3.11), at
#: most. Whoever makes a call longer makes a kernel of 5 us wait for it: raise a limit for a reason.
LIMITS = {
    "quantize": (5, 196),
    "quantize, 16 inputs": (5, 196),
    "quantize, scale a number": (5, 203),
    "quantize, scale an array": (5, 203),
    "quantize, counts": (6, 228),
    "swiglu_quantize": (5, 254),
    "swiglu_quantize, ranges": (5, 266),
    "rmsnorm_quantize": (5, 350),
    "grouped_quantize": (5, 245),
    "grouped_quantize, ids and rows": (5, 259),
    "matmul": (5, 253),
    "matmul of tensors": (6, 295),
    "matmul, bias": (6, 319),
    "matmul, a function": (6, 315),
    "matmul, prepared": (5, 253),
    "grouped_matmul": (5, 306),
    "grouped_matmul, ids and rows": (5, 320),
    "grouped_matmul, prepared": (5, 306),
    "dequantize": (6, 191),
    "interleave_scales": (4, 136),
    "deinterleave_scales": (4, 149),
}


def pretended(*options: str) -> list[str]:
    """Lines about CuPy's arrays."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.host_cost", "--pretend", *options],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return [line for line in done.stdout.splitlines() if line.startswith("cupy")]


def test_repeated_calls_run_few_bytecodes() -> None:
    found = {}
    for line in pretended("--count"):
        _, *words, functions, bytecodes = line.split()
        found[" ".join(words)] = int(functions), int(bytecodes)
    assert found.keys() == LIMITS.keys()
    longer = {
        call: counts
        for call, counts in found.items()
        if counts[0] > LIMITS[call][0] or counts[1] > 1.05 * LIMITS[call][1]
    }
    assert longer == {}


def test_without_a_card_the_python_of_every_call_is_timed() -> None:
    lines = pretended()
    assert len(lines) == len(LIMITS) + 1
    for line in lines:
        assert float(line.split()[-2]) < 10 * host_cost.LIMIT_US, line
