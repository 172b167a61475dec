"""FlashInfer's grouped product, called as FlashInfer is called, on whatever is there.

A file that says ``from flashinfer.gemm import group_gemm_mxfp4_nt_groupwise`` runs on Hopper and
older cards, and without one, when it imports the name from ``nvfp4.compat.flashinfer``. Here with
PyTorch on its GPU, or on the CPU; without PyTorch with NumPy, and the same product once more by the
kernels in the simulated machine.

    python examples/flashinfer_drop_in.py
"""

from itertools import pairwise

import numpy as np

import nvfp4
from nvfp4.compat.flashinfer import (
    block_scale_interleave,
    group_gemm_mxfp4_nt_groupwise,
    mxfp4_quantize,
    mxfp8_quantize,
)

try:
    import torch
except ImportError:
    torch = None

EXPERTS, COLUMNS, DEPTH = 3, 64, 256
m_indptr = np.array([0, 4, 4, 134], np.int32)  # the second expert has no rows
ROWS = int(m_indptr[-1])
random = np.random.default_rng(0)
x = random.standard_normal((ROWS, DEPTH), dtype=np.float32)
w = random.standard_normal((EXPERTS, COLUMNS, DEPTH), dtype=np.float32) / np.float32(16)


def there(array: np.ndarray):
    """An array of the library in use, on its device."""
    if torch is None:
        return array
    return torch.from_numpy(array).to("cuda" if torch.cuda.is_available() else "cpu")


# Weights: quantised and swizzled once, each expert by itself.
b, b_scale = zip(*[mxfp4_quantize(there(one)) for one in w], strict=True)
stack = np.stack if torch is None else torch.stack
b, b_scale = stack(b), stack(b_scale)

# Rows: quantised together; the scales of group i go to row (m_indptr[i] + 127 * i) // 128 * 128.
a, linear = mxfp8_quantize(there(x), is_sf_swizzled_layout=False)
linear = linear.reshape((ROWS, DEPTH // 32))
a_scale = there(np.zeros(((ROWS + 127 * EXPERTS) // 128 * 128, DEPTH // 32), np.uint8))
for i, (start, stop) in enumerate(pairwise(m_indptr)):
    if stop > start:
        swizzled = block_scale_interleave(linear[start:stop]).reshape((-1, DEPTH // 32))
        row = (start + 127 * i) // 128 * 128
        a_scale[row : row + len(swizzled)] = swizzled

y = group_gemm_mxfp4_nt_groupwise(a, b, a_scale, b_scale, there(m_indptr), tile_n=64)

got = np.array(y, np.float32) if torch is None else y.float().cpu().numpy()
wanted = np.concatenate(
    [x[start:stop] @ w[i].T for i, (start, stop) in enumerate(pairwise(m_indptr))]
)
error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
where = "numpy" if torch is None else f"torch, {y.device}"
print(f"{where}: {tuple(y.shape)} {y.dtype}, {error:.3f} from the product without quantisation")

if torch is None:
    few = np.array([0, 4, 4, 6], np.int32)
    rows = {"a": a[:6], "b": b[:, :8].copy(), "b_scale": b_scale, "a_scale": a_scale}
    golden = group_gemm_mxfp4_nt_groupwise(**rows, m_indptr=few)
    with nvfp4.simulate("sm_90a"):
        simulated = group_gemm_mxfp4_nt_groupwise(**rows, m_indptr=few)
    print("the kernels give the same bits:", golden.tobytes() == simulated.tobytes())
