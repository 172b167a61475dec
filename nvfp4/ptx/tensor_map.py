"""Tensor maps: the 128 bytes that tell a tensor copy (``tma``) where a tensor is.

A map's bits are the driver's secret. For the card :func:`encode_on_card` asks the driver
(``cuTensorMapEncodeTiled``). The simulated machine reads what :func:`encode` writes, whose fields
lie where instructions that edit maps (``tensormap.replace``) are seen to touch them, and whose last
16 bytes are a mark of ours: a map of the one world is refused in the other. Both take the same
arguments, checked by :class:`TensorMap`. Source: CUDA driver API, tensor map object management; PTX
ISA, tensors.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Element type -> (number in the map, bytes); the numbers are those of PTX's elemtype.
ELEMENTS = {
    "u8": (0, 1),
    "u16": (1, 2),
    "u32": (2, 4),
    "i32": (3, 4),
    "u64": (4, 8),
    "i64": (5, 8),
    "f16": (6, 2),
    "f32": (7, 4),
    "f64": (9, 8),
    "bf16": (10, 2),
}
#: Sixteen 4-bit elements, 8 bytes of global memory, that stand in 16 bytes of shared memory, the
#: other 8 undefined: what a product of 8-bit with 4-bit elements reads (Blackwell). Loads only.
PADDED = "b4x16_p64"
_PADDED_NUMBER = 12
_DRIVER_NAMES = {"u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "i32": "INT32", "u64": "UINT64"}
_DRIVER_NAMES |= {"i64": "INT64", "f16": "FLOAT16", "f32": "FLOAT32", "f64": "FLOAT64"}
_DRIVER_NAMES |= {"bf16": "BFLOAT16", PADDED: "16U4_ALIGN16B"}
#: Width of a swizzle in bytes (0: none) -> its number in the map.
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_MARK = b"nvfp4 simulated\0"


def swizzled(address: int, width: int) -> int:
    """Where the byte at a shared-memory address stands with a swizzle of so many bytes.

    Bits 4 and up of the address, as many as 16-byte chunks of the width have, xor those from bit 7.
    """
    return address ^ (address >> 3 & (width - 16 if width else 0))


@dataclass(frozen=True)
class TensorMap:
    """What a tensor map says, and its rules.

    Attributes
    ----------
    address
        Of element 0 in global memory, a multiple of 16.
    element
        One of `ELEMENTS`, or `PADDED`, with further rules: the innermost extent is a multiple of
        128 and that of the box 128, address and strides are multiples of 32, the swizzle is 128 or
        none.
    shape
        Extents in elements, innermost first, 1 to 5 of them.
    strides
        Bytes from one index to the next of each dimension but the innermost, multiples of 16.
    box
        Extents of a copy in elements, 1 to 256 each; the innermost a multiple of 16 bytes, and with
        a swizzle exactly its width.
    swizzle
        128, 64, 32, or 0 for none.

    Raises
    ------
    ValueError
        For a value that breaks these rules.
    """

    address: int
    element: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        if self.element not in ELEMENTS and not self.padded:
            raise ValueError(
                f"`element` must be one of {', '.join(ELEMENTS)}, {PADDED}; got {self.element!r}"
            )
        if self.swizzle not in SWIZZLES:
            raise ValueError(f"`swizzle` must be one of 128, 64, 32, 0; got {self.swizzle!r}")
        rank = len(self.shape)
        if not 1 <= rank <= 5 or len(self.box) != rank or len(self.strides) != rank - 1:
            raise ValueError(
                "a tensor map has 1 to 5 dimensions, a box extent for each and a stride for each "
                f"but the innermost; got shape {self.shape}, box {self.box}, strides {self.strides}"
            )
        if self.address % 16 or not 0 <= self.address < 1 << 64:
            raise ValueError(f"`address` must be a multiple of 16; got {self.address:#x}")
        if not all(1 <= extent <= 1 << 32 for extent in self.shape):
            raise ValueError(f"`shape` must be of extents from 1 to 2^32; got {self.shape}")
        if not all(stride % 16 == 0 and 0 <= stride < 1 << 40 for stride in self.strides):
            raise ValueError(f"`strides` must be multiples of 16 below 2^40; got {self.strides}")
        if not all(1 <= extent <= 256 for extent in self.box):
            raise ValueError(f"`box` must be of extents from 1 to 256; got {self.box}")
        if self.padded:
            self._check_padded()
            return
        inner = self.box[0] * self.itemsize
        if inner % 16 or (self.swizzle and inner != self.swizzle):
            needed = self.swizzle or "a multiple of 16"
            raise ValueError(f"the innermost extent of `box` must be {needed} bytes; got {inner}")

    def _check_padded(self) -> None:
        if self.shape[0] % 128 or self.box[0] != 128 or self.swizzle not in (0, 128):
            raise ValueError(
                f"with {PADDED} the innermost extent must be a multiple of 128, that of `box` 128, "
                f"`swizzle` 128 or 0; got {self.shape[0]}, {self.box[0]}, {self.swizzle}"
            )
        if self.address % 32 or any(stride % 32 for stride in self.strides):
            raise ValueError(
                f"with {PADDED} `address` and `strides` must be multiples of 32; got "
                f"{self.address:#x}, {self.strides}"
            )

    @property
    def padded(self) -> bool:
        """Whether elements are spread as `PADDED` says."""
        return self.element == PADDED

    @property
    def itemsize(self) -> int:
        """Bytes of an element in shared memory."""
        return 1 if self.padded else ELEMENTS[self.element][1]

    @property
    def shared_bytes(self) -> int:
        """Bytes that a box takes in shared memory."""
        nbytes = self.itemsize
        for extent in self.box:
            nbytes *= extent
        return nbytes

    @property
    def box_bytes(self) -> int:
        """Bytes that a load of a box counts at its mbarrier: those of global memory."""
        return self.shared_bytes // 2 if self.padded else self.shared_bytes

    @property
    def alignment(self) -> int:
        """What the shared address of a box must be a multiple of: 128, or 8 rows of a swizzle."""
        return max(128, 8 * self.swizzle)

    def pieces(self, place: tuple[int, ...], shared: int) -> list[tuple[int, int | None, int]]:
        """Where the bytes of the box at `place` are.

        Returns
        -------
        list of (shared address, global address or None outside of the tensor, bytes)
            The undefined bytes of a padded map are in none of them.
        """
        if self.padded:
            return self._padded_pieces(place, shared)
        size = self.itemsize
        inner = self.box[0] * size
        # Bytes of a row that lie inside of the tensor.
        low = min(max(-place[0], 0), self.box[0]) * size
        high = min(max(self.shape[0] - place[0], 0), self.box[0]) * size
        chunk = 16 if self.swizzle else inner
        found: list[tuple[int, int | None, int]] = []
        for row, (inside, base) in enumerate(self._rows(place)):
            base += place[0] * size
            for first in range(0, inner, chunk):
                cuts = sorted({first, *(c for c in (low, high) if first < c < first + chunk)})
                for begin, end in itertools.pairwise([*cuts, first + chunk]):
                    there = inside and low <= begin and end <= high
                    target = swizzled(shared + row * inner + begin, self.swizzle)
                    found.append((target, base + begin if there else None, end - begin))
        return found

    def _rows(self, place: tuple[int, ...]) -> Iterator[tuple[bool, int]]:
        """For each row of the box: whether it is inside, and where its element 0 is."""
        outer = [range(extent) for extent in reversed(self.box[1:])]
        for index in itertools.product(*outer):
            at = [start + step for start, step in zip(place[1:], reversed(index), strict=True)]
            inside = all(
                0 <= where < extent for where, extent in zip(at, self.shape[1:], strict=True)
            )
            steps = sum(where * stride for where, stride in zip(at, self.strides, strict=True))
            yield inside, self.address + steps

    def _padded_pieces(
        self, place: tuple[int, ...], shared: int
    ) -> list[tuple[int, int | None, int]]:
        found: list[tuple[int, int | None, int]] = []
        within = 0 <= place[0] < self.shape[0]
        for row, (inside, base) in enumerate(self._rows(place)):
            for chunk in range(8):
                target = swizzled(shared + row * 128 + 16 * chunk, self.swizzle)
                source = base + place[0] // 2 + 8 * chunk
                found.append((target, source if inside and within else None, 8))
        return found


def encode(tensor: TensorMap) -> bytes:
    """Return the 128 bytes of a map for the simulated machine."""
    rank = len(tensor.shape)
    number = _PADDED_NUMBER if tensor.padded else ELEMENTS[tensor.element][0]
    word = rank - 1 << 4 | number << 7 | SWIZZLES[tensor.swizzle] << 13
    strides = [stride >> 4 for stride in tensor.strides] + [0] * (5 - rank)
    high = sum((stride >> 32) << (4 * at) for at, stride in enumerate(strides))
    sizes = [extent - 1 for extent in tensor.shape] + [0] * (5 - rank)
    box = [extent - 1 for extent in tensor.box] + [0] * (5 - rank)
    data = struct.pack(
        "<QI4II5I3x5B",
        tensor.address,
        word,
        *(stride & 0xFFFFFFFF for stride in strides),
        high,
        *sizes,
        *box,
    )
    return data.ljust(112, b"\0") + _MARK


def decode(data: bytes, address: int | None = None) -> TensorMap:
    """Return what a map of :func:`encode` says.

    Raises
    ------
    nvfp4.sim.InvalidDescriptor
        It is none, or breaks a rule.
    """
    from ..sim import InvalidDescriptor

    if len(data) != 128 or data[112:] != _MARK:
        raise InvalidDescriptor(
            "no tensor map of the simulated machine (nvfp4.ptx.tensor_map.encode) is here",
            address=address,
        )
    start, word, *rest = struct.unpack_from("<QI4II5I3x5B", data)
    rank = (word >> 4 & 7) + 1
    names = {number: name for name, (number, _) in ELEMENTS.items()} | {_PADDED_NUMBER: PADDED}
    widths = {number: width for width, number in SWIZZLES.items()}
    low, high, sizes, box = rest[:4], rest[4], rest[5:10], rest[10:15]
    strides = [(part | (high >> (4 * at) & 15) << 32) << 4 for at, part in enumerate(low)]
    unknown = word & ~(7 << 4 | 15 << 7 | 3 << 13)
    try:
        if unknown or (word >> 7 & 15) not in names:
            raise ValueError(f"the word {word:#x} has bits that mean nothing here")
        return TensorMap(
            start,
            names[word >> 7 & 15],
            tuple(extent + 1 for extent in sizes[:rank]),
            tuple(strides[: max(rank - 1, 0)]),
            tuple(extent + 1 for extent in box[:rank]),
            widths[word >> 13 & 3],
        )
    except ValueError as error:
        raise InvalidDescriptor(f"a tensor map that says: {error}", address=address) from error


def encode_on_card(tensor: TensorMap) -> bytes:
    """Return the 128 bytes of a map for the card, made by the driver.

    Raises
    ------
    nvfp4.errors.ToolchainError
        There is no driver.
    RuntimeError
        The driver refuses the map.
    """
    from cuda.bindings import driver as cuda

    from ..driver import check, driver

    driver()
    kinds = cuda.CUtensorMapDataType
    kind = getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{_DRIVER_NAMES[tensor.element]}")
    swizzle: Any = cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE
    if tensor.swizzle:
        name = f"CU_TENSOR_MAP_SWIZZLE_{tensor.swizzle}B"
        swizzle = getattr(cuda.CUtensorMapSwizzle, name)
    rank = len(tensor.shape)
    made = check(
        cuda.cuTensorMapEncodeTiled(
            kind,
            rank,
            tensor.address,
            [cuda.cuuint64_t(extent) for extent in tensor.shape],
            # One stride at least: the driver refuses an empty list, though it needs none of rank 1.
            [cuda.cuuint64_t(stride) for stride in tensor.strides or (16,)],
            [cuda.cuuint32_t(extent) for extent in tensor.box],
            [cuda.cuuint32_t(1)] * rank,
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "encoding a tensor map",
    )
    return struct.pack("<16Q", *(int(part) for part in made.opaque))
