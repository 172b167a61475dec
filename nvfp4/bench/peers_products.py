"""Other libraries' grouped products, where they are installed, timed on the same routings.

* PyTorch: ``torch._grouped_mm`` in bfloat16;
* triton_kernels: ``matmul_ogs`` with MXFP4 weights in its Hopper layouts;
* Humming: its layer with MXFP4 weights and bfloat16 activations.

Humming gathers rows where ours does; of the others they are sorted beforehand. Each is compared
with sums in float32 on sampled rows; the largest difference stands in the table, in units of the
largest result.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dense_products import Pace, timed_product
from .grouped_products import GROUP, MOST_CALLS, Routing, routings
from .peers_quantizers import _installed
from .report import row, skipped
from .run import Run
from .shapes import Layer
from .targets import grouped_floor

__all__ = ["measure_peers"]


@dataclass(frozen=True)
class Layered:
    """A peer with the weights of a layer.

    Attributes
    ----------
    bind
        From an input and a routing to a call without arguments.
    values
        The weights of an expert, float32.
    bits
        Of a weight.
    gathers
        Whether it gathers the rows of tokens itself, and so writes rows in the order of choices.
    """

    bind: Callable[[Any, Routing], Callable[[], Any]]
    values: Callable[[int], Any]
    bits: float
    gathers: bool = False


def peers() -> Iterator[tuple[str, str, Callable[[Run, Layer], Layered]]]:
    """Name, format and maker of those that are installed."""
    torch = importlib.import_module("torch")
    if hasattr(torch, "_grouped_mm"):
        yield "torch._grouped_mm", "bfloat16", _grouped_mm
    if _installed("triton_kernels.matmul_ogs"):
        yield "triton_kernels", "mxfp4", _matmul_ogs
    if _installed("humming.layer"):
        yield "Humming", "mxfp4", _humming


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
                peer = make(run, layer)
            except Exception as error:  # whatever a peer does, the run goes on and says so
                for t in counts:
                    run.add(skipped(GROUP, layer.label(t), fmt, name, _why(error)))
                continue
            for t in counts:
                if not run.late(GROUP, layer.label(t), fmt, name):
                    _measure(run, layer, t, name, fmt, peer)
            del peer
            run.device.release()


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _measure(run: Run, layer: Layer, tokens: int, name: str, fmt: str, peer: Layered) -> None:
    rows = tokens * layer.top_k
    gathered = layer.gathered and peer.gathers
    input_rows = tokens if gathered else rows
    x = run.device.random(input_rows * layer.depth).reshape(input_rows, layer.depth)
    chosen = routings(tokens, layer.experts, layer.top_k)[:MOST_CALLS]
    try:
        calls = [peer.bind(x, routing) for routing in chosen]
        timing, _ = timed_product(run, calls, Pace(), float(rows) * layer.columns * layer.depth)
        error = _difference(peer, x, chosen[0], gathered)
    except Exception as failure:
        run.add(skipped(GROUP, layer.label(tokens), fmt, name, _why(failure)))
        return
    floor = grouped_floor(
        tokens=tokens, top_k=layer.top_k, columns=layer.columns, depth=layer.depth,
        hit=float(np.mean([r.hit for r in chosen])), bits=peer.bits, gathered=gathered,
    )  # fmt: skip
    flops = 2.0 * rows * layer.columns * layer.depth
    run.add(
        row(
            GROUP, layer.label(tokens), fmt, name, timing, flops=flops, floor=floor,
            note=f"largest error {error:.1e}",
        )
    )  # fmt: skip


def _difference(peer: Layered, x: Any, routing: Routing, gathered: bool) -> float:
    """Largest error on sampled rows, in units of the largest result."""
    total = routing.tokens.size
    result = peer.bind(x, routing)().reshape(total, -1)
    worst = 0.0
    for r in sorted({0, total // 2, total - 1}):
        expert = int(np.searchsorted(routing.offsets, r, side="right")) - 1
        weights = peer.values(expert)
        source, place = (routing.tokens[r], routing.slots[r]) if gathered else (r, r)
        exact = weights @ x[int(source)].float()
        got = result[int(place), : weights.shape[0]].float()
        worst = max(worst, float((got - exact).abs().max() / exact.abs().max()))
    return worst


# --- the peers ------------------------------------------------------------------------------------


def _grouped_mm(run: Run, layer: Layer) -> Layered:
    torch = importlib.import_module("torch")
    count = layer.experts * layer.columns * layer.depth
    weights = run.device.random(count).reshape(layer.experts, layer.columns, layer.depth)
    transposed = weights.transpose(-2, -1)

    def bind(x: Any, routing: Routing) -> Callable[[], Any]:
        ends = run.device.array(routing.offsets[1:])
        return lambda: torch._grouped_mm(x, transposed, offs=ends)

    return Layered(bind, lambda expert: weights[expert].float(), 16.0)


def _matmul_ogs(run: Run, layer: Layer) -> Layered:
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

    return Layered(bind, _mxfp4_values(codes, scales), 4.25)


def _mxfp4_values(codes: Any, scales: Any) -> Callable[[int], Any]:
    """The weights of an expert, of codes [E, N, K/2] and linear e8m0 scales."""
    torch = importlib.import_module("torch")
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    table = torch.cat([magnitudes, -magnitudes])

    def values(expert: int) -> Any:
        one = codes[expert]
        elements = table[torch.stack([one & 15, one >> 4], -1).flatten(-2).long()]
        return elements * torch.exp2(scales[expert].float() - 127).repeat_interleave(32, -1)

    return values


def _humming(run: Run, layer: Layer) -> Layered:
    torch = importlib.import_module("torch")
    schema = importlib.import_module("humming.schema.base")
    layers = importlib.import_module("humming.layer")
    experts, columns, depth = layer.experts, layer.columns, layer.depth
    weight_config = {"quant_method": "mxfp4"}
    padding = {"pad_n_to_multiple": 128, "pad_k_to_multiple": 64}
    codes = run.device.random_bytes((experts, columns, depth // 2))
    scales = run.device.random_bytes((experts, columns, depth // 32), 117, 123)
    with torch.device(codes.device):
        made = layers.HummingLayer(
            shape_n=columns, shape_k=depth, weight_config=weight_config,
            input_config={"dtype": "bfloat16"}, num_experts=experts, torch_dtype=torch.bfloat16,
            **padding,
        ).cuda()  # fmt: skip
    made.load_from_tensors({"weight": codes, "weight_scale": scales})
    made.transform()
    weights = schema.BaseWeightSchema.from_config(weight_config)
    inputs = schema.BaseInputSchema.from_config({"quant_method": "humming", "dtype": "bfloat16"})
    config = importlib.import_module("humming.transform").prepare_layer_config(
        shape_n=columns, shape_k=depth, num_experts=experts, torch_dtype=torch.bfloat16,
        device=None, weight_schema=weights.to_humming_schema(torch.bfloat16),
        input_schema=inputs.to_humming_schema(torch.bfloat16), **padding,
    )  # fmt: skip
    heuristics = importlib.import_module("humming.tune").get_heuristics_config

    def bind(x: Any, routing: Routing) -> Callable[[], Any]:
        total = routing.tokens.size
        gathered = x.shape[0] != total
        tuning = dict(heuristics(config, shape_m=total, gemm_type="indexed"))
        rows = routing.slots if gathered else np.arange(total, dtype=np.int32)
        sorted_ids, owners = padded_blocks(routing.offsets, rows, tuning["block_shape"][0])
        out = run.device.full((total, columns), 0.0, "bfloat16")
        options = {
            "sorted_ids": run.device.array(sorted_ids),
            "expert_ids": run.device.array(owners),
            "num_tokens_padded": run.device.array(np.array([sorted_ids.size], np.int32)),
            "top_k": layer.top_k if gathered else 1,
            "valid_shape_m": total,
            "outputs": out,
            "input_scale": None,
            "compute_config": {"gemm_type": "indexed"},
            "tuning_config": tuning,
        }

        def call() -> Any:
            made(x, **options)
            return out

        return call

    return Layered(bind, _mxfp4_values(codes, scales), 4.25, gathers=True)


def padded_blocks(
    offsets: np.ndarray, rows: np.ndarray, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows by expert, each expert's filled up to whole blocks; and the expert of each block.

    Parameters
    ----------
    offsets : [E+1]
        Rows by expert.
    rows : int32, [R]
        Row numbers, by expert; the filling is R.
    block
        Rows of a block.
    """
    parts, owners = [], []
    for expert, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        count = -(-(stop - start) // block)
        filled = np.full(count * block, rows.size, np.int32)
        filled[: stop - start] = rows[start:stop]
        parts.append(filled)
        owners += [expert] * count
    return np.concatenate(parts), np.array(owners, np.int32)
