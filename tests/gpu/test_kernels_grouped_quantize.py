"""The grouped quantiser's kernel on the present card: the tests of tests/kernels again."""

from tests.kernels.test_grouped_quantize import (  # noqa: F401
    test_any_ranges,
    test_encode_scales,
    test_every_vector_comes_out_byte_for_byte,
    test_formats_and_columns,
    test_ids_from_the_number_of_experts_on_are_switched_off,
    test_no_rows,
    test_offsets_of_any_dtype,
    test_offsets_that_no_host_could_refuse_harm_nobody,
    test_rows_are_gathered_and_those_out_of_range_are_zero,
    test_tile_starts_are_data,
    test_tile_starts_out_of_range_write_nothing_outside,
)

from .card import everything_built, quick_run, run  # noqa: F401
