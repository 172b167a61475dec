"""One feed-forward layer of a mixture of experts, in NVFP4, with SwiGLU inside the product.

Runs on the GPU where CuPy finds one, else in NumPy, with the same code.

    python examples/mixture_of_experts.py
"""

import numpy as np

import nvfp4

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception:  # CuPy is not installed, or there is no GPU
    xp = np

TOKENS, EXPERTS, HIDDEN, INNER = 64, 4, 256, 128
random = np.random.default_rng(0)

# Done once: quantise the weights, [experts, columns, hidden], each expert with its own scale.
up = random.standard_normal((EXPERTS, 2 * INNER, HIDDEN), dtype=np.float32) / np.float32(16)
down = random.standard_normal((EXPERTS, HIDDEN, INNER), dtype=np.float32) / np.float32(11)


def quantize_experts(weights: np.ndarray) -> nvfp4.QTensor:
    scale = np.float32(2688) / np.abs(weights).max(axis=(1, 2))
    return nvfp4.quantize(xp.asarray(weights), "nvfp4", encode_scale=xp.asarray(scale))


up_q, down_q = quantize_experts(up), quantize_experts(down)

# A router's work: the rows sorted by expert, and where each expert's rows begin.
x = random.standard_normal((TOKENS, HIDDEN), dtype=np.float32)
expert_of = random.integers(0, EXPERTS, TOKENS)
row_indices = np.argsort(expert_of, kind="stable").astype(np.int32)
row_offsets = np.concatenate([[0], np.bincount(expert_of, minlength=EXPERTS).cumsum()])
indices, offsets = xp.asarray(row_indices), xp.asarray(row_offsets.astype(np.int32))

# The layer: gather and quantise, multiply with SwiGLU, quantise, multiply.
a = nvfp4.grouped_quantize(xp.asarray(x), "nvfp4", row_offsets=offsets, row_indices=indices)
swiglu = nvfp4.epilogues.swiglu(halves=True)
h = nvfp4.grouped_matmul(a, up_q, row_offsets=offsets, epilogue=swiglu, out_dtype="float32")
b = nvfp4.grouped_quantize(h, "nvfp4", row_offsets=offsets)
y = nvfp4.grouped_matmul(b, down_q, row_offsets=offsets, out_dtype="float32")

# The same layer in float32, to see what quantisation costs.
wanted = np.empty_like(x)
for row, token in enumerate(row_indices):
    gate, linear = np.split(x[token] @ up[expert_of[token]].T, 2)
    wanted[row] = (gate / (1 + np.exp(-gate)) * linear) @ down[expert_of[token]].T
got = y if xp is np else xp.asnumpy(y)
error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
print(f"{xp.__name__}: {TOKENS} tokens, {EXPERTS} experts, error of the layer {error:.3f}")
