"""The naive grouped product on the present card: the tests of tests/kernels again."""

from tests.kernels.test_grouped_matmul import (  # noqa: F401
    test_any_ranges,
    test_epilogues_know_row_column_and_expert,
    test_every_pair_of_formats,
    test_every_vector,
    test_factors,
    test_indices_that_no_host_could_refuse_stay_inside,
    test_linear_scales_of_a,
    test_quantised_results_where_there_is_nothing_to_multiply,
    test_results_are_quantised_in_the_kernel,
    test_rows_are_gathered,
    test_tile_starts_of_a_are_data,
    test_tile_starts_of_a_quantised_result_are_data,
)

from .card import everything_built, quick_run, run  # noqa: F401
