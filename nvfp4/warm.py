"""Which programs a list of calls needs, found by making the calls without running anything.

``nvfp4 compile --shapes FILE`` fills a cache before a server starts. FILE is a JSON list of calls::

    [
      {"call": "quantize", "format": "nvfp4", "shape": [4096, 7168], "encode_scale": "row_amax"},
      {"call": "matmul", "a": "bfloat16", "b": "mxfp4", "m": [1, 8, 512], "n": 5760, "k": 2880},
      {"call": "grouped_matmul", "a": "bfloat16", "b": "mxfp4", "m": [4, 64], "n": 5760,
       "k": 2880, "experts": 32}
    ]

A value that is a list (but for ``shape``) stands for each of its items in turn. Each call is then
made by the public function of that name, on memory that is reserved and never touched, and on a
machine that notes what it is told to launch. So what is built is what the same call on a GPU asks
for.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import api, arrays, epilogues
from .formats import FORMATS, block_format
from .launch import Launch
from .layouts import allocated_tiles, codes_shape, scale_k_tiles, scale_shape
from .program import Program
from .sim import machine as _machine
from .tensor import QTensor

__all__ = ["CALLS", "expand", "operand", "programs", "read_shapes", "ready_epilogue", "recording"]


class _Recorder(_machine.Machine):
    """A machine that runs nothing, and notes every launch."""

    def __init__(self, arch: str, card: tuple[str, int] | None = None) -> None:
        super().__init__(arch)
        self.launches: list[Launch] = []
        if card is not None:
            self.card = card
            self.processors = card[1]

    def record(self, launch: Launch) -> None:
        """Note a launch."""
        self.launches.append(launch)


@contextlib.contextmanager
def recording(arch: str, card: tuple[str, int] | None = None) -> Iterator[list[Launch]]:
    """Note what calls on host arrays launch, and run nothing; results have no memory either.

    Parameters
    ----------
    arch
        Such as ``"sm_90a"``.
    card
        Name and multiprocessors of the card to plan for; None: an H200 without a table.
    """
    recorder = _Recorder(arch, card)
    token, memory = _machine._machine.set(recorder), arrays.host_memory.set(_reserved)
    try:
        yield recorder.launches
    finally:
        arrays.host_memory.reset(memory)
        _machine._machine.reset(token)


def read_shapes(file: Path) -> list[dict[str, Any]]:
    """The calls in a file, alternatives multiplied out.

    Raises
    ------
    ValueError
        The file is no JSON, or not a list of calls; the message says which entry is wrong.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{file} must have a list of calls, each an object")
    calls = []
    for number, entry in enumerate(entries, 1):
        try:
            calls += expand(entry)
        except ValueError as error:
            raise ValueError(f"{file}, call {number}: {error}") from error
    return calls


def expand(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One call for each combination of the values that are lists.

    Raises
    ------
    ValueError
        No such call, or an option that it does not have, or lacks.
    """
    name = entry.get("call")
    if name not in CALLS:
        raise ValueError(f"call must be one of {', '.join(CALLS)}; got {name!r}")
    options = inspect.signature(CALLS[name]).parameters
    for key in entry:
        if key not in options and key != "call":
            raise ValueError(f"{name} takes {', '.join(options)}; got {key!r}")
    for key, parameter in options.items():
        if parameter.default is parameter.empty and key not in entry:
            raise ValueError(f"{name} needs {key}")
    alternatives = [
        value if isinstance(value, list) and key != "shape" else [value]
        for key, value in entry.items()
    ]
    return [dict(zip(entry, values, strict=True)) for values in itertools.product(*alternatives)]


def programs(
    calls: Iterable[Mapping[str, Any]], arch: str, card: tuple[str, int] | None = None
) -> list[Program]:
    """The programs that calls need on an architecture, each once.

    Parameters
    ----------
    calls
        From :func:`read_shapes`.
    arch
        Such as ``"sm_90a"``.
    card
        Name and multiprocessors of the card, as in :func:`recording`.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        What the call itself raises, with a note of which it was.
    """
    found: dict[Program, None] = {}
    for call in calls:
        options = dict(call)
        with recording(arch, card) as launches:
            try:
                CALLS[options.pop("call")](**options)
            except Exception as error:
                error.add_note(f"in the call {json.dumps(call)}")
                raise
        for launch in launches:
            if not launch.empty:
                found |= dict.fromkeys(launch.programs)
    return list(found)


# --- arrays that nobody reads ---------------------------------------------------------------------


def _array(shape: Iterable[int], dtype: str) -> np.ndarray:
    return _reserved(tuple(shape), arrays.numpy_dtype(dtype))


def _reserved(shape: tuple[int, ...], kind: np.dtype[Any]) -> np.ndarray:
    """Addresses, aligned as by a GPU's allocator, with no memory behind them."""
    size = math.prod(shape) * kind.itemsize
    # Pages that cannot be written cost the system nothing, so there may be more than it has.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, max(size, 1), flags=flags, prot=mmap.PROT_READ)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"an array of shape {shape} of {kind} is larger than there are addresses for"
        ) from error
    return np.frombuffer(pages, np.uint8, size).view(kind).reshape(shape)


def _offsets(rows: int, groups: int, dtype: str) -> np.ndarray:
    return np.linspace(0, rows, groups + 1).astype(dtype)


def _scale(value: Any, count: int) -> Any:
    """An encode scale or alpha: None, a number, a word, "array" (of one) or "by_expert"."""
    if value == "array":
        return np.ones((), np.float32)
    return np.ones(count, np.float32) if value == "by_expert" else value


def _qtensor(
    format: str,
    shape: tuple[int, ...],
    scale_layout: str,
    offsets: np.ndarray | None = None,
    decode_scale: Any = None,
) -> QTensor:
    fmt = block_format(format)
    scales = scale_shape(fmt, shape, scale_layout)
    if offsets is not None and scale_layout == "tcgen":
        tiles = allocated_tiles(shape[0], len(offsets) - 1)
        scales = (tiles, scale_k_tiles(shape[-1] // fmt.block), 32, 4, 4)
    return QTensor.from_parts(
        _array(codes_shape(fmt, shape, scale_layout), "uint8"),
        _array(scales, "uint8"),
        fmt,
        shape=shape,
        scale_layout=scale_layout,
        groups=offsets,
        decode_scale=decode_scale,
    )


def operand(
    kind: str,
    shape: tuple[int, ...],
    scale_layout: str,
    offsets: np.ndarray | None = None,
    decode_scale: Any = None,
) -> Any:
    """A QTensor where `kind` is a format, else an array of that dtype."""
    if kind in FORMATS or kind == "mxfp8":
        return _qtensor(kind, shape, scale_layout, offsets, decode_scale)
    return _array(shape, kind)


def ready_epilogue(name: str | None) -> Any:
    """An epilogue of the package by its name."""
    if name is None:
        return None
    if name not in ("relu2", "swiglu"):
        raise ValueError(f"epilogue must be null, relu2 or swiglu; got {name!r}")
    return getattr(epilogues, name)()


# --- calls ----------------------------------------------------------------------------------------


def _quantize(
    format: str,
    shape: list[int],
    dtype: str = "bfloat16",
    encode_scale: Any = None,
    scale_rounding: str = "rceil",
    scale_layout: str = "tcgen",
    row_counts: bool = False,
    index_dtype: str = "int32",
) -> None:
    api.quantize(
        _array(shape, dtype),
        format,
        encode_scale=_scale(encode_scale, shape[0]),
        scale_rounding=scale_rounding,
        scale_layout=scale_layout,
        row_counts=np.zeros(shape[0], index_dtype) if row_counts else None,
    )


def _grouped_quantize(
    format: str,
    shape: list[int],
    groups: int,
    dtype: str = "bfloat16",
    index_dtype: str = "int32",
    expert_ids: bool = False,
    row_indices: int = 0,
    encode_scale: Any = None,
    scale_rounding: str = "rceil",
    scale_layout: str = "tcgen",
) -> None:
    rows = row_indices or shape[0]
    api.grouped_quantize(
        _array(shape, dtype),
        format,
        row_offsets=_offsets(rows, groups, index_dtype),
        expert_ids=np.arange(groups, dtype=index_dtype) if expert_ids else None,
        row_indices=np.zeros(rows, index_dtype) if row_indices else None,
        encode_scale=_scale(encode_scale, groups),
        scale_rounding=scale_rounding,
        scale_layout=scale_layout,
    )


def _fused_options(
    shape: list[int],
    groups: int,
    index_dtype: str,
    expert_ids: bool,
    row_indices: int,
    row_counts: bool,
    encode_scale: Any,
) -> dict[str, Any]:
    """Keyword arguments that fused quantisers share; groups: 0 for a dense call."""
    options: dict[str, Any] = {"encode_scale": _scale(encode_scale, groups or shape[0])}
    if row_counts:
        options["row_counts"] = np.zeros(shape[0], index_dtype)
    if groups:
        rows = row_indices or shape[0]
        options["row_offsets"] = _offsets(rows, groups, index_dtype)
        if expert_ids:
            options["expert_ids"] = np.arange(groups, dtype=index_dtype)
        if row_indices:
            options["row_indices"] = np.zeros(rows, index_dtype)
    return options


def _swiglu_quantize(
    format: str,
    shape: list[int],
    halves: str = "split",
    kind: str = "silu",
    dtype: str = "bfloat16",
    groups: int = 0,
    index_dtype: str = "int32",
    expert_ids: bool = False,
    row_indices: int = 0,
    row_counts: bool = False,
    encode_scale: Any = None,
    scale_rounding: str = "rceil",
    scale_layout: str = "tcgen",
) -> None:
    api.swiglu_quantize(
        _array(shape, dtype),
        format,
        halves=halves,
        kind=kind,
        scale_rounding=scale_rounding,
        scale_layout=scale_layout,
        **_fused_options(
            shape, groups, index_dtype, expert_ids, row_indices, row_counts, encode_scale
        ),
    )


def _rmsnorm_quantize(
    format: str,
    shape: list[int],
    eps: float = 1e-5,
    dtype: str = "bfloat16",
    weight_dtype: str | None = None,
    residual: bool = False,
    norm_out: bool = False,
    groups: int = 0,
    index_dtype: str = "int32",
    expert_ids: bool = False,
    row_indices: int = 0,
    row_counts: bool = False,
    encode_scale: Any = None,
    scale_rounding: str = "rceil",
    scale_layout: str = "tcgen",
) -> None:
    # Only the way of h and of the sum is wanted: return_hidden allocates what stores them.
    added = _array(shape, dtype) if residual else None
    result = [row_indices, shape[-1]] if groups and row_indices else shape
    api.rmsnorm_quantize(
        _array(shape, dtype),
        _array(shape[-1:], weight_dtype or dtype),
        eps,
        format,
        residual=added,
        residual_out=np.empty(result, arrays.numpy_dtype(dtype)) if residual else None,
        return_hidden=norm_out,
        scale_rounding=scale_rounding,
        scale_layout=scale_layout,
        **_fused_options(
            shape, groups, index_dtype, expert_ids, row_indices, row_counts, encode_scale
        ),
    )


def _dequantize(
    format: str,
    shape: list[int],
    dtype: str = "bfloat16",
    scale_layout: str = "tcgen",
    groups: int = 0,
    index_dtype: str = "int32",
) -> None:
    offsets = _offsets(shape[0], groups, index_dtype) if groups else None
    _qtensor(format, tuple(shape), scale_layout, offsets).dequantize(dtype)


def _interleave_scales(shape: list[int]) -> None:
    api.interleave_scales(_array(shape, "uint8"))


def _deinterleave_scales(shape: list[int]) -> None:
    *lead, rows, blocks = shape
    tiles = (*lead, -(-rows // 128), scale_k_tiles(blocks), 32, 4, 4)
    api.deinterleave_scales(_array(tiles, "uint8"), (rows, blocks))


def _prepared(b: QTensor, prepare: bool) -> QTensor:
    return api.prepare_weights(b) if prepare else b


def _matmul(
    a: str,
    b: str,
    m: int,
    n: int,
    k: int,
    out_dtype: str = "bfloat16",
    alpha: Any = 1.0,
    epilogue: str | None = None,
    scale_layout: str = "tcgen",
    prepared: bool = False,
    compute: str | None = None,
    batch_invariant: bool = False,
) -> None:
    api.matmul(
        operand(a, (m, k), scale_layout),
        _prepared(_qtensor(b, (n, k), scale_layout), prepared),
        alpha=_scale(alpha, 1),
        out_dtype=out_dtype,
        epilogue=ready_epilogue(epilogue),
        compute=compute,
        batch_invariant=batch_invariant,
    )


def _grouped_matmul(
    a: str,
    b: str,
    m: int,
    n: int,
    k: int,
    experts: int,
    groups: int = 0,
    index_dtype: str = "int32",
    expert_ids: bool = False,
    row_indices: int = 0,
    row_counts: bool = False,
    out_dtype: str = "bfloat16",
    alpha: Any = None,
    epilogue: str | None = None,
    scale_layout: str = "tcgen",
    prepared: bool = False,
    compute: str | None = None,
    batch_invariant: bool = False,
    a_decode_scale: Any = None,
    b_decode_scale: Any = None,
) -> None:
    groups = groups or experts
    ranges: dict[str, Any]
    if row_counts:
        left = operand(a, (experts, m, k), scale_layout)
        ranges = {"row_counts": np.zeros(experts, index_dtype)}
    else:
        offsets = _offsets(row_indices or m, groups, index_dtype)
        own = None if row_indices else offsets  # rows that are gathered have no ranges of their own
        left = operand(a, (m, k), scale_layout, own, _scale(a_decode_scale, groups))
        ranges = {
            "row_offsets": offsets,
            "expert_ids": np.arange(groups, dtype=index_dtype) if expert_ids else None,
            "row_indices": np.zeros(row_indices, index_dtype) if row_indices else None,
        }
    api.grouped_matmul(
        left,
        _prepared(
            _qtensor(b, (experts, n, k), scale_layout, None, _scale(b_decode_scale, experts)),
            prepared,
        ),
        **ranges,
        alpha=_scale(alpha, experts),
        out_dtype=out_dtype,
        epilogue=ready_epilogue(epilogue),
        compute=compute,
        batch_invariant=batch_invariant,
    )


def _quantize_rows(dtype: str, shape: list[int]) -> None:
    api.quantize_rows(_array(shape, dtype))


def _prepare_weights(format: str, shape: list[int], scale_layout: str = "tcgen") -> None:
    _prepared(_qtensor(format, tuple(shape), scale_layout), True)


#: Name in a file of shapes -> what makes the call; its parameters are the options of the call.
CALLS: dict[str, Callable[..., None]] = {
    "quantize": _quantize,
    "quantize_rows": _quantize_rows,
    "grouped_quantize": _grouped_quantize,
    "swiglu_quantize": _swiglu_quantize,
    "rmsnorm_quantize": _rmsnorm_quantize,
    "dequantize": _dequantize,
    "interleave_scales": _interleave_scales,
    "deinterleave_scales": _deinterleave_scales,
    "prepare_weights": _prepare_weights,
    "matmul": _matmul,
    "grouped_matmul": _grouped_matmul,
}
