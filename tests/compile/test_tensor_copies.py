"""The machine code of kernels that use tensor copies has them."""

from __future__ import annotations

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
