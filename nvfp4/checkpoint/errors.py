"""What is wrong with a file, as an exception of its own."""

from __future__ import annotations

__all__ = ["CheckpointError", "printable"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or must not be written; the message names the file."""


def printable(text: object) -> str:
    r"""``text`` with control characters escaped: names in a file are written by strangers.

    A name can hold terminal escape sequences, line breaks or bidirectional marks; in a message they
    are shown as ``\x1b``.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))
