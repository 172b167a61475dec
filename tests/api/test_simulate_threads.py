"""``with nvfp4.simulate()`` and the threads of the host."""

from __future__ import annotations

import contextvars
import sys
import threading
from types import ModuleType

import numpy as np
import pytest

import nvfp4

X = np.random.default_rng(3).standard_normal((40, 64)).astype(np.float32)


def test_threads_that_share_a_machine_take_turns() -> None:
    golden = nvfp4.quantize(X, "nvfp4", encode_scale="amax")
    results: list[object] = []

    def work() -> None:
        try:
            results.append(nvfp4.quantize(X, "nvfp4", encode_scale="amax"))
        except Exception as error:
            results.append(error)

    with nvfp4.simulate():
        # As asyncio.to_thread does.
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(work,)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 3
    for result in results:
        assert isinstance(result, nvfp4.QTensor), result
        np.testing.assert_array_equal(result.codes, golden.codes)


def test_a_call_while_another_thread_imports_the_simulator_is_made_by_the_golden_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    golden = nvfp4.quantize(X, "nvfp4")
    monkeypatch.setitem(sys.modules, "nvfp4.sim", ModuleType("nvfp4.sim"))  # nothing in it yet
    assert nvfp4.quantize(X, "nvfp4").codes.tobytes() == golden.codes.tobytes()


@pytest.mark.parametrize(
    ("options", "says"),
    [({"checks": 3}, "`checks` must be a bool or some of"), ({"trace": 3}, "`trace` must be")],
)
def test_options_of_another_kind_are_refused_by_name(options: dict, says: str) -> None:
    with pytest.raises(TypeError, match=says), nvfp4.simulate(**options):
        pass
