"""Users' kernels in a process with NUMBA_ENABLE_CUDASIM=1: one JSON line a scenario.

Nothing here knows of nvfp4 but the first import, which may come before or after the kernels are
made.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback

import numpy as np
from numba import cuda, float32, int32
from numba.cuda import libdevice

import nvfp4

SCENARIOS = {}
FULL = 0xFFFFFFFF


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


# Kernels that are right
# ----------------------------------------------------------------------------


@cuda.jit
def block_sum(x, out):
    shared = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    shared[i] = x[cuda.grid(1)]
    cuda.syncthreads()
    half = 32
    while half:
        if i < half:
            shared[i] += shared[i + half]
        cuda.syncthreads()
        half //= 2
    if i == 0:
        out[cuda.blockIdx.x] = shared[0]


@scenario
def sums_of_blocks():
    x = np.arange(256, dtype=np.float32)
    results = []
    for options in ({}, {"checks": False}, {"schedule": 5}, {"schedule": [2, 1, 4]}):
        out = np.full(4, np.nan, np.float32)
        with nvfp4.simulate(**options):
            block_sum[4, 64](x, out)
        results.append(out.tolist())
    out = np.full(4, np.nan, np.float32)
    block_sum[4, 64](x, out)
    return [*results, out.tolist()]


@cuda.jit
def warp_sum(x, out):
    value = x[cuda.grid(1)]
    for delta in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(FULL, value, delta)
    ballot = cuda.ballot_sync(FULL, value > 600)
    if cuda.laneid == 0:
        out[cuda.grid(1) // 32, 0] = value
        out[cuda.grid(1) // 32, 1] = cuda.popc(ballot)


@scenario
def sums_of_warps():
    out = np.zeros((4, 2), np.int64)
    warp_sum[2, 64](np.arange(128, dtype=np.int32), out)
    return out.tolist()


@cuda.jit(device=True, inline="always")
def scratch():
    return cuda.shared.array(1, int32)


@cuda.jit(device=True)
def helper(x, i):
    cuda.syncthreads()
    return x[i] * 2


@cuda.jit
def uses_helpers(x, out):
    i = cuda.grid(1)
    first, second = scratch(), scratch()
    if cuda.threadIdx.x == 0:
        first[0] = 1
        second[0] = 2
    out[i] = helper(x, i)
    cuda.syncthreads()
    out[i] += first[0] + 10 * second[0]


@scenario
def device_functions_and_inlined_shared_arrays():
    x = np.arange(64, dtype=np.int32)
    out = np.zeros_like(x)
    uses_helpers[2, 32](x, out)
    return out.tolist()


def make_kernel():
    from numba import cuda as hidden

    @hidden.jit
    def kernel(out):
        out[hidden.grid(1)] = hidden.threadIdx.x

    return kernel


@scenario
def a_kernel_whose_cuda_is_a_closure():
    out = np.zeros(8, np.int32)
    make_kernel()[2, 4](out)
    return out.tolist()


@cuda.jit
def count(total, last):
    cuda.atomic.add(total, 0, 1)
    cuda.atomic.max(last, 0, cuda.grid(1))
    cuda.threadfence()


@scenario
def atomics_and_device_arrays():
    total = cuda.to_device(np.zeros(1, np.int64))
    last = np.zeros(1, np.int64)
    count[5, 33](total, last)
    return [int(total.copy_to_host()[0]), int(last[0])]


record = np.dtype([("a", np.int32), ("b", np.float64)])


@cuda.jit
def records(array):
    i = cuda.grid(1)
    array[i].a = i
    array[i]["b"] = array[i].a / 2


@scenario
def arrays_of_records():
    array = np.zeros(4, record)
    records[1, 4](array)
    return [[int(row["a"]), float(row["b"])] for row in array]


@cuda.jit
def grid_sync(x, out):
    i = cuda.grid(1)
    x[i] = i
    cuda.cg.this_grid().sync()
    out[i] = x[cuda.gridsize(1) - 1 - i]


@scenario
def cooperative_groups():
    x, out = np.zeros(64, np.int32), np.zeros(64, np.int32)
    grid_sync[2, 32](x, out)
    return out.tolist()


@cuda.jit
def two_dimensions(a, out):
    x, y = cuda.grid(2)
    if x < out.shape[0] and y < out.shape[1]:
        row = a[x]
        out[x, y] = row[y] + a[x, :2].sum() + a.T[y, x]


@scenario
def slices_and_shapes():
    a = np.arange(12, dtype=np.float64).reshape(3, 4)
    out = np.zeros_like(a)
    two_dimensions[(2, 2), (2, 2)](a, out)
    return bool((out == 2 * a + a[:, :2].sum(axis=1)[:, None]).all())


@cuda.jit
def mathematics(out):
    out[0] = libdevice.fmaf_rn(out[0], out[1], out[2])
    out[3] = libdevice.int_as_float(libdevice.float_as_int(out[3]) + 1)
    out[4] = libdevice.expf(out[4])
    out[5] = libdevice.fdiv_rn(out[5], 3)
    out[6] = libdevice.clzll(1) + libdevice.umax(-1, 1) / 2**32
    out[7] = libdevice.floorf(out[7])


@scenario
def functions_of_libdevice():
    tiny = 2.0**-12
    out = np.array([1 + tiny, 1 + tiny, -1 - 2 * tiny, 1, 0, 1, 0, -1.5], np.float32)
    mathematics[1, 1](out)
    return out.tolist()


@cuda.jit
def missing_function(out):
    out[0] = libdevice.erfcxf(out[0])


@scenario
def a_function_that_is_missing():
    missing_function[1, 1](np.zeros(1, np.float32))


@cuda.jit
def nothing(out):
    out[0] = 1


@scenario
def an_empty_grid_does_nothing():
    out = np.zeros(1)
    nothing.forall(0)(out)
    return out.tolist()


@scenario
def launches_from_several_threads_of_the_host():
    x = np.arange(64, dtype=np.float32)
    outs = [np.zeros(1, np.float32) for _ in range(4)]
    threads = [threading.Thread(target=lambda out=out: block_sum[1, 64](x, out)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [float(out[0]) for out in outs]


@scenario
def the_name_cuda_is_numbas_again_after_a_launch():
    import numba.cuda

    out = np.zeros(1)
    nothing[1, 1](out)
    after_success = globals()["cuda"] is numba.cuda
    try:
        raises_value_error[1, 1](out)
    except ValueError:
        pass
    return [after_success, globals()["cuda"] is numba.cuda]


# Kernels with a mistake
# ----------------------------------------------------------------------------


@cuda.jit
def raises_value_error(out):
    if cuda.threadIdx.x == 0:
        raise ValueError("not this way")


@scenario
def exceptions_say_where_as_numba_does():
    raises_value_error[2, 4](np.zeros(1))


@cuda.jit
def out_of_bounds(out):
    out[cuda.grid(1)] = 1


@scenario
def out_of_bounds_of_an_argument():
    out_of_bounds[2, 4](np.zeros(7))


@scenario
def out_of_bounds_without_checks():
    with nvfp4.simulate(checks=False):
        out_of_bounds[2, 4](np.zeros(7))


@cuda.jit
def divergent(out):
    if cuda.threadIdx.x < 16:
        cuda.syncthreads()


@scenario
def a_divergent_barrier():
    divergent[1, 32](np.zeros(1))


@cuda.jit
def continues(out):
    go_on = True
    while cuda.syncthreads_or(int(go_on)):
        go_on = False
        if cuda.threadIdx.x == 0 and cuda.threadIdx.y == 0:
            continue
        out[0] = 1


@scenario
def numba_issue_9770():
    continues[1, (16, 16)](np.zeros(1))


@cuda.jit
def wrong_mask(out):
    i = cuda.threadIdx.x
    if i < 16:
        out[i] = cuda.shfl_down_sync(FULL, i, 1)


@scenario
def a_lane_that_never_comes():
    wrong_mask[1, 32](np.zeros(32))


@cuda.jit
def deadlocked(out):
    i = cuda.threadIdx.x
    if i < 32:
        cuda.syncthreads()
        cuda.syncwarp()
    else:
        if i == 32:
            cuda.syncwarp(FULL)
        cuda.syncthreads()


@scenario
def a_deadlock():
    deadlocked[1, 64](np.zeros(1))


@cuda.jit
def unwritten(out):
    shared = cuda.shared.array(32, float32)
    i = cuda.threadIdx.x
    if i != 3:
        shared[i] = 1
    cuda.syncthreads()
    out[i] = shared[31 - i]


@scenario
def an_unwritten_read():
    unwritten[1, 32](np.zeros(32))


@cuda.jit
def racing(out):
    shared = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    shared[i] = i
    if i >= 32:
        cuda.nanosleep(1)
        cuda.nanosleep(1)
        out[i] = shared[i - 32]


@scenario
def a_race_in_shared_memory():
    racing[1, 64](np.zeros(64))


@cuda.jit
def blocks_race(out):
    out[0] = cuda.blockIdx.x


@scenario
def a_race_of_blocks():
    blocks_race[2, 1](np.ones(4))


def main():
    for name in sys.argv[1:] or SCENARIOS:
        try:
            report = {"result": SCENARIOS[name]()}
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            report = {
                "error": type(error).__name__,
                "bases": [base.__name__ for base in type(error).__mro__],
                "text": str(error),
                "line": getattr(error, "line", frame.lineno),
                "source": getattr(error, "line", None),
            }
        print(json.dumps({"scenario": name, **report}), flush=True)


if __name__ == "__main__":
    main()
