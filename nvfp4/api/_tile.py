"""The tile that a caller asks for, where another library's function has arguments for it.

Not public: :func:`nvfp4.grouped_matmul` chooses tiles by itself, and ``nvfp4.compat`` has functions
whose caller may say which. Results are the same but for the order of float32 sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

__all__ = ["Tile", "asked", "asking"]

#: Blocks that make a tile together (1 or 2), its columns, its depth, and whether columns of the
#: result shall be rows of the instruction, and the other way round.
Tile = tuple[int, int, int, bool]

_asked: ContextVar[Tile | None] = ContextVar("tile", default=None)
#: What is asked for; None: nothing. In C: a call that is repeated asks, too.
asked: Callable[[], Tile | None] = _asked.get


@contextlib.contextmanager
def asking(tile: Tile | None) -> Iterator[None]:
    """Products inside are made by such tiles, where a kernel has them."""
    token = _asked.set(tile)
    try:
        yield
    finally:
        _asked.reset(token)
