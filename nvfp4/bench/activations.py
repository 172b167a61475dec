"""What the rows of A are in a benchmark of products, and how they are made and read back.

* bfloat16 or float16, as they are, with a result of the same dtype;
* a block format: quantised as the library does, tcgen scales; rows that a product gathers by
  indices have linear ones, for it takes no others;
* ``fp8``: rows of e4m3 with one scale each, multiplied with ``compute="fp8"``.

Rows are quantised before anything is timed. Each kind may be measured with
``batch_invariant=True`` too, beside the plan that it has without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import api, golden
from ..formats import FORMATS, BlockFormat
from ..tensor import QTensor
from .correct import check_products, largest_error, scale_offsets
from .devices import Device
from .targets import FLOPS, FLOPS_FP8
from .weights import bits_of

__all__ = [
    "BFLOAT16",
    "DTYPES",
    "FP8",
    "KINDS",
    "Activations",
    "Case",
    "Left",
    "cases",
    "chosen_kinds",
]

#: Kinds that are multiplied as they are.
DTYPES = ("bfloat16", "float16")
#: Names of all kinds.
KINDS = (*DTYPES, *FORMATS, "fp8")


def chosen_kinds(activations: Iterable[str] = (), compute: Iterable[str] = ()) -> tuple[str, ...]:
    """The kinds that two options of a command ask for, each once; bfloat16 by default.

    Parameters
    ----------
    activations
        Dtypes and formats of A.
    compute
        "fp8" adds its rows; "bfloat16" is what all the others are multiplied by.
    """
    kinds, compute = list(activations), tuple(compute)
    if not kinds and (not compute or "bfloat16" in compute):
        kinds.append("bfloat16")
    if "fp8" in compute:
        kinds.append("fp8")
    return tuple(dict.fromkeys(kinds))


@dataclass(frozen=True)
class Left:
    """Rows on the card.

    Attributes
    ----------
    a
        First argument of a product.
    more
        Keyword arguments beside it.
    offsets
        On the host, of a QTensor whose ranges start on scale tiles of their own.
    """

    a: Any
    more: dict[str, Any]
    offsets: np.ndarray | None = None


@dataclass(frozen=True)
class Activations:
    """A kind of rows.

    Attributes
    ----------
    name
        One of KINDS.
    """

    name: str

    @property
    def format(self) -> BlockFormat | None:
        """The block format; None of other kinds."""
        return FORMATS.get(self.name)

    @property
    def dtype(self) -> str:
        """Of the rows as they are given or quantised, and of the result."""
        return self.name if self.name in DTYPES else "bfloat16"

    @property
    def suffix(self) -> str:
        """What the label of a shape ends in."""
        if self.name == "bfloat16":
            return ""
        return ", compute fp8" if self.name == "fp8" else f", {self.name} activations"

    def group(self, what: str) -> str:
        """Title of a table, such as ``Dense products, bfloat16 activations``."""
        if self.name == "fp8":
            return f"{what}, e4m3 activations with a scale a row (compute fp8)"
        return f"{what}, {self.name} activations"

    @property
    def bits(self) -> float:
        """Of an element, with its share of the scales."""
        if self.format is not None:
            return bits_of(self.format)
        return 8 if self.name == "fp8" else 16

    def takes(self, weights: BlockFormat) -> bool:
        """Whether there is a product with such weights."""
        return self.name != "fp8" or weights.name in ("mxfp4", "nvfp4")

    def flops(self, weights: BlockFormat) -> float:
        """Operations a second that tensor cores reach on an H200."""
        return FLOPS_FP8 if self.name == "fp8" and weights.name == "mxfp4" else FLOPS

    @property
    def targeted(self) -> bool:
        """Whether the targets of expert layers are asked of it."""
        return self.name not in ("fp8", "float16")

    def dense(self, device: Device, x: Any, *, gathered: bool = False) -> Left:
        """Rows of `x`, [M, K] of this dtype; of a grouped product if its rows are `gathered`."""
        if self.format is not None:
            layout = "linear" if gathered else "tcgen"
            return Left(api.quantize(x, self.name, scale_layout=layout), {})
        if self.name == "fp8":
            codes, scale = api.quantize_rows(x)
            return Left(codes, {"compute": "fp8", "a_scale": scale})
        return Left(x, {})

    def sorted(self, device: Device, x: Any, offsets: Sequence[np.ndarray]) -> list[Left]:
        """Rows of `x` for each of several divisions into ranges."""
        if self.format is None:
            return [self.dense(device, x)] * len(offsets)
        return [
            Left(api.grouped_quantize(x, self.name, row_offsets=device.array(each)), {}, each)
            for each in offsets
        ]

    def values(self, device: Device, left: Left, rows: np.ndarray) -> np.ndarray:
        """The values of some rows, float64, on the host."""
        if isinstance(left.a, QTensor):
            return _values(device, left.a, rows, left.offsets)
        if self.name == "fp8":
            scale = device.rows(left.more["a_scale"], rows).astype(np.float64)
            return golden.decode_e4m3(device.rows(left.a, rows)) * scale
        return device.rows(left.a, rows).astype(np.float64)

    def judged(
        self, device: Device, left: Left, x: Any, rows: np.ndarray, got: np.ndarray, b: np.ndarray
    ) -> tuple[str, str]:
        """What was compared, or ``"WRONG: ..."``; and of ``compute="fp8"`` how exact it is.

        Parameters
        ----------
        left, x
            Rows as they are multiplied, and what they were made of.
        rows
            Which of them.
        got, b
            As ``check_products`` takes them.
        """
        values = self.values(device, left, rows)
        if self.name != "fp8":
            return check_products(got, values, b, bits=11 if self.dtype == "float16" else 8), ""
        lost = largest_error(got, device.rows(x, rows), b)
        own = largest_error(got, values, b)
        note = f"largest error {own:.1e}, to the rows in bfloat16 {lost:.1e}"
        return check_products(got, values, b, fp8=True), note


BFLOAT16, FP8 = Activations("bfloat16"), Activations("fp8")


def _values(device: Device, q: QTensor, rows: np.ndarray, offsets: np.ndarray | None) -> np.ndarray:
    """Element times scale of some rows; their decode scales are 1."""
    fmt = FORMATS[q.format]
    columns = q.shape[-1]
    blocks = columns // fmt.block
    if q.scale_layout == "linear":
        scales = device.rows(q.scales, rows)
    else:
        flat: Any = q.scales
        at = scale_offsets(rows, blocks, offsets)
        scales = device.rows(flat.reshape(-1), at.reshape(-1)).reshape(at.shape)
    made = golden.element_scale_product(
        device.rows(q.codes, rows), scales, fmt, shape=(len(rows), columns), scale_layout="linear"
    )
    return made.astype(np.float64)


@dataclass(frozen=True)
class Case:
    """A kind of rows, with the usual plan or a batch-invariant one."""

    rows: Activations
    invariant: bool = False

    @property
    def suffix(self) -> str:
        """What the label of a shape ends in."""
        return self.rows.suffix + (", batch invariant" if self.invariant else "")

    @property
    def more(self) -> dict[str, Any]:
        """Keyword arguments of the product."""
        plan = {"batch_invariant": True} if self.invariant else {}
        return plan if self.rows.dtype == "bfloat16" else {"out_dtype": self.rows.dtype} | plan

    @property
    def called(self) -> dict[str, Any]:
        """The same, and A, as ``nvfp4 compile --shapes`` takes them."""
        if self.rows.name == "fp8":
            return {"a": "bfloat16", "compute": "fp8"} | self.more
        return {"a": self.rows.name} | self.more


def cases(kinds: Iterable[str], invariant: bool) -> Iterator[Case]:
    """All that is to be measured of a shape; a batch-invariant plan after the usual one."""
    for kind in kinds:
        yield Case(Activations(kind))
        if invariant:
            yield Case(Activations(kind), True)
