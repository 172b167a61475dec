"""Errors that are not a plain TypeError or ValueError."""

from __future__ import annotations

__all__ = ["SimulationError", "ToolchainError", "UnsupportedError"]


class UnsupportedError(NotImplementedError):
    """What was asked for does not exist on this machine or for these formats.

    The message names what is needed, what is present and the nearest alternative.
    """


class ToolchainError(RuntimeError):
    """A driver, compiler or package is missing or too old; the message says what to install."""


class SimulationError(RuntimeError):
    """Base of everything that the simulated machine reports about a kernel."""
