"""The dequantiser's kernels on the present card: the tests of tests/kernels again."""

from tests.kernels.test_dequantize import (  # noqa: F401
    test_any_bytes_in_every_format,
    test_every_scale_byte_with_every_code,
    test_every_vector,
    test_grouped_tensors,
    test_indices_that_no_host_could_refuse_read_nothing_outside,
    test_shapes_and_decode_scales,
    test_tile_starts_are_data,
    test_what_the_quantiser_wrote_comes_back,
)

from .card import everything_built, quick_run, run  # noqa: F401
