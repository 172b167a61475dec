"""A BERT encoder small enough for a test: three experts of 128 x 128, made from fixed numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

EXPERTS, COLUMNS, DEPTH = 3, 128, 128


@pytest.fixture
def runner() -> CliRunner:
    """A terminal of 80 columns, whatever the test's own environment says."""
    return CliRunner(env={"COLUMNS": "80"})


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small model, in the layout of a real one."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    folder = tmp_path_factory.mktemp("small-model")
    letters = [chr(c) for c in range(33, 127)]
    pieces = ["[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.enable_truncation(16)  # as the real one has; the demonstration must lift it
    tokenizer.save(str(folder / "tokenizer.json"))

    random = np.random.default_rng(7)

    def weight(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(0.05)

    tensors = {
        "embeddings.word_embeddings.weight": weight(len(pieces), DEPTH),
        "embeddings.position_embeddings.weight": weight(512, DEPTH),
        "embeddings.token_type_embeddings.weight": weight(2, DEPTH),
        "embeddings.LayerNorm.weight": 1 + weight(DEPTH),
        "embeddings.LayerNorm.bias": weight(DEPTH),
    }
    for i in range(EXPERTS):
        tensors[f"encoder.layer.{i}.intermediate.dense.weight"] = weight(COLUMNS, DEPTH)
    save_file(tensors, folder / "model.safetensors")
    config = {"num_hidden_layers": EXPERTS, "layer_norm_eps": 1e-12}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
