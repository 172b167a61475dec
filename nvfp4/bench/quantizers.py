"""The suite ``quantize``: every quantiser at every shape, beside a copy; the host's time.

nvfp4 is measured with its encode scale in memory, as a model's is (``nvfp4``), and without one
(``nvfp4, g = 1``). Bytes are those of the input, the codes and the block scales, without padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .. import api
from ..formats import FORMATS, BlockFormat
from ..layouts import TILE_ROWS, allocated_tiles
from . import fused_quantizers, host_costs
from .correct import check_quantized
from .outputs import outputs
from .report import failed, row
from .run import Options, Pool, Run
from .shapes import DENSE, GROUPED, DenseShape, GroupedShape
from .targets import quantizer_bytes
from .timing import Timing, rotations

__all__ = ["calls", "measure"]

DENSE_GROUP = "Quantisers, bfloat16 in, tcgen scales"
GROUPED_GROUP = "Grouped quantisers, bfloat16 in, tcgen scales"
ENCODE = 2688.0 / 4.5  # of an input whose largest magnitude is 4.5


@dataclass(frozen=True)
class Variant:
    """A format as it is called.

    Attributes
    ----------
    fmt
    scaled
        With an encode scale in memory.
    """

    fmt: BlockFormat
    scaled: bool

    @property
    def label(self) -> str:
        """Of the table."""
        unscaled_nvfp4 = self.fmt.name == "nvfp4" and not self.scaled
        return self.fmt.name + (", g = 1" if unscaled_nvfp4 else "")

    def bytes(self, rows: int, columns: int) -> int:
        """Read and written."""
        return quantizer_bytes(rows, columns, self.fmt.block, self.fmt.codes_per_byte)


def variants(options: Options, names: Iterable[str] = tuple(FORMATS)) -> list[Variant]:
    """The formats that are measured, nvfp4 in both ways."""
    found = []
    for name in options.chosen(tuple(names)):
        fmt = FORMATS[name]
        if name == "nvfp4":
            found.append(Variant(fmt, True))
        found.append(Variant(fmt, False))
    return found


GROUPED_FORMATS = ("nvfp4", "mxfp8_e4m3")


def grouped_variants(options: Options) -> list[Variant]:
    """By default the formats that have a target; others where they are asked for."""
    return variants(options, options.formats or GROUPED_FORMATS)


def buffers(shape: DenseShape | GroupedShape) -> int:
    """Inputs to rotate; the padding of scale tiles goes through the cache too."""
    tiles = allocated_tiles(shape.rows, getattr(shape, "experts", 0))
    moved = shape.rows * shape.columns * 2 + tiles * TILE_ROWS * shape.columns // 32
    return rotations(moved, in_l2=shape.in_l2)


def calls(
    options: Options,
    dense: Iterable[DenseShape] = DENSE,
    grouped: Iterable[GroupedShape] = GROUPED,
    fused: fused_quantizers.Shape | None = fused_quantizers.SHAPE,
) -> list[dict[str, Any]]:
    """What is called, as ``nvfp4 compile --shapes`` takes it."""
    made = []
    for shape in dense:
        if options.wants(shape.label):
            made += [_call(v, shape.rows, shape.columns) for v in variants(options)]
    for group in grouped:
        if not options.wants(group.label):
            continue
        for v in grouped_variants(options):
            made.append(_call(v, group.rows, group.columns, group.experts))
            if not group.decode:
                made.append(_call(v, group.rows, group.columns))
    if fused is not None:
        made += fused_quantizers.calls(options, fused)
    if not options.only or options.wants(host_costs.LABEL):
        made += host_costs.calls()
    return made


def _call(v: Variant, rows: int, columns: int, experts: int = 0) -> dict[str, Any]:
    scale = ("by_expert" if experts else "array") if v.scaled else None
    made: dict[str, Any] = {"call": "quantize", "format": v.fmt.name, "shape": [rows, columns]}
    if experts:
        made |= {"call": "grouped_quantize", "groups": experts}
    return made | ({} if scale is None else {"encode_scale": scale})


# --- measuring ------------------------------------------------------------------------------------


def measure(
    run: Run,
    dense: Iterable[DenseShape] = DENSE,
    grouped: Iterable[GroupedShape] = GROUPED,
    fused: fused_quantizers.Shape | None = fused_quantizers.SHAPE,
) -> None:
    """Measure everything that was asked for, peers last."""
    dense = [s for s in dense if run.options.wants(s.label)]
    grouped = [g for g in grouped if run.options.wants(g.label)]
    shapes: list[DenseShape | GroupedShape] = [*dense, *grouped]
    sizes = [(s.rows * s.columns, buffers(s)) for s in shapes]
    if fused is not None:
        sizes += fused_quantizers.sizes(run.options, fused)
    pool = Pool.for_sizes(run.device, sizes)
    sink = run.device.full((pool.elements,), 0, "bfloat16")
    for shape in dense:
        _measure_dense(run, shape, pool, sink)
        run.device.release()
    for group in grouped:
        _measure_grouped(run, group, pool)
        run.device.release()
    if fused is not None:
        fused_quantizers.measure(run, pool, lambda: _copy_speed(run, fused, pool, sink), fused)
    if not run.options.only or run.options.wants(host_costs.LABEL):
        host_costs.measure(run)
    if run.options.peers:
        from .peers_quantizers import measure_peers

        measure_peers(run, dense, pool)
    run.sort()


def measure_copy(run: Run, rows: int, columns: int, count: int, pool: Pool, sink: Any) -> Timing:
    """A copy of one of `count` matrices."""
    sources = pool.cut(rows, columns, count)
    size = rows * columns
    targets = [sink[i * size : (i + 1) * size].reshape(rows, columns) for i in range(count)]
    copy = run.device.copy
    timing, _ = run.timed([partial(copy, x, y) for x, y in zip(sources, targets, strict=True)])
    if not run.device.equal(sources[-1], targets[-1]):
        raise RuntimeError(f"the copy of {rows} x {columns} gave something else")
    return timing


def _copy_speed(run: Run, shape: fused_quantizers.Shape, pool: Pool, sink: Any) -> float:
    """Bytes a second of a copy of such a matrix, measured once."""
    key = DenseShape(shape.rows, shape.columns)
    if key not in run.references:
        size = shape.rows * shape.columns
        count = min(rotations(2 * size), pool.elements // size)
        copy = measure_copy(run, shape.rows, shape.columns, count, pool, sink)
        run.references[key] = 4 * size / copy.median
    return float(run.references[key])


def _measure_dense(run: Run, shape: DenseShape, pool: Pool, sink: Any) -> None:
    rows, columns, count = shape.rows, shape.columns, buffers(shape)
    if run.late(DENSE_GROUP, shape.label, "", "copy"):
        for v in variants(run.options):
            run.late(DENSE_GROUP, shape.label, v.label, "nvfp4", shape.target(v.fmt.name))
        return
    run.say(f"{shape.label}: copy")
    before = measure_copy(run, rows, columns, count, pool, sink)
    rows_of_shape = []
    for v in variants(run.options):
        run.say(f"{shape.label}: {v.label}")
        try:
            timing, checked = dense_call(run, v, rows, columns, pool, count)
        except Exception as error:  # the other rows are worth having
            target = shape.target(v.fmt.name)
            run.add(failed(DENSE_GROUP, shape.label, v.label, error, target))
            continue
        rows_of_shape.append((v, timing, checked))
    after = measure_copy(run, rows, columns, count, pool, sink)
    copy = min(before, after, key=lambda timing: timing.median)
    copied = 4 * rows * columns
    speed = copied / copy.median
    run.references[shape] = speed
    run.add(row(DENSE_GROUP, shape.label, "bfloat16", "copy", copy, moved=copied, checked="equal"))
    for v, timing, checked in rows_of_shape:
        moved = v.bytes(rows, columns)
        run.add(
            row(
                DENSE_GROUP, shape.label, v.label, "nvfp4", timing, moved=moved,
                references={"copy": moved / speed}, target=shape.target(v.fmt.name),
                checked=checked,
            )
        )  # fmt: skip


def dense_call(
    run: Run, v: Variant, rows: int, columns: int, pool: Pool, count: int
) -> tuple[Timing, str]:
    """Time ``quantize(out=)``, and check it."""
    inputs = pool.cut(rows, columns, count)
    results = outputs(run.device, v.fmt, rows, columns, count)
    encode = np.float32(ENCODE) if v.scaled else None
    on_device = None if encode is None else run.device.array(np.asarray(encode))
    timing, replay = run.timed(
        [
            partial(api.quantize, x, v.fmt.name, encode_scale=on_device, out=q)
            for x, q in zip(inputs, results, strict=True)
        ]
    )
    cases = [(inputs[i], results[i]) for i in (0, -1)]
    checked = check_quantized(
        run.device, replay, cases, encode=None if encode is None else np.asarray(encode)
    )
    return timing, checked


def offsets_of(shape: GroupedShape, seed: int = 0) -> np.ndarray:
    """Row offsets: equal ranges, all rows on one expert, or a handful of routed rows."""
    if shape.skewed:
        counts = np.zeros(shape.experts, np.int64)
        counts[shape.experts // 3] = shape.rows
    elif shape.decode:
        routed = np.random.default_rng(seed).integers(0, shape.experts, shape.rows)
        counts = np.bincount(routed, minlength=shape.experts)
    else:
        counts = np.full(shape.experts, shape.rows // shape.experts)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _measure_grouped(run: Run, shape: GroupedShape, pool: Pool) -> None:
    count = buffers(shape)
    target = shape.target()
    for v in grouped_variants(run.options):
        if run.late(GROUPED_GROUP, shape.label, v.label, "nvfp4", target):
            continue
        run.say(f"{shape.label}: {v.label}")
        try:
            _measure_variant(run, shape, v, pool, count)
        except Exception as error:
            run.add(failed(GROUPED_GROUP, shape.label, v.label, error, target))


def _measure_variant(run: Run, shape: GroupedShape, v: Variant, pool: Pool, count: int) -> None:
    target = shape.target()
    moved = v.bytes(shape.rows, shape.columns)
    references = {}
    if not shape.decode:
        # Skewed or not, the dense call has the same rows: it need not be timed again.
        key = ("dense", v, shape.rows, shape.columns)
        if key not in run.references:
            timing, checked = dense_call(run, v, shape.rows, shape.columns, pool, count)
            run.references[key] = timing.median
            run.add(
                row(
                    GROUPED_GROUP, shape.label, v.label, "dense, same rows", timing,
                    moved=moved, checked=checked,
                )
            )  # fmt: skip
        references["dense"] = run.references[key]
    timing, checked = grouped_call(run, v, shape, pool, count)
    run.add(
        row(
            GROUPED_GROUP, shape.label, v.label, "nvfp4", timing, moved=moved,
            references=references, target=target, checked=checked,
        )
    )  # fmt: skip


def grouped_call(
    run: Run, v: Variant, shape: GroupedShape, pool: Pool, count: int
) -> tuple[Timing, str]:
    """Time ``grouped_quantize(out=)``, and check it."""
    inputs = pool.cut(shape.rows, shape.columns, count)
    host_offsets = offsets_of(shape)
    offsets = run.device.array(host_offsets)
    encode = None
    if v.scaled:
        encode = np.linspace(400, 600, shape.experts, dtype=np.float32)
    on_device = None if encode is None else run.device.array(encode)
    results = outputs(run.device, v.fmt, shape.rows, shape.columns, count, offsets)
    timing, replay = run.timed(
        [
            partial(
                api.grouped_quantize, x, v.fmt.name,
                row_offsets=offsets, encode_scale=on_device, out=q,
            )
            for x, q in zip(inputs, results, strict=True)
        ]
    )  # fmt: skip
    cases = [(inputs[i], results[i]) for i in (0, -1)]
    checked = check_quantized(run.device, replay, cases, encode=encode, row_offsets=host_offsets)
    return timing, checked
