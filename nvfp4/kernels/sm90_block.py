"""The block of ``matmul_sm90``: what its warps are for, and where its shared memory is.

Behind the ring of stages (``sm90_weights``) come results, flags, mbarriers (full, empty and
brought, of each stage), and the table of ranges.

Compile-time constants: those of ``matmul_sm90``.
"""

from __future__ import annotations

from .sm90_half_rows import SPLITTING_WARPS
from .sm90_plain_results import tile_rows
from .sm90_quantized_rows import PRODUCER_WARPS
from .sm90_results import PIECE, PITCH
from .sm90_rows import COPYING_WARPS
from .sm90_weights import behind_stages, two_parts

A_ELEMENT = "none"
PAIR = "none"
OUTPUT = "bfloat16"
EPILOGUE = "none"
COMPUTE = "bfloat16"

#: Threads that multiply: two warpgroups.
CONSUMERS = 256


def is_plain():
    """Whether results are only scaled and rounded to 16 bits."""
    if EPILOGUE == "none" and PAIR == "none" and (OUTPUT == "bfloat16" or OUTPUT == "float16"):
        return True
    else:
        return False


def barriers_at():
    """Where mbarriers are: full, empty and brought, of each stage; flags before them."""
    return behind_stages() + 2 * results_of_group() + 16


def results_of_group():
    """Bytes of a warpgroup's results: 32 rows of sums of its stripes, or 64 rows of the result."""
    if is_plain():
        return min(2 * PIECE, tile_rows()) * PITCH
    else:
        return 2 * PIECE * PITCH


def by_copies():
    """Whether rows of A are copied as they are."""
    if A_ELEMENT == "none":
        return True
    else:
        return False


def made():
    """Whether rows of A are made bfloat16 on the way."""
    if A_ELEMENT != "none" and COMPUTE != "fp8":
        return True
    else:
        return False


def tellers_of_stage():
    """Arrivals that fill a stage: of whoever brings rows, and of whoever has asked for weights."""
    if COMPUTE == "fp8":
        return PRODUCER_WARPS + 1
    elif two_parts():
        return SPLITTING_WARPS + 1
    else:
        return 33


def bringers_of_stage():
    """Threads that tell of rows which are on their way."""
    if by_copies():
        return 32 * COPYING_WARPS
    else:
        return 32


def threads_with_flags():
    """Threads that may set a flag, with those that read it."""
    if made():
        return CONSUMERS + 32 * PRODUCER_WARPS
    else:
        return CONSUMERS
