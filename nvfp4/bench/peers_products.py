"""Other libraries' grouped products, where they are installed, timed on the same routings.

* PyTorch: ``torch._grouped_mm`` in bfloat16;
* triton_kernels: ``matmul_ogs`` with MXFP4 weights in its Hopper layouts.

Their rows are sorted beforehand, also of layers whose rows ours gathers. Each is compared with sums
in float32 on sampled rows; the largest difference stands in the table, in units of the largest
result.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .grouped_products import GROUP, MOST_CALLS, Routing, routings
from .peers_quantizers import _installed
from .report import row, skipped
from .run import Run
from .shapes import Layer
from .targets import grouped_floor

__all__ = ["measure_peers"]

#: From a run, a layer and an input's rows to a function of (input, routing) that returns a call, a
#: function of an expert that returns its weights in float32, and bits of a weight.
Peer = Callable[[Run, Layer], "tuple[Callable[[Any, Routing], Callable[[], Any]], Any, float]"]


def peers() -> Iterator[tuple[str, str, Peer]]:
    """Name, format and maker of those that are installed."""
    torch = importlib.import_module("torch")
    if hasattr(torch, "_grouped_mm"):
        yield "torch._grouped_mm", "bfloat16", _grouped_mm
    if _installed("triton_kernels.matmul_ogs"):
        yield "triton_kernels", "mxfp4", _matmul_ogs


def measure_peers(run: Run, wanted: Sequence[tuple[Layer, int]]) -> None:
    """Every peer on every layer, as far as the budget reaches."""
    for name, fmt, make in peers():
        if run.options.formats and fmt != "bfloat16" and fmt not in run.options.formats:
            continue
        for layer in dict.fromkeys(layer for layer, _ in wanted):
            counts = [t for one, t in wanted if one is layer]
            counts = [t for t in counts if not run.late(GROUP, layer.label(t), fmt, name)]
            if not counts:
                continue
            run.say(f"{layer.name}: {name}")
            try:
                bind, values, bits = make(run, layer)
            except Exception as error:  # whatever a peer does, the run goes on and says so
                for t in counts:
                    run.add(skipped(GROUP, layer.label(t), fmt, name, _why(error)))
                continue
            for t in counts:
                if not run.late(GROUP, layer.label(t), fmt, name):
                    _measure(run, layer, t, name, fmt, bind, values, bits)
            del bind, values
            run.device.release()


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _measure(
    run: Run, layer: Layer, tokens: int, name: str, fmt: str, bind: Any, values: Any, bits: float
) -> None:
    rows = tokens * layer.top_k
    x = run.device.random(rows * layer.depth).reshape(rows, layer.depth)
    chosen = routings(tokens, layer.experts, layer.top_k)[:MOST_CALLS]
    try:
        called = [bind(x, routing) for routing in chosen]
        timing, _ = run.timed(called)
        error = _difference(called[0](), x, chosen[0], values)
    except Exception as failure:
        run.add(skipped(GROUP, layer.label(tokens), fmt, name, _why(failure)))
        return
    floor = grouped_floor(
        tokens=tokens, top_k=layer.top_k, columns=layer.columns, depth=layer.depth,
        hit=float(np.mean([r.hit for r in chosen])), bits=bits, gathered=False,
    )  # fmt: skip
    flops = 2.0 * rows * layer.columns * layer.depth
    run.add(
        row(
            GROUP, layer.label(tokens), fmt, name, timing, flops=flops, floor=floor,
            note=f"largest error {error:.1e}",
        )
    )  # fmt: skip


def _difference(result: Any, x: Any, routing: Routing, values: Any) -> float:
    """Largest error on sampled rows, in units of the largest result."""
    result = result.reshape(x.shape[0], -1)
    worst = 0.0
    for r in {0, x.shape[0] // 2, x.shape[0] - 1}:
        expert = int(np.searchsorted(routing.offsets, r, side="right")) - 1
        weights = values(expert)
        exact = weights @ x[r].float()
        got = result[r, : weights.shape[0]].float()
        worst = max(worst, float((got - exact).abs().max() / exact.abs().max()))
    return worst


def _grouped_mm(run: Run, layer: Layer) -> Any:
    torch = importlib.import_module("torch")
    count = layer.experts * layer.columns * layer.depth
    weights = run.device.random(count).reshape(layer.experts, layer.columns, layer.depth)
    transposed = weights.transpose(-2, -1)

    def bind(x: Any, routing: Routing) -> Callable[[], Any]:
        ends = run.device.array(routing.offsets[1:])
        return lambda: torch._grouped_mm(x, transposed, offs=ends)

    return bind, lambda expert: weights[expert].float(), 16.0


def _matmul_ogs(run: Run, layer: Layer) -> Any:
    torch = importlib.import_module("torch")
    ogs = importlib.import_module("triton_kernels.matmul_ogs")
    tensor = importlib.import_module("triton_kernels.tensor")
    layout = importlib.import_module("triton_kernels.tensor_details.layout")
    numerics = importlib.import_module("triton_kernels.numerics")
    experts, columns, depth = layer.experts, layer.columns, layer.depth
    codes = run.device.random_bytes((experts, columns, depth // 2))
    scales = run.device.random_bytes((experts, columns, depth // 32), 117, 123)
    # Its kernels take weights and scales with K before N.
    kind, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    weights = tensor.convert_layout(
        tensor.wrap_torch_tensor(codes.transpose(-2, -1), dtype=tensor.FP4), kind, **options
    )
    kind, options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    swizzled = tensor.convert_layout(
        tensor.wrap_torch_tensor(scales.transpose(-2, -1)), kind, **options
    )
    precision = ogs.PrecisionConfig(
        weight_scale=swizzled,
        flex_ctx=ogs.FlexCtx(rhs_data=numerics.InFlexData()),
        out_dtype=torch.bfloat16,
    )

    def bind(x: Any, routing: Routing) -> Callable[[], Any]:
        counts = run.device.array(np.diff(routing.offsets).astype(np.int32))
        data = tensor.make_ragged_tensor_metadata(counts, x.shape[0])
        rows = ogs.RoutingData(
            gate_scal=None, expt_hist=counts, n_expts_tot=experts, n_expts_act=1, expt_data=data
        )
        return lambda: ogs.matmul_ogs(x, weights, None, rows, precision_config=precision)

    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device="cuda")
    table = torch.cat([magnitudes, -magnitudes])

    def values(expert: int) -> Any:
        one = codes[expert]
        elements = table[torch.stack([one & 15, one >> 4], -1).flatten(-2).long()]
        return elements * torch.exp2(scales[expert].float() - 127).repeat_interleave(32, -1)

    return bind, values, 4.25
