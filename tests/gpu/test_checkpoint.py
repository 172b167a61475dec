"""Checkpoints quantised on the GPU have the bytes of the CPU's; prints the speed of both."""

from __future__ import annotations

import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from nvfp4.checkpoint import TensorWriter, quantize, verify

# No package is needed here that a machine with a GPU may not have.
TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def write(path: Path, shapes: dict[str, tuple[str, tuple[int, ...]]]) -> Path:
    rng = np.random.default_rng(0)
    with TensorWriter(path, shapes, {"format": "pt"}) as writer:
        for name, (dtype, shape) in shapes.items():
            x = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.03)
            writer.append(name, x.astype(TYPES[dtype]))
    return path


@pytest.mark.parametrize("method", ["amax", "mse"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_the_gpu_gives_the_bytes_of_the_cpu(format: str, method: str, tmp_path: Path) -> None:
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{dtype.lower()}.{i}.weight": (dtype, shape)
        for dtype in TYPES
        for i, shape in enumerate([(96, 128), (257, 1024), (3, 40, 96)])
    }
    source = write(tmp_path / "in.safetensors", shapes)
    for device in ("cpu", "cuda"):
        quantize(source, tmp_path / f"{device}.safetensors", format=format, method=method,
                 device=device)  # fmt: skip
    cpu = (tmp_path / "cpu.safetensors").read_bytes()
    assert (tmp_path / "cuda.safetensors").read_bytes() == cpu
    assert verify(source, tmp_path / "cuda.safetensors", min_sqnr=15).passed


def test_several_pieces_and_special_values_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(1).standard_normal((64, 256)).astype("float32")
    x[0, 0], x[1, 1], x[2] = np.nan, np.inf, 0
    monkeypatch.setattr("nvfp4.checkpoint.numeric.GpuBackend.chunk", 1000)
    source = tmp_path / "in.safetensors"
    with TensorWriter(source, {"a.weight": ("F32", x.shape)}) as writer:
        writer.append("a.weight", x)
    for format in ("nvfp4", "mxfp4", "mxfp8"):
        for device in ("cpu", "cuda"):
            quantize(source, tmp_path / f"{format}-{device}.safetensors", format=format,
                     device=device)  # fmt: skip
        cpu = (tmp_path / f"{format}-cpu.safetensors").read_bytes()
        assert (tmp_path / f"{format}-cuda.safetensors").read_bytes() == cpu


def test_speed_of_two_gigabytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {f"{i}.weight": ("BF16", (8192, 16384)) for i in range(8)}
    source = write(tmp_path / "in.safetensors", shapes)
    lines = []
    for device in ("cuda", "cuda", "cpu"):
        began = time.monotonic()
        result = quantize(source, tmp_path / f"{device}.safetensors", device=device, overwrite=True)
        rate = result.source_bytes / (time.monotonic() - began) / 1e9
        size = result.source_bytes / 1e9
        lines.append(f"nvfp4 checkpoint of {size:.2f} GB, {device}: {rate:.2f} GB/s")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    cpu = (tmp_path / "cpu.safetensors").read_bytes()
    assert (tmp_path / "cuda.safetensors").read_bytes() == cpu
