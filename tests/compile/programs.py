"""Small kernels for the tests of compiling and launching; none is a kernel of the package."""

from __future__ import annotations

from typing import Any

import numpy as np

from nvfp4._numba import cuda
from nvfp4.program import Kernel, Program
from nvfp4.ptx.arith import add_u32, mul_u32
from nvfp4.ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from nvfp4.ptx.instruction import instruction
from nvfp4.ptx.memory import ld_shared_u32, shared_base, st_shared_u32

FACTOR = 3
THREADS = 128


def scaled(value):
    """A helper function, so that there is more than one source."""
    return mul_u32(value, FACTOR)


def adjust(value):
    """What a program may replace by a function of the user's."""
    return value


def multiply(x, y, bias, count):
    """y = adjust(x * FACTOR + bias), 32 bit."""
    i = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    if i < count:
        y[i] = adjust(add_u32(scaled(x[i]), bias))


MULTIPLY = Kernel(
    "multiply",
    multiply,
    ("u32*", "u32*", "u32", "i64"),
    {"FACTOR": (2, 3, 5, 7, 11, 13)},
    threads=THREADS,
)


def reverse(x, y, count):
    """Reverse `count` values, at most one block's, by way of shared memory; element 0 goes last."""
    i = cuda.threadIdx.x + 0
    base = shared_base()
    far = base + 4 * (count - 1 - i)
    st_shared_u32(far, x[i])
    cuda.syncthreads()
    y[i] = ld_shared_u32(base + 4 * i)


REVERSE = Kernel("reverse", reverse, ("u32*", "u32*", "i64"))


def far(x, y, offset):
    """Reverse a block's values by way of shared memory, `offset` bytes from its start."""
    i = cuda.threadIdx.x + 0
    place = shared_base() + offset
    st_shared_u32(place + 4 * (THREADS - 1 - i), x[i])
    cuda.syncthreads()
    y[i] = ld_shared_u32(place + 4 * i)


FAR = Kernel("far", far, ("u32*", "u32*", "i64"), threads=THREADS)


@instruction("u32()", asm="mov.u32 $0, %cluster_ctarank;", min_cc=(9, 0))
def cluster_rank():
    """Which block of its cluster this one is."""


@instruction("u32()", asm="mov.u32 $0, %cluster_nctarank;", min_cc=(9, 0))
def cluster_size():
    """Number of blocks of the cluster."""


def clusters(ranks, sizes):
    """Each block says which of its cluster it is."""
    if cuda.threadIdx.x == 0:
        ranks[cuda.blockIdx.x] = cluster_rank()
        sizes[cuda.blockIdx.x] = cluster_size()


CLUSTERS = Kernel("clusters", clusters, ("u32*", "u32*"), min_cc=(9, 0))


def chain(x, y, count):
    """y = x + 1, begun while the kernel ahead of it still runs."""
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    i = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    if i < count:
        y[i] = add_u32(x[i], 1)


CHAIN = Kernel("chain", chain, ("u32*", "u32*", "i64"), min_cc=(9, 0), threads=THREADS)


def every_type(out, a, b, c, d, e):
    """Store each argument, so that a test sees what arrived."""
    if cuda.threadIdx.x == 0:
        out[0] = a
        out[1] = b
        out[2] = c
        out[3] = d
        if e == np.float32(-1.5):
            out[4] = 1
        else:
            out[4] = 0


EVERY_TYPE = Kernel("every_type", every_type, ("i64*", "i32", "u32", "i64", "u64", "f32"))


def multiply_add(x, y):
    """A product and a sum, which round apart."""
    i = cuda.threadIdx.x + 0
    y[i] = x[i] * x[i] + y[i]


MULTIPLY_ADD = Kernel("multiply_add", multiply_add, ("f32*", "f32*"))


# Kernels that the gate must stop ------------------------------------------------------------------


def spilling(x, y):
    """Too many values alive at once for the registers that its launch bound leaves."""
    i = cuda.threadIdx.x * 64
    v = (
        (x[i], x[i + 1], x[i + 2], x[i + 3], x[i + 4], x[i + 5], x[i + 6], x[i + 7]),
        (x[i + 8], x[i + 9], x[i + 10], x[i + 11], x[i + 12], x[i + 13], x[i + 14], x[i + 15]),
        (x[i + 16], x[i + 17], x[i + 18], x[i + 19], x[i + 20], x[i + 21], x[i + 22], x[i + 23]),
        (x[i + 24], x[i + 25], x[i + 26], x[i + 27], x[i + 28], x[i + 29], x[i + 30], x[i + 31]),
        (x[i + 32], x[i + 33], x[i + 34], x[i + 35], x[i + 36], x[i + 37], x[i + 38], x[i + 39]),
        (x[i + 40], x[i + 41], x[i + 42], x[i + 43], x[i + 44], x[i + 45], x[i + 46], x[i + 47]),
    )
    cuda.syncthreads()
    for j in range(8):
        for k in range(6):
            y[i + 8 * k + j] = v[5 - k][7 - j]


SPILLING = Kernel("spilling", spilling, ("u32*", "u32*"), threads=1024, blocks_per_sm=2)


def in_double(x, y):
    """One literal without np.float32, and the product is float64."""
    y[cuda.threadIdx.x] = x[cuda.threadIdx.x] * 0.1


IN_DOUBLE = Kernel("in_double", in_double, ("f32*", "f32*"))


@instruction(
    "void()", asm="setmaxnreg.inc.sync.aligned.u32 232;", memory=True, min_cc=(9, 0)
)
def more_registers():
    """Ask for registers."""


def unbounded(x):
    """setmaxnreg without a launch bound: the assembler drops it and says so (C75xx)."""
    more_registers()
    x[cuda.threadIdx.x] = 1


UNBOUNDED = Kernel("unbounded", unbounded, ("u32*",), architectures=("sm_90a",))


def program(factor: int = 3, **functions: Any) -> Program:
    """MULTIPLY with a constant, and with functions of the user's."""
    made = MULTIPLY.program(FACTOR=factor)
    return Program(MULTIPLY, made.constants, tuple(functions.items()))
