"""What the first call of a process imports and runs, its kernel in the disk cache.

Named and counted, so that it is the same on a busy machine; ``nvfp4 bench quantize --only host``
measures it on a card.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from nvfp4 import compile as compiler
from nvfp4 import warm

ROOT = Path(__file__).resolve().parents[2]

#: Functions of the package that the first quantiser of a process enters, at most (Python 3.11): the
#: bodies of modules and classes, what makes instructions, plans, the digest of sources. Whoever
#: adds to them makes the first call of every process longer: raise it for a reason.
MOST_FUNCTIONS = 2800

#: A process with CuPy's arrays on a card whose driver does nothing.
START = """
import json, sys
from pathlib import Path
import ml_dtypes, numpy as np
from tests.api import stubs
sys.modules["cupy"] = cupy = stubs.Cupy()
from tests.compile.fake_driver import FakeDriver
import nvfp4.driver
fake = FakeDriver(count=1)
fake.stack.append(0)
nvfp4.driver.driver = lambda: fake
package, functions = str(Path(nvfp4.__file__).parent), 0
def count(frame, event, argument):
    global functions
    functions += event == "call" and frame.f_code.co_filename.startswith(package)
"""
QUANTIZE = """
x = cupy.asarray(np.ones((64, 256), ml_dtypes.bfloat16))
sys.setprofile(count)
nvfp4.quantize(x, "nvfp4")
sys.setprofile(None)
"""
#: A product that is planned, and not built: that takes seconds.
MATMUL = """
from nvfp4.layouts import codes_shape, scale_shape
from nvfp4.formats import FORMATS
import nvfp4.launch
nvfp4.launch.run = lambda launches, *_, **__: print(*(one.program.kernel.name for one in launches),
                                                    file=sys.stderr)
mxfp4, shape = FORMATS["mxfp4"], (512, 512)
x = cupy.asarray(np.ones((64, 512), ml_dtypes.bfloat16))
parts = [cupy.asarray(np.zeros(of(mxfp4, shape, layout), np.uint8))
         for of in (codes_shape, scale_shape) for layout in sys.argv[1:]]
one = cupy.asarray(np.ones((), np.float32))
b = nvfp4.QTensor.from_parts(
    *parts, "mxfp4", shape=shape, decode_scale=one, scale_layout=sys.argv[1])
nvfp4.matmul(x, b)
"""
END = """
print(json.dumps([list(sys.modules), functions, len(fake.launches)]))
"""


class First(NamedTuple):
    """What a process did for its first call."""

    #: Everything that is imported.
    modules: set[str]
    #: Of this package, without its name.
    ours: set[str]
    functions: int
    launches: int
    kernels: list[str]

    def below(self, package: str) -> set[str]:
        """Modules of a package of ours that are not private."""
        inside = {name.removeprefix(package) for name in self.ours if name.startswith(package)}
        return {name for name in inside if not name.startswith("_")}

    @property
    def plans(self) -> set[str]:
        """Modules of plans."""
        return {name for name in self.ours if name.startswith("plans")}


def first(call: str, *arguments: str) -> First:
    """A process that makes a call."""
    done = subprocess.run(
        [sys.executable, "-c", START + call + END, *arguments],
        capture_output=True, text=True, cwd=ROOT, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    modules, functions, launches = json.loads(done.stdout)
    ours = {name.removeprefix("nvfp4.") for name in modules if name.startswith("nvfp4.")}
    return First(set(modules), ours, functions, launches, done.stderr.split())


def test_the_first_quantiser_imports_nothing_that_belongs_to_other_calls(
    cache_directory: Path,
) -> None:
    (program,) = warm.programs(
        [{"call": "quantize", "format": "nvfp4", "shape": [64, 256]}], "sm_90a"
    )
    compiler.build(program, "sm_90a")
    found = first(QUANTIZE)
    assert found.launches == 1
    assert not found.modules & {"numba", "llvmlite", "torch", "cuda.core", "email.parser"}
    # Of kernels, where this one's sources stand, and those of the reference kernel and the search
    # for amax, which are planned in one place.
    sources = {source.__module__.removeprefix("nvfp4.kernels.") for source in program.sources()}
    assert found.below("kernels.") <= sources | {"quantize", "warps"}
    assert found.plans == {"plans", "plans_stream"}
    assert found.below("api.") == {"dense"}
    assert not found.ours & {"golden", "sim", "tensor_maps", "tuning"}
    assert not found.ours & {"ptx.tensor_map", "ptx.mma", "ptx.wgmma", "ptx.tcgen05"}
    assert 0 < found.functions <= MOST_FUNCTIONS


def test_the_first_product_imports_kernels_of_its_own_card_alone() -> None:
    prepared, plain = first(MATMUL, "sm90"), first(MATMUL, "linear")
    assert prepared.kernels == ["matmul_sm90"] and plain.kernels == ["matmul_sm80"]
    for found in (prepared, plain):
        assert "numba" not in found.modules
        assert found.below("api.") == {"dense", "products", "rows"}
        products = {"plans_products", "plans_prepared", "plans_sm90"}
        assert found.plans == {"plans", "plans_stream"} | products
        blackwell = ("matmul_sm100", "matmul_sm120", "sm100_", "scaled_tiles")
        assert [name for name in found.below("kernels.") if name.startswith(blackwell)] == []
    assert "matmul_sm80" not in prepared.below("kernels.")
