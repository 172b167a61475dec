"""The naive product's kernel on the present card: the tests of tests/kernels again."""

import numpy as np

from nvfp4 import epilogues
from nvfp4.formats import MXFP4
from tests.kernels import checks
from tests.kernels.checks import quantized
from tests.kernels.test_matmul import (  # noqa: F401
    plain,
    rng,
    test_a_scale_that_is_nan_reaches_every_output_of_its_row,
    test_epilogues,
    test_every_pair_of_operands,
    test_every_vector,
    test_factors_are_multiplied_in_order,
    test_padding_of_scales_is_not_looked_at,
    test_pairs_are_quantised_too,
    test_results_are_quantised_in_the_kernel,
    test_results_are_rounded_once_to_their_type,
    test_rows_of_a_may_lie_apart,
    test_shapes,
)

from .card import everything_built, quick_run, run  # noqa: F401


def test_gated_epilogues_are_as_near_as_the_exponential(run, monkeypatch):  # noqa: F811
    """Not bit for bit: the card's exponential may be some units in the last place off."""

    def near(name: str, got: np.ndarray, expected: np.ndarray, *_: bool) -> None:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6, err_msg=name)

    monkeypatch.setattr(checks, "assert_values", near)
    b = quantized(rng(1), MXFP4, (6, 64))
    for halves in (True, False):
        epilogue = epilogues.swiglu(1.702, 1.0, 7.0, halves=halves)
        checks.matmul(run, plain(2, 3, 64), b, epilogue=epilogue)
