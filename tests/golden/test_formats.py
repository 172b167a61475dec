from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nvfp4 import errors
from nvfp4.formats import FORMATS, MXFP8_E4M3, NVFP4, SCALE_LAYOUTS, SCALE_ROUNDINGS, block_format
from tests.exact import magnitudes


def test_the_four_formats_are_those_of_the_definition():
    assert {name: dataclasses.astuple(f)[1:] for name, f in FORMATS.items()} == {
        "nvfp4": ("e2m1", 6.0, 2, 1, 16, "e4m3", 2),
        "mxfp4": ("e2m1", 6.0, 2, 1, 32, "e8m0", 2),
        "mxfp8_e4m3": ("e4m3", 448.0, 8, 3, 32, "e8m0", 1),
        "mxfp8_e5m2": ("e5m2", 57344.0, 15, 2, 32, "e8m0", 1),
    }
    assert SCALE_ROUNDINGS == ("rceil", "floor", "ceil", "even")
    assert SCALE_LAYOUTS == ("linear", "tcgen")


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_qmax_and_emax_are_those_of_the_element(fmt):
    assert magnitudes(fmt.element)[-1] == fmt.qmax
    assert max(e for e in range(32) if 2**e <= fmt.qmax) == fmt.emax


def test_names_the_alias_and_descriptors_are_accepted():
    for name, fmt in FORMATS.items():
        assert block_format(name) is fmt
        assert block_format(fmt) is fmt
    assert block_format("mxfp8") is MXFP8_E4M3
    assert block_format("mxfp8").name == "mxfp8_e4m3"


def test_a_descriptor_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        NVFP4.block = 32


@pytest.mark.parametrize("value", ["fp4", "NVFP4", "", "mxfp8_e3m4"])
def test_an_unknown_name_is_a_value_error_that_lists_the_names(value):
    with pytest.raises(ValueError, match="'nvfp4', 'mxfp4', 'mxfp8_e4m3', 'mxfp8_e5m2'") as caught:
        block_format(value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [None, 4, np.dtype("float32"), np.float16, ("nvfp4",), b"nvfp4"])
def test_anything_but_a_name_or_descriptor_is_a_type_error(value):
    with pytest.raises(TypeError, match="format must be a name or a BlockFormat"):
        block_format(value)


def test_the_error_classes_are_of_the_promised_kinds():
    assert issubclass(errors.UnsupportedError, NotImplementedError)
    assert issubclass(errors.ToolchainError, RuntimeError)
    assert issubclass(errors.SimulationError, RuntimeError)
