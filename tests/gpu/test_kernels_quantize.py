"""The dense quantiser's reference kernel on the present card: the tests of tests/kernels again."""

from tests.kernels.test_quantize import (  # noqa: F401
    test_any_number_of_blocks,
    test_any_number_of_rows,
    test_encode_scales_of_a_matrix,
    test_every_vector_comes_out_byte_for_byte,
    test_mxfp8_has_no_encode_scale,
    test_rows_lie_apart_and_at_any_address,
    test_scale_roundings,
    test_stacks_of_matrices,
    test_the_maximum_of_any_tensor,
    test_the_maximum_of_nothing_makes_the_scale_1,
)

from .card import everything_built, quick_run, run  # noqa: F401
