"""Every test of compiling has a cache directory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that NVFP4_CACHE_DIR names; it does not exist yet."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("NVFP4_CACHE_DIR", str(directory))
    return directory
