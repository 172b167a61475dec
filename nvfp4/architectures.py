"""The targets that kernels are built for, and which of them a card runs.

Machine code made for ``sm_90a`` runs on compute capability 9.0 and nowhere else: the suffix ``a``
buys the instructions of one generation (wgmma, tcgen05, conversions to e2m1). Code for ``sm_80``
runs on every 8.x card, but each has its own target here, because their shared memory differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import UnsupportedError

if TYPE_CHECKING:
    from .program import Kernel

__all__ = ["ARCHITECTURES", "arch_of", "architectures_of", "capability", "check_supported"]

#: Every target, oldest first.
ARCHITECTURES = (
    "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a",
)  # fmt: skip


def capability(arch: str) -> tuple[int, int, str]:
    """``"sm_103a"`` -> ``(10, 3, "a")``.

    Raises
    ------
    ValueError
        Not one of :data:`ARCHITECTURES`.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}; got {arch!r}")
    digits = arch.removeprefix("sm_")
    suffix = "a" if digits.endswith("a") else ""
    digits = digits.removesuffix("a")
    return int(digits[:-1]), int(digits[-1]), suffix


def arch_of(cc: tuple[int, int]) -> str:
    """The target to build for a card of compute capability `cc`.

    Raises
    ------
    UnsupportedError
        No target's machine code runs on such a card.
    """
    fitting = [
        arch
        for arch in ARCHITECTURES
        # Without the suffix, code for a lower minor of the same major runs too; with it, only the
        # very same capability's does.
        if (made := capability(arch))[:2] == tuple(cc)
        or (not made[2] and made[0] == cc[0] and made[1] < cc[1])
    ]
    if not fitting:
        raise UnsupportedError(
            f"a card of compute capability {cc[0]}.{cc[1]} runs none of the targets "
            f"{', '.join(ARCHITECTURES)}; the NumPy golden model runs everywhere: pass NumPy arrays"
        )
    return fitting[-1]


def architectures_of(kernel: Kernel) -> tuple[str, ...]:
    """The targets that a kernel is made for, oldest first."""
    return tuple(arch for arch in ARCHITECTURES if _supports(kernel, arch))


def check_supported(kernel: Kernel, arch: str) -> None:
    """Raise unless `kernel` is made for `arch`.

    Raises
    ------
    ValueError
        No such target.
    UnsupportedError
        The kernel needs another one.
    """
    major, minor, _ = capability(arch)
    if not _supports(kernel, arch):
        raise UnsupportedError(
            f"kernel {kernel.name} is made for "
            f"{', '.join(architectures_of(kernel)) or 'no target'}; "
            f"got {arch} (compute capability {major}.{minor})"
        )


def _supports(kernel: Kernel, arch: str) -> bool:
    if kernel.architectures is not None:
        return arch in kernel.architectures
    return capability(arch)[:2] >= kernel.min_cc
