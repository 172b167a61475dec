"""The kernels of prepared weights on the present card: the tests of tests/kernels again."""

from tests.kernels.test_prepare import (  # noqa: F401
    test_a_plain_matrix_among_others,
    test_any_number_of_rows_and_blocks,
    test_decode_scales_are_copied,
    test_every_eight_bit_code_alone_among_ones,
    test_every_nvfp4_scale_byte,
    test_every_scale_byte_of_prepared_weights_with_every_code,
    test_more_than_a_block_of_warps,
    test_nothing_has_headers,
    test_one_code_makes_a_block_count_wherever_it_is,
    test_scales_around_what_can_be_rebased,
    test_values_of_prepared_weights,
)

from .card import everything_built, quick_run, run  # noqa: F401
