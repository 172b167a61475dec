"""Quantise one matrix to every format: bytes, error, and what is inside. Needs no GPU.

    python examples/quantize.py
"""

import numpy as np

import nvfp4

weights = np.random.default_rng(0).standard_normal((256, 1024), dtype=np.float32)

for name in ("nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"):
    # Only nvfp4 has a second level of scales: one number for the tensor, from its largest value.
    q = nvfp4.quantize(weights, name, encode_scale="amax" if name == "nvfp4" else None)
    error = q.dequantize() - weights
    print(
        f"{name:<11} codes {q.codes.shape} scales {q.scales.shape}"
        f"  {8 * (q.codes.nbytes + q.scales.nbytes) / weights.size:.2f} bits a value,"
        f" error {np.linalg.norm(error) / np.linalg.norm(weights):.4f}"
    )

# Scales lie in the tiles that tensor cores read; "linear" is the plain matrix of them.
tiles = nvfp4.quantize(weights, "mxfp4")
plain = nvfp4.quantize(weights, "mxfp4", scale_layout="linear")
same = nvfp4.interleave_scales(plain.scales)
print("same scales in both layouts:", np.array_equal(np.asarray(same), np.asarray(tiles.scales)))
