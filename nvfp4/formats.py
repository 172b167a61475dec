"""The block formats, as data.

Source: section 1 of the arithmetic definition (element, largest element, block and scale type of
each format). Nothing here computes; golden model, simulator and kernels read these descriptors.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "FORMATS",
    "FORMAT_ALIASES",
    "MXFP4",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "NVFP4",
    "PREPARED",
    "SCALE_LAYOUTS",
    "SCALE_ROUNDINGS",
    "TENSOR_LAYOUTS",
    "BlockFormat",
    "block_format",
]


@dataclass(frozen=True)
class BlockFormat:
    """One block format.

    Attributes
    ----------
    name : str
        Canonical name, the one that ``QTensor.format`` holds.
    element : {"e2m1", "e4m3", "e5m2"}
        Element type; ``"e4m3"`` is the finite-only e4m3fn.
    qmax : float
        Largest finite element.
    emax : int
        Exponent of the largest power of two that is an element.
    mantissa_bits : int
        Stored mantissa bits of an element.
    block : int
        Consecutive columns that share a scale (V in the formulas).
    scale : {"e4m3", "e8m0"}
        Type of the block scale.
    codes_per_byte : int
        2 for four-bit elements (column 2i is the low nibble of byte i), 1 for eight-bit ones.
    """

    name: str
    element: str
    qmax: float
    emax: int
    mantissa_bits: int
    block: int
    scale: str
    codes_per_byte: int


NVFP4 = BlockFormat("nvfp4", "e2m1", 6.0, 2, 1, 16, "e4m3", 2)
MXFP4 = BlockFormat("mxfp4", "e2m1", 6.0, 2, 1, 32, "e8m0", 2)
MXFP8_E4M3 = BlockFormat("mxfp8_e4m3", "e4m3", 448.0, 8, 3, 32, "e8m0", 1)
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", "e5m2", 57344.0, 15, 2, 32, "e8m0", 1)

FORMATS: dict[str, BlockFormat] = {f.name: f for f in (NVFP4, MXFP4, MXFP8_E4M3, MXFP8_E5M2)}
FORMAT_ALIASES: dict[str, str] = {"mxfp8": "mxfp8_e4m3"}

SCALE_ROUNDINGS = ("rceil", "floor", "ceil", "even")
SCALE_LAYOUTS = ("linear", "tcgen")
#: The layout that ``prepare_weights`` makes, of codes and scales.
PREPARED = "sm90"
#: What a QTensor's ``scale_layout`` may be.
TENSOR_LAYOUTS = (*SCALE_LAYOUTS, PREPARED)


def block_format(value: str | BlockFormat) -> BlockFormat:
    """The descriptor that ``value`` stands for.

    Parameters
    ----------
    value : str or BlockFormat
        A canonical name, the alias ``"mxfp8"``, or a descriptor, which is returned as it is.

    Returns
    -------
    BlockFormat

    Raises
    ------
    TypeError
        ``value`` is neither a string nor a descriptor: a dtype never names a block format.
    ValueError
        ``value`` is a string that names no format.
    """
    if isinstance(value, BlockFormat):
        return value
    if not isinstance(value, str):
        raise TypeError(
            "format must be a name or a BlockFormat (a dtype does not say how blocks are scaled); "
            f"allowed names are {_allowed()}; got {value!r} of type {type(value).__name__}"
        )
    found = FORMATS.get(FORMAT_ALIASES.get(value, value))
    if found is None:
        raise ValueError(f"format must be one of {_allowed()}; got {value!r}")
    return found


def _allowed() -> str:
    names = [repr(name) for name in FORMATS]
    names += [f"{alias!r} (= {name!r})" for alias, name in FORMAT_ALIASES.items()]
    return ", ".join(names)
