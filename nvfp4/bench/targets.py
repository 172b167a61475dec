"""What a figure must reach, and whether it did. Arithmetic only.

A target is a ratio to something measured in the same run on the same card (a copy, a dense call,
cuBLAS), or to a floor computed from the shape, or a time. Ratios are what counts: a time alone
says something about the card.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BANDWIDTH", "FLOPS", "FLOPS_FP8", "Target", "grouped_floor", "product_floor",
           "quantizer_bytes"]  # fmt: skip

#: Bytes a second that a copy reaches on an H200 (read and written), and bfloat16 operations a
#: second that its tensor cores reach on 8192 x 8192 x 8192; of e4m3 about (not measured).
BANDWIDTH = 4.3e12
FLOPS = 790e12
FLOPS_FP8 = 1500e12


@dataclass(frozen=True)
class Target:
    """What to reach; where there is both a ratio and a time, either is enough.

    Attributes
    ----------
    ratio
        Least speed, in units of the reference's.
    reference
        What that is: ``"copy"``, ``"dense"``, ``"floor"``, ``"cuBLAS"``.
    us
        Longest time, in microseconds.
    exclusive
        The ratio must be above, not only at, the figure ("faster than").
    """

    ratio: float | None = None
    reference: str = ""
    us: float | None = None
    exclusive: bool = False

    def __str__(self) -> str:
        parts = []
        if self.ratio is not None:
            sign = ">" if self.exclusive else "≥"
            parts.append(f"{sign} {self.ratio:.2f} {self.reference}")
        if self.us is not None:
            parts.append(f"≤ {_time(self.us)}")
        return " or ".join(parts)

    def met(self, *, ratio: float | None, us: float) -> bool | None:
        """Whether a figure reaches it; None where what it is compared with was not measured.

        Parameters
        ----------
        ratio
            Speed in units of the reference's; None: there is no reference.
        us
            Microseconds.
        """
        if self.us is not None and us <= self.us:
            return True
        if self.ratio is not None:
            if ratio is None:
                return None
            return ratio > self.ratio if self.exclusive else ratio >= self.ratio
        return False if self.us is not None else None


def _time(us: float) -> str:
    return f"{us / 1000:g} ms" if us >= 1000 else f"{us:g} us"


# --- bytes and floors -----------------------------------------------------------------------------


def quantizer_bytes(rows: int, columns: int, block: int, codes_per_byte: int, item: int = 2) -> int:
    """Bytes that a quantiser must read and write: input, codes, a byte a block; no padding."""
    elements = rows * columns
    return elements * item + elements // codes_per_byte + elements // block


def product_floor(
    *,
    rows: int,
    columns: int,
    depth: int,
    weights: float = 1.0,
    bits: float = 4.25,
    input_rows: int | None = None,
    input_bits: float = 16,
    output_bits: float = 16,
    flops: float = FLOPS,
) -> float:
    """Seconds below which a product cannot be: bytes at BANDWIDTH, or operations at `flops`.

    Parameters
    ----------
    rows, columns, depth
        Of the product.
    weights
        How many matrices [columns, depth] are read.
    bits, input_bits, output_bits
        Of an element, with its share of a block scale.
    input_rows
        Rows of the input where they are gathered; each is read once.
    flops
        Operations a second.
    """
    read = weights * columns * depth * bits + (input_rows or rows) * depth * input_bits
    moved = (read + rows * columns * output_bits) / 8
    return max(moved / BANDWIDTH, 2.0 * rows * columns * depth / flops)


def grouped_floor(
    *,
    tokens: int,
    top_k: int,
    columns: int,
    depth: int,
    hit: float,
    bits: float,
    gathered: bool,
    input_bits: float = 16,
    flops: float = FLOPS,
) -> float:
    """:func:`product_floor` of an expert layer: `hit` experts get the rows of all tokens."""
    return product_floor(
        rows=tokens * top_k,
        columns=columns,
        depth=depth,
        weights=hit,
        bits=bits,
        input_rows=tokens if gathered else None,
        input_bits=input_bits,
        flops=flops,
    )
