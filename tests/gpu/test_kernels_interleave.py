"""The kernels that move scales on the present card: the tests of tests/kernels again."""

from tests.kernels.test_interleave import (  # noqa: F401
    test_each_matrix_of_a_stack_by_itself,
    test_there_and_back,
)

from .card import everything_built, quick_run, run  # noqa: F401
