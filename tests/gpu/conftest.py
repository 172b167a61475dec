"""Tests on the present GPU, run by ``make test-gpu``. None is skipped: without a GPU all fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvfp4 import driver


@pytest.fixture(scope="session", autouse=True)
def cards() -> range:
    """The ordinals of all GPUs of this machine."""
    try:
        cuda = driver.driver()
    except Exception as error:
        pytest.exit(f"tests/gpu needs a GPU: {error}", returncode=2)
    return range(driver.check(cuda.cuDeviceGetCount(), "counting devices"))


@pytest.fixture(scope="session")
def cupy() -> Any:
    """CuPy, whose arrays the tests use."""
    import cupy

    return cupy


@pytest.fixture(autouse=True)
def nothing_goes_wrong_on_the_card(cupy: Any, cards: range) -> Iterator[None]:
    """Whatever a test launched has ended well, and the caller's device is current again."""
    before = cupy.cuda.runtime.getDevice()
    yield
    for ordinal in cards:
        with cupy.cuda.Device(ordinal):
            cupy.cuda.runtime.deviceSynchronize()
    assert cupy.cuda.runtime.getDevice() == before


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache, so that what is tested was built from the present sources by this machine.

    Processes of pytest-xdist share one. ``NVFP4_TEST_KERNELS`` names one that stays, for a run
    under ``compute-sanitizer`` after a run without it.
    """
    kept = os.environ.get("NVFP4_TEST_KERNELS")
    if kept:
        directory = Path(kept)
    elif "PYTEST_XDIST_WORKER" in os.environ:
        directory = tmp_path_factory.getbasetemp().parent / "kernels"
        directory.mkdir(exist_ok=True)
    else:
        directory = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVFP4_CACHE_DIR", str(directory))
        yield directory
