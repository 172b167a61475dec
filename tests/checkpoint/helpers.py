"""Small checkpoints on disk, and helpers to look at what was made of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
BF16 = ml_dtypes.bfloat16


def tensors(seed: int = 7, dtype: type = BF16) -> dict[str, np.ndarray]:
    """A small decoder: embeddings, norms, head, two layers with attention and experts."""
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.05).astype(dtype)

    found = {
        "model.embed_tokens.weight": weight(96, 64),
        "model.norm.weight": weight(64),
        "lm_head.weight": weight(96, 64),
    }
    for layer in range(2):
        base = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"{base}.self_attn.{name}.weight"] = weight(64, 64)
        found[f"{base}.self_attn.q_proj.bias"] = weight(64)
        found[f"{base}.mlp.gate.weight"] = weight(4, 64)
        found[f"{base}.mlp.experts.down.weight"] = weight(4, 64, 96)
        found[f"{base}.input_layernorm.weight"] = weight(64)
    return found


def write_folder(
    folder: Path,
    arrays: Mapping[str, np.ndarray],
    shards: int = 1,
    config: Mapping[str, object] | None = None,
) -> Path:
    """A checkpoint as the libraries write it: shards with an index, a config, a tokeniser."""
    # The library takes the memory as it is, whatever the strides.
    arrays = {name: np.array(array, order="C") for name, array in arrays.items()}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "toy"}))
    (folder / "tokenizer.json").write_text('{"tokens": []}')
    (folder / "sub").mkdir()
    (folder / "sub" / "note.txt").write_text("kept")
    (folder / "pytorch_model.bin").write_bytes(b"not for the result")
    if shards == 1:
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(arrays)
    table: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        some = {name: arrays[name] for name in names[i::shards]}
        save_file(some, folder / file, metadata={"format": "pt", "shard": str(i)})
        table |= dict.fromkeys(some, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": table})
    )
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, or the file itself, by relative name."""
    if folder.is_file():
        return {folder.name: folder.read_bytes()}
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """``nvfp4 ARGUMENTS`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "nvfp4", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **environment},
    )
