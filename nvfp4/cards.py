"""What plans and floors need to know of a card: of the present one, or of one known by its name.

Bandwidth and operations are what kernels reach, not what data sheets promise: on an H200 a copy
makes 4.3 of 4.8 TB/s, and bfloat16 products of 8192 x 8192 x 8192 make 790 of 989 TFLOP/s. Other
cards are taken to reach the same fractions of theirs.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from .architectures import arch_of, capability

__all__ = ["CARDS", "CardFacts", "card_facts", "named_card", "present_card"]

#: Fractions of the data sheet's figures that an H200 reaches.
_OF_BANDWIDTH = 4.3 / 4.8
_OF_OPERATIONS = 790 / 989


@dataclass(frozen=True)
class CardFacts:
    """A card.

    Attributes
    ----------
    name
        As the driver has it, or as in :data:`CARDS`.
    arch
        What kernels are built for.
    processors
        Multiprocessors.
    bandwidth
        Bytes a second that a copy reaches.
    flops
        bfloat16 operations a second that large products reach; 0: not known.
    """

    name: str
    arch: str
    processors: int
    bandwidth: float
    flops: float

    @property
    def identity(self) -> tuple[str, int]:
        """As tables know it: the driver's name, and multiprocessors."""
        name = self.name if self.name.startswith("NVIDIA ") else f"NVIDIA {self.name}"
        return name, self.processors

    def floor(self, moved: float, operations: float) -> tuple[float, str]:
        """Seconds below which a call cannot be, and what sets them.

        Parameters
        ----------
        moved
            Bytes read and written.
        operations
            Additions and multiplications.
        """
        memory = moved / self.bandwidth if self.bandwidth else 0.0
        work = operations / self.flops if self.flops else 0.0
        return (memory, "memory") if memory >= work else (work, "tensor cores")


def _card(name: str, arch: str, processors: int, terabytes: float, tflops: float) -> CardFacts:
    """Of the figures of a data sheet (dense bfloat16, float32 sums)."""
    bandwidth, flops = terabytes * 1e12 * _OF_BANDWIDTH, tflops * 1e12 * _OF_OPERATIONS
    return CardFacts(name, arch, processors, bandwidth, flops)


#: Known cards by name. The first of an architecture stands for it.
CARDS: dict[str, CardFacts] = {
    card.name: card
    for card in (
        _card("H200", "sm_90a", 132, 4.8, 989),
        _card("GH200", "sm_90a", 132, 4.0, 989),
        _card("H100 PCIe", "sm_90a", 114, 2.0, 756),
        _card("H100", "sm_90a", 132, 3.35, 989),
        _card("H20", "sm_90a", 78, 4.0, 148),
        _card("A100", "sm_80", 108, 2.039, 312),
        _card("A40", "sm_86", 84, 0.696, 149.7),
        _card("L40S", "sm_89", 142, 0.864, 362),
        _card("RTX 4090", "sm_89", 128, 1.008, 165.2),
        _card("B200", "sm_100a", 148, 8.0, 2250),
        _card("B300", "sm_103a", 148, 8.0, 2250),
        _card("RTX 5090", "sm_120a", 170, 1.792, 209.5),
    )
}


def named_card(name: str) -> CardFacts:
    """A card of :data:`CARDS`, by its name or one that has it ("NVIDIA H200").

    Raises
    ------
    ValueError
        There is none; the message has those that there are.
    """
    found = card_facts(name)
    if found is None:
        raise ValueError(f"card must be one of {', '.join(CARDS)}; got {name!r}")
    return found


def card_facts(name: str) -> CardFacts | None:
    """What is known of a card whose name has that of one of :data:`CARDS`; the longest counts."""
    names = [known for known in CARDS if re.search(rf"\b{re.escape(known)}\b", name, re.IGNORECASE)]
    return CARDS[max(names, key=len)] if names else None


def card_of_arch(arch: str) -> CardFacts:
    """The card that stands for an architecture.

    Raises
    ------
    ValueError
        No such target, or no card of it is known.
    """
    capability(arch)
    for card in CARDS.values():
        if card.arch == arch:
            return card
    raise ValueError(f"arch must be one that a known card has: say card= too; got {arch!r}")


@functools.cache
def present_card(ordinal: int | None = None) -> CardFacts:
    """The present GPU: its own name and multiprocessors; bandwidth and operations if known.

    Raises
    ------
    ToolchainError
        There is none.
    UnsupportedError
        No kernel is made for it.
    """
    from .driver import current_device, device_info

    info = device_info(current_device() if ordinal is None else ordinal)
    known = card_facts(info.name)
    if known is None:
        return CardFacts(info.name, arch_of(info.cc), info.processors, 0.0, 0.0)
    # A slice of a card (MIG) has a share of it; its memory's share is not known, so: the same.
    share = info.processors / known.processors
    return CardFacts(
        info.name, arch_of(info.cc), info.processors, known.bandwidth * share, known.flops * share
    )
