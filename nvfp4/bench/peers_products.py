"""Other libraries' grouped products, where they are installed, timed on the same routings.

* PyTorch: ``torch._grouped_mm`` in bfloat16;
* triton_kernels: ``matmul_ogs`` with MXFP4 weights in its Hopper layouts;
* Humming: its layer with MXFP4 or NVFP4 weights and bfloat16 activations.

Beside ``compute="fp8"``, on the same rows of e4m3 with one scale each, made beforehand as ours are:

* PyTorch: ``torch._scaled_grouped_mm``, weights of e4m3 with one scale a row;
* Humming: its layer with MXFP4 weights and activations of e4m3 by token.

triton_kernels and Humming compile at their first calls: ``python -m nvfp4.bench.peers_build`` makes
these calls ahead, a process a layer.

Humming gathers rows where ours does; of the others they are sorted beforehand. Each is compared
with sums in float32 on sampled rows; the largest difference stands in the table, in units of the
largest result.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import api
from .activations import BFLOAT16, FP8, Activations
from .dense_products import Pace, timed_product
from .grouped_products import GROUP, MOST_CALLS, Routing, routings
from .peers_quantizers import _installed
from .report import row, skipped
from .run import Options, Run
from .shapes import Layer
from .targets import FLOPS, FLOPS_FP8, grouped_floor

__all__ = ["Layered", "ProductPeer", "chosen_peers", "inputs", "measure_peers", "peers"]


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
    rows
        From bfloat16 to what it multiplies.
    """

    bind: Callable[[Any, Routing], Callable[[], Any]]
    values: Callable[[int], Any]
    bits: float
    gathers: bool = False
    rows: Callable[[Any], Any] = lambda x: x


@dataclass(frozen=True)
class ProductPeer:
    """A grouped product of another library.

    Attributes
    ----------
    name
    format
        Of its weights.
    make
        Its weights of a layer.
    compiles
        Whether its first calls compile kernels, for seconds each.
    rows
        What it multiplies: beside which of ours it stands.
    """

    name: str
    format: str
    make: Callable[[Run, Layer], Layered]
    compiles: bool = True
    rows: Activations = BFLOAT16


def peers() -> Iterator[ProductPeer]:
    """Those that are installed."""
    if not _installed("torch"):
        return
    torch = importlib.import_module("torch")
    if hasattr(torch, "_grouped_mm"):
        yield ProductPeer("torch._grouped_mm", "bfloat16", _grouped_mm, compiles=False)
    if hasattr(torch, "_scaled_grouped_mm"):
        name = "torch._scaled_grouped_mm"
        yield ProductPeer(name, "float8_e4m3", _scaled_grouped_mm, compiles=False, rows=FP8)
    if _installed("triton_kernels.matmul_ogs"):
        yield ProductPeer("triton_kernels", "mxfp4", _matmul_ogs)
    if _installed("humming.layer"):
        for fmt in ("mxfp4", "nvfp4"):
            yield ProductPeer("Humming", fmt, functools.partial(_humming, fmt, BFLOAT16))
        yield ProductPeer("Humming", "mxfp4", functools.partial(_humming, "mxfp4", FP8), rows=FP8)


def chosen_peers(options: Options) -> list[ProductPeer]:
    """Those of the kinds of rows asked for, with weights of the formats asked for or without."""
    formats = options.formats
    own = ("bfloat16", "float8_e4m3", *formats)
    return [
        p
        for p in peers()
        if p.rows.name in options.activations and (not formats or p.format in own)
    ]


def in_passes(counts: Iterable[int]) -> list[tuple[int, ...]]:
    """Numbers of tokens, the largest first, two at a time: a budget may end before the others.

    With many tokens peers are nearest to ours. Two share the weights that a pass makes.
    """
    falling = sorted(set(counts), reverse=True)
    return [tuple(falling[i : i + 2]) for i in range(0, len(falling), 2)]


def measure_peers(run: Run, wanted: Sequence[tuple[Layer, int]]) -> None:
    """Every peer on every layer, as far as the budget reaches."""
    chosen = chosen_peers(run.options)
    layers = dict.fromkeys(layer for layer, _ in wanted)
    for some in in_passes(tokens for _, tokens in wanted):
        for peer, layer in itertools.product(chosen, layers):
            suffix = peer.rows.suffix
            counts = [
                t
                for t in some
                if (layer, t) in wanted and run.options.wants(layer.label(t) + suffix)
            ]
            _measure_layer(run, layer, counts, peer)


def _measure_layer(run: Run, layer: Layer, counts: Sequence[int], peer: ProductPeer) -> None:
    def place(tokens: int) -> tuple[str, str, str, str]:
        """Where a figure stands."""
        shape = layer.label(tokens) + peer.rows.suffix
        return peer.rows.group(GROUP), shape, peer.format, peer.name

    counts = [t for t in counts if not run.late(*place(t))]
    if not counts:
        return
    run.say(f"{layer.name}{peer.rows.suffix}: {peer.name} {peer.format}")
    try:
        made = peer.make(run, layer)
    except Exception as error:  # whatever a peer does, the run goes on and says so
        for t in counts:
            run.add(skipped(*place(t), _why(error)))
        return
    for t in counts:
        if not run.late(*place(t)):
            _measure(run, layer, t, place(t), made, peer)
    del made
    run.device.release()


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def inputs(run: Run, layer: Layer, tokens: int, peer: Layered) -> tuple[Any, list[Routing], bool]:
    """What a peer is given: the rows, the routings in turns; whether it gathers the rows."""
    gathered = layer.gathered and peer.gathers
    rows = tokens if gathered else tokens * layer.top_k
    x = peer.rows(run.device.random(rows * layer.depth).reshape(rows, layer.depth))
    return x, routings(tokens, layer.experts, layer.top_k)[:MOST_CALLS], gathered


def _measure(
    run: Run, layer: Layer, tokens: int, place: tuple[str, str, str, str], made: Layered,
    peer: ProductPeer,
) -> None:  # fmt: skip
    rows = tokens * layer.top_k
    try:
        x, chosen, gathered = inputs(run, layer, tokens, made)
        calls = [made.bind(x, routing) for routing in chosen]
        timing, _ = timed_product(run, calls, Pace(), float(rows) * layer.columns * layer.depth)
        error = _difference(made, x, chosen[0], gathered)
    except Exception as failure:
        run.add(skipped(*place, _why(failure)))
        return
    floor = grouped_floor(
        tokens=tokens, top_k=layer.top_k, columns=layer.columns, depth=layer.depth,
        hit=float(np.mean([r.hit for r in chosen])), bits=made.bits, gathered=gathered,
        input_bits=peer.rows.bits, flops=FLOPS_FP8 if peer.rows is FP8 else FLOPS,
    )  # fmt: skip
    flops = 2.0 * rows * layer.columns * layer.depth
    note = f"largest error {error:.1e}"
    run.add(row(*place, timing, flops=flops, floor=floor, note=note))


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


class RowsOfE4m3:
    """Rows of e4m3 with one scale each; a row of it is a tensor of its values."""

    def __init__(self, x: Any) -> None:
        torch = importlib.import_module("torch")
        codes, self.scale = api.quantize_rows(x)
        self.codes = codes.view(torch.float8_e4m3fn)
        self.shape = codes.shape

    def __getitem__(self, row: int) -> Any:
        return self.codes[row].float() * self.scale[row]


def _scaled_grouped_mm(run: Run, layer: Layer) -> Layered:
    torch = importlib.import_module("torch")
    codes = run.device.random_bytes((layer.experts, layer.columns, layer.depth))
    codes &= 0xBF  # magnitudes below 2, no NaN
    weights = codes.view(torch.float8_e4m3fn)
    transposed = weights.mT
    scales = run.device.full((layer.experts, layer.columns), 1.0, "float32")

    def bind(x: RowsOfE4m3, routing: Routing) -> Callable[[], Any]:
        ends = run.device.array(routing.offsets[1:])
        scale = x.scale.reshape(-1)
        return lambda: torch._scaled_grouped_mm(
            x.codes, transposed, scale, scales, offs=ends, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip

    return Layered(bind, lambda expert: weights[expert].float(), 8.0, rows=RowsOfE4m3)


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

    return Layered(bind, _values(codes, scales), 4.25)


def _values(codes: Any, scales: Any) -> Callable[[int], Any]:
    """The weights of an expert, of codes [E, N, K/2] and linear scales [E, N, blocks].

    Scales of uint8 are e8m0, others are what they say.
    """
    torch = importlib.import_module("torch")
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    table = torch.cat([magnitudes, -magnitudes])
    block = 2 * codes.shape[-1] // scales.shape[-1]

    def values(expert: int) -> Any:
        one, scale = codes[expert], scales[expert].float()
        if scales.dtype == torch.uint8:
            scale = torch.exp2(scale - 127)
        elements = table[torch.stack([one & 15, one >> 4], -1).flatten(-2).long()]
        return elements * scale.repeat_interleave(block, -1)

    return values


#: Format -> what Humming calls it; the block, the bits of an element.
_HUMMING: dict[str, tuple[dict[str, str], int, float]] = {
    "mxfp4": ({"quant_method": "mxfp4"}, 32, 4.25),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "nvfp4"}, 16, 4.5),
}


def _humming(fmt: str, rows: Activations, run: Run, layer: Layer) -> Layered:
    narrow = rows == FP8
    torch = importlib.import_module("torch")
    layers = importlib.import_module("humming.layer")
    heuristics = importlib.import_module("humming.tune").get_heuristics_config
    experts, columns, depth = layer.experts, layer.columns, layer.depth
    method, block, bits = _HUMMING[fmt]
    codes = run.device.random_bytes((experts, columns, depth // 2))
    low, high = (117, 123) if fmt == "mxfp4" else (0x30, 0x40)
    scales = run.device.random_bytes((experts, columns, depth // block), low, high)
    tensors = {"weight": codes, "weight_scale": scales}
    with torch.device(codes.device):
        made = layers.HummingLayer(
            shape_n=columns, shape_k=depth, weight_config=dict(method),
            input_config={"dtype": "float8e4m3" if narrow else "bfloat16"},
            num_experts=experts, torch_dtype=torch.bfloat16,
            pad_n_to_multiple=128, pad_k_to_multiple=64,
        ).cuda()  # fmt: skip
    if fmt == "nvfp4":
        tensors["weight_scale"] = scales = scales.view(torch.float8_e4m3fn)
        tensors["weight_scale_2"] = torch.ones_like(made.weight_scale_2)
    made.load_from_tensors(tensors)
    made.transform()
    config = made.humming_config

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
            "input_scale": x.scale if narrow else None,
            "compute_config": {"gemm_type": "indexed"},
            "tuning_config": tuning,
        }

        given = x.codes if narrow else x

        def call() -> Any:
            made(given, **options)
            return out

        return call

    ready = {"rows": RowsOfE4m3} if narrow else {}
    return Layered(bind, _values(codes, scales), bits, gathers=True, **ready)


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
