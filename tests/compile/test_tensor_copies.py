"""The machine code of kernels that use tensor and bulk copies has them."""

from __future__ import annotations

import re

import pytest

from nvfp4 import compile as compiler
from nvfp4.kernels import variants


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_the_quantiser_loads_and_stores_tiles(arch: str) -> None:
    binary, ptx = compiler.inspect(variants("quantize_tma")[0], arch)
    code = compiler.sass(binary)
    assert "UTMALDG.2D" in code
    assert "UTMASTG.2D" in code and "UTMASTG.4D" in code
    assert "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx
    assert "fence.proxy.tensormap::generic.acquire" in ptx
    # Nothing goes past the tiles: codes and scales are written by tensor stores alone.
    assert "st.global.v" not in ptx and "ld.global.v" not in ptx


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_grouped_quantiser_stores_its_scales_at_once(arch: str) -> None:
    program = variants("grouped_quantize_tma", arch=arch)[0]
    binary, ptx = compiler.inspect(program, arch)
    assert compiler.faults(binary, ptx) == ()
    code = compiler.sass(binary)
    assert len(re.findall(r"\bUBLKCP\.G\.S\b", code)) == 1
    # Scales go to shared memory, and from there by that store alone.
    assert "st.shared.u8" in ptx and "st.global.u8" not in ptx
    # One elected thread issues it: the assembler needs no loop over lanes.
    assert "ELECT" in code
    # Nothing is read before the kernels ahead have ended, offsets and scales of experts included.
    assert code.index("ACQBULK") < code.index("LDG")
    assert 0 < code.index("PREEXIT") < code.index("ACQBULK")
    assert bool(re.search(r"\bF2FP\.\S*E2M1", code)) is (arch != "sm_90a")
