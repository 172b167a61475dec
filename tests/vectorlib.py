"""The committed test vectors as typed objects, for every room's tests.

``cases("quantize")`` gives all cases of an operation, in the order of the files; a case is a
dataclass whose fields are arrays and descriptors instead of names. ``tests/vectors/README.md``
says what they mean. As a parameter of a test, with its file and name as the id::

    @pytest.mark.parametrize("case", cases("quantize"), ids=str)
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from nvfp4.formats import BlockFormat, block_format

VECTORS = Path(__file__).parent / "vectors"
_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


@dataclass(frozen=True, eq=False)
class Case:
    """What all cases have: the stem of their file, their place in it, and their name."""

    file: str
    index: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}[{self.index}] {self.name}"


@dataclass(frozen=True, eq=False)
class QuantizeCase(Case):
    format: BlockFormat
    x: np.ndarray  # float32, float16 or ml_dtypes.bfloat16
    scale_rounding: str
    scale_layout: str
    encode_scale: Any  # None, "amax" or numpy.float32
    codes: np.ndarray
    scales: np.ndarray
    decode_scale: np.float32
    encode_scale_of_amax: np.float32 | None  # what "amax" stands for
    labels: np.ndarray | None


@dataclass(frozen=True, eq=False)
class ErrorCase(Case):
    format: BlockFormat
    x: np.ndarray
    error: type[Exception]
    message_contains: str


@dataclass(frozen=True, eq=False)
class DequantizeCase(Case):
    format: BlockFormat
    codes: np.ndarray
    scales: np.ndarray  # linear
    decode_scale: np.float32
    values: np.ndarray
    peer: dict[str, Any] | None  # the other facts of a peer's case, arrays in place of names

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@dataclass(frozen=True, eq=False)
class GroupedQuantizeCase(Case):
    format: BlockFormat
    x: np.ndarray
    row_offsets: np.ndarray
    expert_ids: np.ndarray | None
    row_indices: np.ndarray | None
    encode_scale: np.ndarray | None
    codes: np.ndarray
    scales: np.ndarray  # tcgen
    tile_start: np.ndarray


@dataclass(frozen=True, eq=False)
class PlainOperand:
    """A bfloat16 or float16 operand of a product."""

    x: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape


@dataclass(frozen=True, eq=False)
class QuantizedOperand:
    """A quantised operand; ``grouped`` ones have tcgen scales and encode scales by expert."""

    format: BlockFormat
    codes: np.ndarray
    scales: np.ndarray
    decode_scale: np.float32 | None  # None if grouped: it follows from encode_scale
    encode_scale: Any
    grouped: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * self.format.codes_per_byte)


@dataclass(frozen=True, eq=False)
class MatmulCase(Case):
    a: PlainOperand | QuantizedOperand
    b: QuantizedOperand
    alpha: np.float32
    out_dtype: str
    out: np.ndarray
    abs_sum_bits: int


@dataclass(frozen=True, eq=False)
class GroupedMatmulCase(Case):
    a: PlainOperand | QuantizedOperand
    b: QuantizedOperand
    row_offsets: np.ndarray
    expert_ids: np.ndarray | None
    alpha: np.ndarray | None
    out_dtype: str
    out: np.ndarray
    abs_sum_bits: int


_CLASSES: dict[str, type[Case]] = {
    "quantize": QuantizeCase,
    "error": ErrorCase,
    "dequantize": DequantizeCase,
    "grouped_quantize": GroupedQuantizeCase,
    "matmul": MatmulCase,
    "grouped_matmul": GroupedMatmulCase,
}
_ARRAYS = (
    "codes scales values row_offsets expert_ids row_indices tile_start labels peer_values "
    "global_scale weight_scale_2 gguf_blocks"
).split()


@functools.cache
def cases(op: str) -> tuple[Any, ...]:
    """All cases of an operation, one of the keys of this module's classes."""
    return tuple(case for file in files() for case in _load(file) if type(case) is _CLASSES[op])


def files() -> list[str]:
    """The stems of all vector files."""
    return sorted(path.stem for path in VECTORS.glob("*.npz"))


@functools.cache
def _load(file: str) -> tuple[Case, ...]:
    with np.load(VECTORS / f"{file}.npz") as archive:
        arrays = dict(archive)
    for array in arrays.values():
        array.flags.writeable = False  # cases share arrays: no test may change them
    listed = json.loads(arrays["cases"].tobytes().decode())
    return tuple(_case(file, i, dict(case), arrays) for i, case in enumerate(listed))


def _case(file: str, index: int, case: dict[str, Any], arrays: dict[str, np.ndarray]) -> Case:
    cls = _CLASSES[case.pop("op")]
    case.update({k: arrays[case[k]] for k in _ARRAYS if case.get(k) is not None})
    if "x" in case:
        case["x"] = arrays[case["x"]].view(_DTYPES[case.pop("x_dtype")])
    if "format" in case:
        case["format"] = block_format(case["format"])
    if "decode_scale_bits" in case:
        case["decode_scale"] = _float(case.pop("decode_scale_bits"))
    if cls is QuantizeCase:
        bits = case.pop("encode_scale_bits", None)
        case["encode_scale_of_amax"] = None if bits is None else _float(bits)
        case["encode_scale"] = _number(case["encode_scale"])
        case.setdefault("labels", None)
    elif cls is GroupedQuantizeCase:
        case["encode_scale"] = _named(case["encode_scale"], arrays)
    elif cls is ErrorCase:
        case["error"] = {"ValueError": ValueError, "TypeError": TypeError}[case["error"]]
    elif cls is DequantizeCase:
        own = {field.name for field in fields(DequantizeCase)}
        facts = {k: case.pop(k) for k in list(case) if k not in own}
        case["peer"] = facts or None
    else:
        case["a"], case["b"] = _operand(case["a"], arrays), _operand(case["b"], arrays)
        out = arrays[case["out"]]
        case["out"] = out.view(_DTYPES[case["out_dtype"]])
        named = cls is GroupedMatmulCase
        case["alpha"] = _named(case["alpha"], arrays) if named else np.float32(case["alpha"])
    return cls(file=file, index=index, **case)


def _operand(
    operand: dict[str, Any], arrays: dict[str, np.ndarray]
) -> PlainOperand | QuantizedOperand:
    if operand["kind"] == "array":
        return PlainOperand(arrays[operand["x"]].view(_DTYPES[operand["dtype"]]))
    grouped = operand["kind"] == "grouped"
    scale = operand["encode_scale"]
    return QuantizedOperand(
        format=block_format(operand["format"]),
        codes=arrays[operand["codes"]],
        scales=arrays[operand["scales"]],
        decode_scale=None if grouped else _float(operand["decode_scale_bits"]),
        encode_scale=_named(scale, arrays) if grouped else _number(scale),
        grouped=grouped,
    )


def _named(name: str | None, arrays: dict[str, np.ndarray]) -> np.ndarray | None:
    return None if name is None else arrays[name]


def _number(value: Any) -> Any:
    return np.float32(value) if isinstance(value, (int, float)) else value


def _float(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def same_values(got: np.ndarray, expected: np.ndarray, zero_sign_free: bool = False) -> bool:
    """Whether two float arrays have the same dtype, shape and bytes.

    Free are only which NaN pattern a value has and, if said so, the sign of a zero.
    """
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    unsigned = {2: np.uint16, 4: np.uint32}[got.dtype.itemsize]
    equal = got.view(unsigned) == expected.view(unsigned)
    equal |= np.isnan(got) & np.isnan(expected)
    if zero_sign_free:
        equal |= (got == 0) & (expected == 0)
    return bool(equal.all())
