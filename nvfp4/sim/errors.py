"""What the simulated machine reports about a kernel, each finding an exception that says where.

A check raises one of these with a message; the engine adds the place when the exception leaves the
CUDA thread that caused it (``nvfp4.sim.location``), so that a model never walks frames on its way.
"""

from __future__ import annotations

from typing import Any

from ..errors import SimulationError

__all__ = [
    "DataRace",
    "Deadlock",
    "DivergentBarrier",
    "Finding",
    "InvalidDescriptor",
    "InvalidOperand",
    "LaunchControlError",
    "Livelock",
    "MBarrierError",
    "Misaligned",
    "MissingFence",
    "NotAwaited",
    "OutOfBounds",
    "ReadOnlyWrite",
    "RegisterPoolError",
    "TensorMemoryError",
    "Trap",
    "UnwrittenRead",
    "WarpMaskError",
    "WrongParity",
]


class Finding(SimulationError):
    """A mistake of a kernel, found while it ran.

    Attributes
    ----------
    kernel, file, line, function
        The kernel and the line of its source (its body or a helper function, never a model's) that
        was running.
    block, thread
        Indices (x, y, z); None where no single thread is to blame.
    address
        The first byte of the access, in shared memory's 32-bit or in global memory's 64-bit address
        space.
    buffer
        Name of the memory: ``"shared memory"`` or a kernel argument.
    """

    def __init__(
        self, message: str, *, address: int | None = None, buffer: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.address = address
        self.buffer = buffer
        self.kernel: str | None = None
        self.file: str | None = None
        self.line: int | None = None
        self.function: str | None = None
        self.block: tuple[int, int, int] | None = None
        self.thread: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        parts = []
        if self.kernel is not None:
            parts.append(f"kernel {self.kernel}")
        if self.line is not None:
            place = f"{self.file}:{self.line}"
            parts.append(
                place if self.function in (None, self.kernel) else f"{place} in {self.function}"
            )
        if self.block is not None:
            parts.append(f"block {tuple(self.block)}")
        if self.thread is not None:
            parts.append(f"thread {tuple(self.thread)}")
        if self.address is not None:
            parts.append(f"address {self.address:#x}")
        return f"{self.message} [{', '.join(parts)}]" if parts else self.message

    def __reduce__(self) -> Any:
        return (_rebuild, (type(self), self.message, self.__dict__))


def _rebuild(kind: type[Finding], message: str, state: dict[str, Any]) -> Finding:
    finding = kind(message)
    finding.__dict__.update(state)
    return finding


class OutOfBounds(Finding, IndexError):
    """An access outside of a buffer, of shared memory, or of what is allocated there."""


class UnwrittenRead(Finding):
    """Shared or local memory is read that nothing has written."""


class Misaligned(Finding):
    """An address is not a multiple of the access's size."""


class ReadOnlyWrite(Finding):
    """A store into an array that its owner made read-only."""


class InvalidOperand(Finding):
    """An instruction's operand is outside of what the instruction takes."""


class DataRace(Finding):
    """Two threads touch the same bytes, one of them writing, and nothing orders them."""


class NotAwaited(DataRace):
    """Memory or accumulators are used that an engine still writes, or overwritten that it reads."""


class MissingFence(Finding):
    """An engine touches what a thread has written, or registers, without the fence between."""


class InvalidDescriptor(InvalidOperand):
    """A descriptor or tensor map whose bits do not decode, or say something that cannot be."""


class MBarrierError(Finding):
    """An mbarrier that was never made, is made twice, overwritten, or counts more than it can."""


class WrongParity(MBarrierError):
    """A wait for a phase of an mbarrier that lies two or more phases back."""


class TensorMemoryError(Finding):
    """Tensor memory that is not allocated, is given back twice or never, or lies crosswise."""


class RegisterPoolError(Finding):
    """A setmaxnreg the wrong way, without launch bounds, or not of all warps of a warpgroup."""


class LaunchControlError(Finding):
    """A request for a block after one that was refused, or the index of a block that none gave."""


class WarpMaskError(Finding):
    """A warp operation whose mask and lanes do not agree, such as a lane that never comes."""


class DivergentBarrier(Finding):
    """A barrier that some of its threads do not reach, or reach at another place of the kernel."""


class Deadlock(Finding):
    """No thread can go on; the message says what each warp waits for."""


class Livelock(Deadlock):
    """Threads spin, each waiting for something that none of them does."""


class Trap(Finding):
    """The kernel stopped itself, by the instruction ``trap``."""
