"""A gated layer of NVFP4 weights, float16 rows: SwiGLU, bias, residual add inside the products.

Runs on the GPU where CuPy finds one, else in NumPy, with the same code.

    python examples/weight_only_linear.py
"""

import math

import numpy as np

import nvfp4

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception:  # CuPy is not installed, or there is no GPU
    xp = np

TOKENS, HIDDEN, INNER = 8, 256, 512
random = np.random.default_rng(0)


def normal(*shape: int, size: float = 1.0) -> np.ndarray:
    return (size * random.standard_normal(shape)).astype(np.float32)


# Done once: the weights, [columns of the result, K], gates in the first half of the columns of up.
up, down = normal(2 * INNER, HIDDEN, size=1 / 16), normal(HIDDEN, INNER, size=1 / 22)
up_bias, down_bias = normal(2 * INNER, size=0.1), normal(HIDDEN, size=0.1)
up_q = nvfp4.quantize(xp.asarray(up), "nvfp4", encode_scale="amax")
down_q = nvfp4.quantize(xp.asarray(down), "nvfp4", encode_scale="amax")


# nvfp4.epilogues.swiglu() is ready made. With a bias under it, write your own: this function is
# compiled into the kernel, and gets the float32 sums of two columns.
def biased_swiglu(gate, up, row, column, expert, bias):
    half = (gate + bias[column]) * np.float32(0.5)
    # x * sigmoid(x), which is x / 2 * (1 + tanh(x / 2))
    gated = half + half * np.float32(math.tanh(half))
    return gated * (up + bias[INNER + column])


# Arrays reach an epilogue flat.
def add_bias_and_residual(value, row, column, expert, bias, residual):
    return value + bias[column] + residual[row * HIDDEN + column]


x = xp.asarray(normal(TOKENS, HIDDEN).astype(np.float16))
gated = nvfp4.Epilogue(biased_swiglu, xp.asarray(up_bias), pair=True)
h = nvfp4.matmul(x, up_q, epilogue=gated, out_dtype="float16")
last = nvfp4.Epilogue(add_bias_and_residual, xp.asarray(down_bias), x, axes=("N", "MN"))
y = nvfp4.matmul(h, down_q, epilogue=last, out_dtype="float32")

# The same layer in float32, to see what quantisation costs.
host = (x if xp is np else xp.asnumpy(x)).astype(np.float32)
gate, linear = np.split(host @ up.T + up_bias, 2, axis=1)
wanted = (gate / (1 + np.exp(-gate)) * linear) @ down.T + down_bias + host
got = y if xp is np else xp.asnumpy(y)
error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
bits = 8 * (up_q.codes.nbytes + up_q.scales.nbytes) / up.size
print(f"{xp.__name__}: {TOKENS} tokens, {bits:.2f} bits a weight, error of the layer {error:.3f}")
