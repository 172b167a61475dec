"""A @cuda.jit kernel of your own on the simulated machine: it names the race that a GPU hides.

    python examples/own_kernel.py

Needs no GPU. With NUMBA_ENABLE_CUDASIM=1, `import nvfp4` puts its machine in the place of Numba's
simulator: warps, shuffles and barriers behave as on a card, and mistakes are named with their line.
"""

import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import numpy as np
from numba import cuda, float32

import nvfp4

THREADS = 64


def block_sum(x, out, careful):
    """Sum 64 elements a block, halving the threads in each step."""
    shared = cuda.shared.array(THREADS, float32)
    i = cuda.threadIdx.x
    shared[i] = x[cuda.grid(1)]
    cuda.syncthreads()
    half = THREADS // 2
    while half:
        if i < half:
            shared[i] += shared[i + half]
        if careful or half > 32:  # "a warp is in step": not since Volta
            cuda.syncthreads()
        half //= 2
    if i == 0:
        out[cuda.blockIdx.x] = shared[0]


kernel = cuda.jit(block_sum)
x = np.random.default_rng(0).integers(-9, 10, 4 * THREADS).astype(np.float32)
out = np.zeros(4, np.float32)

try:
    kernel[4, THREADS](x, out, False)
except nvfp4.SimulationError as error:
    # Everything else about it: error.kernel, error.line, error.block, error.thread, error.address.
    print(f"{type(error).__name__}: {str(error).splitlines()[0]}")

# The same kernel with its barriers, in the order of the warps and in three random ones.
for schedule in ("round_robin", 1, 2, 3):
    out[...] = np.nan
    with nvfp4.simulate(schedule=schedule):
        kernel[4, THREADS](x, out, True)
    assert (out == x.reshape(4, THREADS).sum(axis=1)).all()
print("sums:", out.tolist())
