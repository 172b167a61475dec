"""Kernels run on the simulated machine."""

from __future__ import annotations

import pytest

from .simulated import Simulated


@pytest.fixture
def run() -> Simulated:
    """A runner with every check of the simulated machine."""
    return Simulated()


@pytest.fixture
def quick_run() -> Simulated:
    """A runner without those checks that cost time, for what is large."""
    return Simulated(checks=False)
