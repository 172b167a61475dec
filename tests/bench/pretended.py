"""A card that is not there: NumPy arrays, calls made by the golden model, a clock that is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np


class Card:
    """A ``Device`` whose replays take `seconds` each, and whose library is NumPy."""

    library = "numpy 0"

    def __init__(self, seconds: float = 1e-3) -> None:
        self.now = 0.0
        self.each = seconds
        #: Seconds of a call by the name of what is called; `seconds` for others.
        self.copies = 0
        self.captured: list[int] = []
        #: Called after every replay: what a wrong kernel would do.
        self.spoil: Callable[[], None] | None = None

    def random(self, count: int, seed: int = 0, dtype: str = "bfloat16") -> np.ndarray:
        values = np.random.default_rng(seed).standard_normal(count, dtype=np.float32)
        return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def random_bytes(self, shape: tuple[int, ...], low: int = 0, high: int = 256) -> np.ndarray:
        return np.random.default_rng(1).integers(low, high, shape, dtype=np.uint8)

    def full(self, shape: tuple[int, ...], value: float, dtype: str) -> np.ndarray:
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        return np.full(shape, value, kind)

    def fill(self, array: np.ndarray, value: float) -> None:
        array[...] = value

    def array(self, values: np.ndarray) -> np.ndarray:
        return np.array(values)

    def host(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def rows(self, array: np.ndarray, index: np.ndarray) -> np.ndarray:
        return array[index]

    def clone(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def equal(self, a: np.ndarray, b: np.ndarray) -> bool:
        return a.tobytes() == b.tobytes()

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        self.copies += 1
        target[...] = source

    def mark(self) -> float:
        return self.now

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def wait(self) -> None:
        pass

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        self.captured.append(len(calls))
        different = list({id(call): call for call in calls}.values())

        def replay() -> None:
            for call in different:
                call()
            self.now += self.each
            if self.spoil is not None:
                self.spoil()

        return replay

    def allocations(self) -> int:
        return 0

    def release(self) -> None:
        pass
