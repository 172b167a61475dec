"""Other libraries' quantisers, where they are installed, timed as ours are.

* torchao, compiled by ``torch.compile``: ``to_mx`` and ``nvfp4_quantize``;
* triton_kernels: ``downcast_to_mxfp``;
* Humming: ``ops.process_input``, mxfp8 only.

They differ in what they write: linear or swizzled scales, other roundings. How many of their codes
on sampled rows are the golden model's, under whichever rounding fits best, stands in the table.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .. import golden
from ..formats import FORMATS, SCALE_ROUNDINGS
from .correct import sample_rows
from .devices import Device
from .report import row, skipped
from .run import Pool, Run
from .shapes import DenseShape

__all__ = ["Peer", "codes_of", "fitting_rounding", "measure_peers", "peers"]

#: Seconds that a peer may need before its first result: compilers.
SLOW, QUICK = 20.0, 6.0


@dataclass(frozen=True)
class Peer:
    """A quantiser of another library.

    Attributes
    ----------
    name
    format
        Ours that it writes.
    make
        From a device to a function of an input that returns arrays.
    needed
        Seconds to allow for its compiler at a new shape.
    """

    name: str
    format: str
    make: Callable[[], Callable[[Any], Any]]
    needed: float


def peers() -> Iterator[Peer]:
    """Those that are installed; each is imported when it is made."""
    if _installed("torchao.prototype.mx_formats"):
        yield Peer("torch.compile(to_mx)", "mxfp8_e4m3", lambda: _to_mx("float8_e4m3fn"), SLOW)
        yield Peer("torch.compile(to_mx)", "mxfp4", lambda: _to_mx("float4_e2m1fn_x2"), SLOW)
        yield Peer("torch.compile(nvfp4_quantize)", "nvfp4", _nvfp4_quantize, SLOW)
    if _installed("triton_kernels"):
        yield Peer("triton_kernels", "mxfp8_e4m3", lambda: _downcast("float8_e4m3fn"), QUICK)
        yield Peer("triton_kernels", "mxfp4", lambda: _downcast("uint8"), QUICK)
    if _installed("humming"):
        yield Peer("Humming", "mxfp8_e4m3", _process_input, QUICK)


def _installed(module: str) -> bool:
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(module)
        return True
    return False


def _compiler() -> Any:
    """PyTorch, told to compile for every shape: past a limit it would run uncompiled, silently."""
    torch = importlib.import_module("torch")
    config = importlib.import_module("torch._dynamo.config")
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, 1000)
    return torch


def _to_mx(dtype: str) -> Callable[[Any], Any]:
    torch = _compiler()
    module = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    config = importlib.import_module("torchao.prototype.mx_formats.config")
    kind, mode = getattr(torch, dtype), config.ScaleCalculationMode.FLOOR
    made: Callable[[Any], Any] = torch.compile(
        lambda x: module.to_mx(x, kind, 32, mode), dynamic=False
    )
    return made


def _nvfp4_quantize() -> Callable[[Any], Any]:
    torch = _compiler()
    module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    scale = torch.tensor(4.5 / 2688.0, device="cuda")
    made = torch.compile(lambda x, s: module.nvfp4_quantize(x, 16, s), dynamic=False)
    return lambda x: made(x, scale)


def _downcast(dtype: str) -> Callable[[Any], Any]:
    torch = importlib.import_module("torch")
    module = importlib.import_module("triton_kernels.numerics_details.mxfp")
    kind = getattr(torch, dtype)
    return lambda x: module.downcast_to_mxfp(x, kind, axis=1)


def _process_input() -> Callable[[Any], Any]:
    package = importlib.import_module("humming")
    ops = getattr(package, "ops", None) or importlib.import_module("humming.ops")
    options = {
        "quant_mode": "dynamic_group",
        "quant_dtype": "float8e4m3",
        "quant_group_size": 32,
        "group_scale_dtype": "float8e8m0",
    }
    return lambda x: ops.process_input(x, **options)


# --- measuring ------------------------------------------------------------------------------------


def measure_peers(run: Run, shapes: Iterable[DenseShape], pool: Pool) -> None:
    """Every peer at every judged shape, as far as the budget reaches."""
    from .quantizers import DENSE_GROUP, Variant, buffers

    shapes = [s for s in shapes if s.judged]
    chosen = [p for p in peers() if not run.options.formats or p.format in run.options.formats]
    functions: dict[Peer, Any] = {}
    for shape in shapes:
        for peer in chosen:
            if run.late(DENSE_GROUP, shape.label, peer.format, peer.name, needed=peer.needed):
                continue
            run.say(f"{shape.label}: {peer.name} {peer.format}")
            v = Variant(FORMATS[peer.format], False)
            try:
                call = functions.get(peer) or functions.setdefault(peer, peer.make())
                inputs = pool.cut(shape.rows, shape.columns, buffers(shape))
                timing, _ = run.timed([partial(call, x) for x in inputs])
                checked = _compared(run.device, peer.format, inputs[0], call(inputs[0]))
            except Exception as error:  # whatever a peer does, the run goes on and says so
                text = " ".join(str(error).split())[:120]
                run.add(
                    skipped(DENSE_GROUP, shape.label, peer.format, peer.name,
                            f"{type(error).__name__}: {text}")
                )  # fmt: skip
                continue
            moved = v.bytes(shape.rows, shape.columns)
            copied = {"copy": moved / run.references[shape]} if shape in run.references else {}
            run.add(
                row(
                    DENSE_GROUP, shape.label, peer.format, peer.name, timing, moved=moved,
                    references=copied, note=checked,
                )
            )  # fmt: skip
            run.device.release()


def _compared(device: Device, fmt: str, x: Any, results: Any) -> str:
    """How much of a peer's codes are ours."""
    rows = sample_rows(x.shape[0])
    codes = codes_of(results, x.shape[0] * x.shape[1] // FORMATS[fmt].codes_per_byte)
    if codes is None:
        return "its codes were not recognised"
    torch = importlib.import_module("torch")
    flat = codes.view(torch.uint8).reshape(x.shape[0], -1)
    share, rounding = fitting_rounding(device.rows(x, rows), device.rows(flat, rows), fmt)
    return f"{share:.2%} of its codes as golden's {rounding}"


def codes_of(results: Any, size: int) -> Any:
    """Of the arrays that a quantiser returns, the one with `size` bytes."""
    found = results if isinstance(results, (tuple, list)) else (results,)
    for array in found:
        shape = getattr(array, "shape", None)
        if shape is not None and int(np.prod(shape)) * int(array.dtype.itemsize) == size:
            return array
    return None


def fitting_rounding(x: np.ndarray, codes: np.ndarray, fmt: str) -> tuple[float, str]:
    """Share of equal code bytes under the rounding of scales that fits best, and which that is."""
    format_ = FORMATS[fmt]
    best = (-1.0, "")
    if fmt == "nvfp4":
        scale = np.float32(2688.0 / 4.5)
        own, _, _ = golden.quantize(x, format_, encode_scale=scale, scale_layout="linear")
        return float(np.mean(own == codes)), "own"
    for rounding in SCALE_ROUNDINGS:
        own, _, _ = golden.quantize(x, format_, scale_rounding=rounding, scale_layout="linear")
        best = max(best, (float(np.mean(own == codes)), rounding))
    return best
