"""The work of the demonstration, and what is measured: size, error, time; and the simulated slice.

One job: each token's row goes to two of six experts; rows and experts are quantised to one format
and multiplied by the public functions. It runs where the arrays are: NumPy arrays in the golden
model, CuPy arrays on the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nvfp4

from ..formats import block_format
from ..golden import element_scale_product
from .model import Model, Routing

__all__ = ["Measured", "Place", "Simulated", "find_place", "measure", "simulate_slice"]

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Place:
    """Where the arrays live: how to bring them there and back, and how to wait for the work."""

    name: str
    bring: Callable[[Any], Any]
    fetch: Callable[[Any], Any]
    wait: Callable[[], None]
    repeats: int  # timed runs; the median counts
    gpu: bool


@dataclass(frozen=True)
class Measured:
    """One format: bytes of the experts, signal to quantisation noise in dB, seconds."""

    format: str
    weight_bytes: int
    bfloat16_bytes: int
    weights_db: float
    rows_db: float
    product_db: float
    expert_db: list[float]  # of the product, by expert
    quantize_seconds: float  # the routed rows
    product_seconds: float
    errors: Floats  # |error| of each output / rms of the outputs
    where: str
    bytes_compared: int  # on a GPU: quantised bytes, against the golden model's; else 0
    bytes_equal: int

    @property
    def ratio(self) -> float:
        """Bytes against bfloat16."""
        return self.weight_bytes / self.bfloat16_bytes

    @property
    def good(self) -> bool:
        """Whether the GPU, if one was used, gave the golden model's bytes."""
        return self.bytes_equal == self.bytes_compared


@dataclass(frozen=True)
class Simulated:
    """A slice of the job in the simulated kernels, against the golden model."""

    format: str
    arch: str
    rows: int
    columns: int
    depth: int
    bytes_compared: int
    bytes_equal: int
    outputs: int
    exact: int  # outputs whose sum is exact in any order: these must be the same bytes
    exact_equal: int
    within_bound: bool  # the other outputs: within the rounding error of a float32 sum
    seconds: float

    @property
    def good(self) -> bool:
        """Whether everything that must be equal is."""
        return (
            self.bytes_equal == self.bytes_compared
            and self.exact_equal == self.exact
            and self.within_bound
        )


def find_place(cpu: bool = False) -> Place:
    """Return the GPU if CuPy is installed and sees one, else NumPy."""
    if not cpu:
        try:
            import cupy

            properties = cupy.cuda.runtime.getDeviceProperties(0)
        except Exception:  # not installed, no driver, no device: each has its own error
            pass
        else:
            name = properties["name"].decode()
            return Place(
                f"{name}, {cupy.__name__} {cupy.__version__}",
                cupy.asarray,
                cupy.asnumpy,
                lambda: cupy.cuda.get_current_stream().synchronize(),
                repeats=20,
                gpu=True,
            )
    return Place("NumPy golden model", np.asarray, np.asarray, lambda: None, 1, gpu=False)


def encode_scales(model: Model, fmt: str) -> tuple[Any, Any]:
    """Return the encode scales of rows (a number) and of the experts ([E]): 2688 / amax, or none.

    Only nvfp4 has a second level of scales. That of the rows is what a calibration would store.
    """
    if fmt != "nvfp4":
        return None, None
    top = np.float32(2688.0)  # 6 (largest e2m1) * 448 (largest e4m3)
    return (
        float(top / np.abs(model.rows).max()),
        (top / np.abs(model.experts).max(axis=(1, 2))).astype(np.float32),
    )


def measure(model: Model, routing: Routing, fmt: str, place: Place) -> Measured:
    """Quantise rows and experts to `fmt`, multiply, and compare with the unquantised product."""
    quantize_weights, quantize_rows = _quantizers(model, routing, fmt, place.bring)
    weights = quantize_weights()
    quantize_seconds, rows = _timed(quantize_rows, place)
    offsets = place.bring(routing.row_offsets)
    product_seconds, out = _timed(
        lambda: nvfp4.grouped_matmul(rows, weights, row_offsets=offsets, out_dtype="float32"), place
    )

    compared = equal = 0
    if place.gpu:
        golden = [quantize() for quantize in _quantizers(model, routing, fmt, np.asarray)]
        compared, equal = _count_equal(golden, [weights, rows], place.fetch)

    routed = model.rows[routing.row_indices]
    wanted = _product(routed, model.experts, routing)
    got = place.fetch(out)
    bounds = list(zip(routing.row_offsets[:-1], routing.row_offsets[1:], strict=True))
    return Measured(
        format=fmt,
        weight_bytes=sum(a.nbytes for a in (weights.codes, weights.scales, weights.decode_scale)),
        bfloat16_bytes=2 * model.experts.size,
        weights_db=_db(model.experts, place.fetch(weights.dequantize())),
        rows_db=_db(routed, place.fetch(rows.dequantize())),
        product_db=_db(wanted, got),
        expert_db=[_db(wanted[a:b], got[a:b]) for a, b in bounds if b > a],
        quantize_seconds=quantize_seconds,
        product_seconds=product_seconds,
        errors=(np.abs(got - wanted) / np.sqrt(np.mean(wanted**2))).ravel().astype(np.float32),
        where=place.name,
        bytes_compared=compared,
        bytes_equal=equal,
    )


def _quantizers(
    model: Model, routing: Routing, fmt: str, bring: Callable[[Any], Any]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what quantises the experts and what gathers and quantises the rows."""
    x, w = bring(model.rows), bring(model.experts)
    offsets, indices = bring(routing.row_offsets), bring(routing.row_indices)
    x_scale, w_scale = encode_scales(model, fmt)
    w_scale = None if w_scale is None else bring(w_scale)
    return (
        lambda: nvfp4.quantize(w, fmt, encode_scale=w_scale),
        lambda: nvfp4.grouped_quantize(
            x, fmt, row_offsets=offsets, row_indices=indices, encode_scale=x_scale
        ),
    )


def _count_equal(
    golden: list[Any], others: list[Any], fetch: Callable[[Any], Any] = np.asarray
) -> tuple[int, int]:
    """Bytes of the golden QTensors, and how many of them the others have too."""
    compared = equal = 0
    for one, other in zip(golden, others, strict=True):
        for part in ("codes", "scales", "decode_scale"):
            wanted = np.atleast_1d(getattr(one, part)).view(np.uint8)
            got = np.atleast_1d(fetch(getattr(other, part))).view(np.uint8)
            compared += wanted.size
            equal += int(np.count_nonzero(wanted == got)) if wanted.shape == got.shape else 0
    return compared, equal


def _timed(work: Callable[[], Any], place: Place) -> tuple[float, Any]:
    """Median seconds of `work`, and what it returned; the first of several runs is not counted."""
    seconds = []
    for _ in range(place.repeats + (place.repeats > 1)):
        place.wait()
        start = time.perf_counter()
        result = work()
        place.wait()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[-place.repeats :])), result


def _product(routed: Floats, experts: Floats, routing: Routing) -> Doubles:
    """Return the grouped product in float64: the signal."""
    out = np.zeros((len(routed), experts.shape[1]))
    for expert, (a, b) in enumerate(
        zip(routing.row_offsets[:-1], routing.row_offsets[1:], strict=True)
    ):
        out[a:b] = routed[a:b].astype(np.float64) @ experts[expert].astype(np.float64).T
    return out


def _db(signal: NDArray[Any], got: NDArray[Any]) -> float:
    """Signal-to-quantisation-noise ratio in dB."""
    signal = signal.astype(np.float64)
    noise = np.sum((got.astype(np.float64) - signal) ** 2)
    return float("inf") if noise == 0 else float(10 * np.log10(np.sum(signal**2) / noise))


def simulate_slice(
    model: Model, routing: Routing, fmt: str, *, arch: str = "sm_90a", rows: int = 4
) -> Simulated:
    """Run a corner of the job in the golden model and in the simulated kernels, and compare.

    The corner: the first `rows` rows of the first two experts, and of these experts the first 32
    columns of the product and 128 of the sum.
    """
    columns, depth = min(32, model.experts.shape[1]), min(128, model.experts.shape[2])
    ranges = [
        routing.row_indices[a : min(a + rows, b)]
        for a, b in zip(routing.row_offsets[:2], routing.row_offsets[1:3], strict=True)
    ]
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in ranges])]).astype(np.int32)
    corner = Model(
        model.name,
        np.ascontiguousarray(model.experts[:2, :columns, :depth]),
        np.ascontiguousarray(model.rows[:, :depth]),
    )
    corner_routing = Routing(np.concatenate(ranges), offsets)

    def work() -> tuple[Any, Any, NDArray[np.float32]]:
        weights, a = (q() for q in _quantizers(corner, corner_routing, fmt, np.asarray))
        out = nvfp4.grouped_matmul(a, weights, row_offsets=offsets, out_dtype="float32")
        return weights, a, out

    golden_w, golden_a, golden_out = work()
    start = time.perf_counter()
    with nvfp4.simulate(arch=arch):
        simulated_w, simulated_a, simulated_out = work()
    seconds = time.perf_counter() - start
    compared, equal = _count_equal([golden_w, golden_a], [simulated_w, simulated_a])

    exact, bound = _exact_sums(golden_a, golden_w, offsets)
    same = golden_out.view(np.uint32) == simulated_out.view(np.uint32)
    same |= (golden_out == 0) & (simulated_out == 0)  # the sign of a zero is unspecified
    close = np.abs(golden_out.astype(np.float64) - simulated_out.astype(np.float64)) <= bound
    return Simulated(
        format=fmt,
        arch=arch,
        rows=len(corner_routing.row_indices),
        columns=columns,
        depth=depth,
        bytes_compared=compared,
        bytes_equal=equal,
        outputs=golden_out.size,
        exact=int(exact.sum()),
        exact_equal=int((exact & same).sum()),
        within_bound=bool(np.all(close | same)),
        seconds=seconds,
    )


def _exact_sums(
    rows: Any, weights: Any, offsets: NDArray[np.int32]
) -> tuple[NDArray[np.bool_], Doubles]:
    """Which outputs have a sum that float32 gives exactly in any order, and a bound for the others.

    All terms are multiples of one power of two, u (the lowest bit that any of them has). If
    the sum of their magnitudes is at most 2^24 u, no partial sum in any order needs rounding.
    Otherwise two sums of K terms differ by at most 2 K 2^-23 of that sum (each addition may round
    towards zero, as matrix units do).
    """
    fmt = block_format(rows.format)
    a = element_scale_product(
        rows.codes,
        rows.scales,
        fmt,
        shape=rows.shape,
        scale_layout=rows.scale_layout,
        row_offsets=offsets,
        tile_starts=rows.tile_starts,
    ).astype(np.float64)
    b = element_scale_product(
        weights.codes, weights.scales, fmt, shape=weights.shape, scale_layout=weights.scale_layout
    ).astype(np.float64)
    expert = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    terms = a[:, None, :] * b[expert]  # exact in float64
    mantissa, exponent = np.frexp(terms)
    bits = (mantissa * 2.0**53).astype(np.int64)
    lowest = np.ldexp((bits & -bits).astype(np.float64), exponent - 53)
    lowest[terms == 0] = np.inf
    total = np.abs(terms).sum(axis=-1)
    exact = total <= lowest.min(axis=-1) * 2.0**24
    scale = np.abs(np.broadcast_to(rows.decode_scale, len(offsets) - 1).astype(np.float64))
    scale = scale * np.broadcast_to(weights.decode_scale, len(offsets) - 1)
    return exact, 2 * terms.shape[-1] * 2.0**-23 * total * scale[expert][:, None]
