"""The words that describe a block-scaled product of tcgen05 and its operands in shared memory.

An *instruction descriptor* (32 bits) says the types, N, M and which scales of a group of four are
meant; an *operand descriptor* (64 bits) where a matrix lies in shared memory. Each is made here and
read back here, bit by bit; bits that mean nothing are refused. Source: PTX ISA, tcgen05,
instruction descriptor, shared memory descriptor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .instruction import instruction

#: Kind of a product -> elements of K that an instruction takes, which are 32 bytes of each row.
KINDS = {"mxf4nvf4": 64, "mxf4": 64, "mxf8f6f4": 32}
#: Codes of element types: of kind mxf8f6f4, and of the kinds of four bits.
ELEMENT_CODES = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
FOUR_BIT_CODES = {"e2m1": 1}
SCALE_CODES = {"ue4m3": 0, "ue8m0": 1}
#: Width of the swizzle in bytes (0: none) -> bits 63:61 of an operand descriptor.
SWIZZLE_CODES = {0: 0, 128: 2, 64: 4, 32: 6}
#: Rows of A, and lanes of the accumulators, of a product of one block.
ROWS = 128
_FIXED = 1 << 46


# Instruction descriptors -------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """What an instruction descriptor says, with the kind and block that the instruction names.

    Attributes
    ----------
    kind
        One of `KINDS`.
    block
        Elements of K that share a scale, 16 or 32.
    a, b
        Element types, ``"e2m1"`` etc.
    scale
        ``"ue8m0"`` or ``"ue4m3"``.
    columns
        N, a multiple of 8 up to 256.
    a_id, b_id
        The byte of a scale word at which the scales of this instruction begin.
    rows
        M: 128, of a pair of blocks 256.
    """

    kind: str
    block: int
    a: str
    b: str
    scale: str
    columns: int
    a_id: int = 0
    b_id: int = 0
    rows: int = ROWS

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {self.kind!r}")
        blocks = {"mxf4nvf4": (16, 32), "mxf4": (32,), "mxf8f6f4": (32,)}[self.kind]
        if self.block not in blocks:
            raise ValueError(f"block of {self.kind} must be one of {blocks}; got {self.block}")
        for name, element in (("a", self.a), ("b", self.b)):
            if element not in self.codes:
                raise ValueError(
                    f"{name} of {self.kind} must be one of {', '.join(self.codes)}; got {element!r}"
                )
        scales = ("ue4m3", "ue8m0") if self.block == 16 else ("ue8m0",)
        if self.scale not in scales:
            raise ValueError(
                f"scale of {self.kind} with blocks of {self.block} must be one of {scales}; "
                f"got {self.scale!r}"
            )
        if self.columns % 8 or not 8 <= self.columns <= 256:
            raise ValueError(f"columns must be a multiple of 8 from 8 to 256; got {self.columns}")
        if self.rows not in (ROWS, 2 * ROWS):
            raise ValueError(f"rows must be {ROWS}, of a pair {2 * ROWS}; got {self.rows}")
        if self.rows != ROWS and self.columns % 16:
            raise ValueError(f"columns of a pair must be a multiple of 16; got {self.columns}")
        places = range(0, 4, self.scales)
        for name, place in (("a_id", self.a_id), ("b_id", self.b_id)):
            if place not in places:
                raise ValueError(f"{name} must be one of {[*places]}; got {place}")

    @property
    def codes(self) -> dict[str, int]:
        """Codes of the element types of this kind."""
        return ELEMENT_CODES if self.kind == "mxf8f6f4" else FOUR_BIT_CODES

    @property
    def scales(self) -> int:
        """Scales of a row that an instruction takes: 1, 2 or 4."""
        return KINDS[self.kind] // self.block

    def encode(self) -> int:
        """The 32 bits."""
        return (
            self.b_id << 4
            | self.codes[self.a] << 7
            | self.codes[self.b] << 10
            | self.columns >> 3 << 17
            | SCALE_CODES[self.scale] << 23
            | self.rows >> 7 << 27
            | self.a_id << 29
        )


def decode_product(bits: int, kind: str, block: int, rows: int = ROWS) -> Product:
    """Read an instruction descriptor.

    Parameters
    ----------
    bits : int
    kind : str
        One of `KINDS`.
    block : int
        What the instruction names beside it: 16 or 32.
    rows : int
        Of a pair of blocks 256.

    Raises
    ------
    ValueError
        A bit is set that means nothing here, or a field has a value that does not exist.
    """
    known = 3 << 4 | 7 << 7 | 7 << 10 | 0x3F << 17 | 1 << 23 | 3 << 27 | 3 << 29
    if kind != "mxf8f6f4":
        known &= ~(1 << 12)
    if bits & ~known:
        raise ValueError(f"bits are set that mean nothing for kind {kind}: {bits & ~known:#x}")
    codes = ELEMENT_CODES if kind == "mxf8f6f4" else FOUR_BIT_CODES
    names = {code: name for name, code in codes.items()}
    a, b = bits >> 7 & 7, bits >> 10 & 7
    for which, code in (("A", a), ("B", b)):
        if code not in names:
            raise ValueError(f"{code} is no element type of {which} for kind {kind}")
    if bits >> 27 & 3 != rows >> 7:
        raise ValueError(f"M is {(bits >> 27 & 3) << 7}; this product has {rows} rows")
    scale = "ue8m0" if bits >> 23 & 1 else "ue4m3"
    columns = (bits >> 17 & 0x3F) << 3
    return Product(kind, block, names[a], names[b], scale, columns, bits >> 29 & 3, bits >> 4 & 3)


@instruction("u32(imm, imm, imm, imm, imm, imm)")
def tcgen05_product_pair(kind, block, a, b, scale, columns):
    """:func:`tcgen05_product` of a pair of blocks: 256 x `columns`, a multiple of 16."""
    return Product(kind, block, a, b, scale, columns, rows=2 * ROWS).encode()


@tcgen05_product_pair.lowering()
def _tcgen05_product_pair(builder, ir, arguments, **fields):
    return ir.Constant(ir.IntType(32), Product(**fields, rows=2 * ROWS).encode())


@instruction("u32(imm, imm, imm, imm, imm, imm)")
def tcgen05_product(kind, block, a, b, scale, columns):
    """The instruction descriptor of a product of 128 x `columns`, as :class:`Product` has it.

    Where an instruction takes fewer than four scales of a row, the place of the first is added:
    ``place << 29 | place << 4``.
    """
    return Product(kind, block, a, b, scale, columns).encode()


@tcgen05_product.lowering()
def _tcgen05_product(builder, ir, arguments, **fields):
    return ir.Constant(ir.IntType(32), Product(**fields).encode())


# Operand descriptors -----------------------------------------------------------------------------


def _bits_of(address: Any, leading: int, stride: int, swizzle: int) -> int:
    fields = ((address, 0), (leading, 16), (stride, 32))
    bits = sum((value & 0x3FFFF) >> 4 << place for value, place in fields)
    return bits | _constant(swizzle)


def _constant(swizzle: int) -> int:
    if swizzle not in SWIZZLE_CODES:
        raise ValueError(f"swizzle must be one of 128, 64, 32, 0; got {swizzle!r}")
    constant = SWIZZLE_CODES[swizzle] << 61 | _FIXED
    return constant - (1 << 64) if constant >> 63 else constant


@instruction("i64(u32, imm, u32, u32)")
def tcgen05_descriptor(address, swizzle, leading, stride):
    """The descriptor of a K-major operand in shared memory at `address`, as 64 bits.

    `swizzle` is 128, 64 or 32: rows of so many bytes along K, as a tensor copy with that swizzle
    leaves them, `stride` bytes from one group of 8 rows to the next (8 * swizzle where they follow
    each other), `leading` unused (16). The tile begins at a multiple of 8 * swizzle; adding 2 to
    the descriptor goes on by 32 bytes along K. Without swizzle (0), 8 rows of 16 bytes are
    contiguous, `leading` bytes apart along K and `stride` along the rows. All are multiples of 16
    below 2^18. Scale factors are without swizzle, `stride` 128: 32 rows of 16 bytes.
    """
    return _bits_of(address, leading, stride, swizzle)


@tcgen05_descriptor.lowering()
def _tcgen05_descriptor(builder, ir, arguments, swizzle):
    word, long = ir.IntType(32), ir.IntType(64)
    made = ir.Constant(long, _constant(swizzle))
    for value, place in zip(arguments, (0, 16, 32), strict=True):
        field = builder.and_(value, ir.Constant(word, 0x3FFFF))
        field = builder.zext(builder.lshr(field, ir.Constant(word, 4)), long)
        made = builder.or_(made, builder.shl(field, ir.Constant(long, place)))
    return made


@dataclass(frozen=True)
class Operand:
    """What an operand descriptor says, in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int

    def chunks(self, rows: int) -> np.ndarray:
        """Shared addresses of the two 16-byte chunks of each of `rows` rows, of shape [rows, 2].

        Raises
        ------
        ValueError
            The tile does not begin at an atom of its swizzle, or 32 bytes reach beyond it.
        """
        row, chunk = np.arange(rows)[:, None], np.arange(2)[None, :]
        width = self.swizzle
        if not width:
            return self.start + (row >> 3) * self.stride + (row & 7) * 16 + chunk * self.leading
        if self.start % (8 * width) >= width:
            raise ValueError(
                f"it begins at {self.start:#x}: with a swizzle of {width} bytes a tile begins at a "
                f"multiple of {8 * width}"
            )
        if self.start % width + 32 > width:
            raise ValueError(f"it begins at {self.start:#x}: 32 bytes on, the swizzle atom ends")
        address = self.start + (row >> 3) * self.stride + (row & 7) * width + 16 * chunk
        return address ^ (address >> 3 & width - 16)


def decode_operand(bits: int) -> Operand:
    """Read an operand descriptor.

    Raises
    ------
    ValueError
        A bit is set or clear that may not be, or a field has a value that does not exist.
    """
    bits &= (1 << 64) - 1
    if bits >> 46 & 7 != 1:
        raise ValueError(f"bits 48:46 must be 0b001; they are {bits >> 46 & 7:#05b}")
    unknown = bits & (0xFF << 53 | 3 << 30 | 3 << 14)
    if unknown:
        raise ValueError(f"bits are set that mean nothing: {unknown:#x}")
    if bits >> 52 & 1:
        raise ValueError("bit 52, an absolute leading address, is for K = 96 only")
    if bits >> 49 & 7:
        raise ValueError(f"base offset {bits >> 49 & 7}; tiles here begin at whole atoms")
    widths = {code: width for width, code in SWIZZLE_CODES.items()}
    code = bits >> 61
    if code not in widths:
        raise ValueError(f"swizzle {code} is none of {', '.join(map(str, sorted(widths)))}")
    field = [(bits >> place & 0x3FFF) << 4 for place in (0, 16, 32)]
    return Operand(field[0], field[1], field[2], widths[code])
