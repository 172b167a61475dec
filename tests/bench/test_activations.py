"""Products with rows of every kind and batch-invariant plans, and the peers beside them."""

from __future__ import annotations

import importlib
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nvfp4.bench import dense_products, grouped_products, peers_products
from nvfp4.bench.activations import FP8
from nvfp4.bench.correct import check_products, largest_error
from nvfp4.bench.peers_products import ProductPeer
from nvfp4.bench.report import Report
from nvfp4.bench.run import Options, Run
from nvfp4.bench.shapes import Layer
from nvfp4.bench.timing import Deadline

from .pretended import Card
from .test_products import DENSE, DOWN, UP, Peer, Tensor, WithTensors, install, run, small

__all__ = ["small"]  # a fixture that every test here uses


KINDS = {kind: f", {kind} activations" for kind in ("float16", "nvfp4", "mxfp8_e5m2")}
KINDS["fp8"] = ", compute fp8"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_are_multiplied_and_checked(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[Any, dict[str, Any]]] = []
    for name in ("matmul", "grouped_matmul"):
        real = getattr(dense_products.api, name)

        def call(a: Any, b: Any, *, real: Any = real, **more: Any) -> Any:
            given.append((a, more))
            return real(a, b, **more)

        monkeypatch.setattr(dense_products.api, name, call)
    layers = [UP, DOWN]
    rows = run(dense_products, [DENSE], activations=(kind,))
    rows += run(grouped_products, layers, activations=(kind,))
    assert [r.shape for r in rows] == [DENSE.label + KINDS[kind]] + [
        layer.label(t) + KINDS[kind] for layer in layers for t in (1, 6)
    ]
    assert all(r.checked.endswith(" elements") for r in rows), rows
    assert all(("fp8" if kind == "fp8" else kind) in r.group for r in rows)
    # Targets of expert layers hold for bfloat16 and block scales; of dense products for bfloat16.
    judged = kind not in ("fp8", "float16")
    assert [bool(r.target) for r in rows] == [False, judged, False, False, False]
    for a, more in given:
        # Rows of float16 have results of float16.
        dtype = str(getattr(a, "dtype", ""))
        assert more["out"].dtype == ("float16" if dtype == "float16" else "bfloat16")
        if "compute" in more:
            assert a.dtype == np.uint8 and more["a_scale"].shape == (a.shape[0], 1)
    assert {str(getattr(a, "format", None) or a.dtype) for a, _ in given} == {
        "bfloat16", "uint8" if kind == "fp8" else kind
    }  # fmt: skip
    layouts = {(a.scale_layout, a.groups is None) for a, _ in given if hasattr(a, "format")}
    if kind == "float16":
        assert not layouts
    elif kind != "fp8":
        assert layouts == {("tcgen", True), ("linear", True), ("tcgen", False)}
    else:
        # The error of the rows is said, and is that of e4m3.
        errors = [float(r.note.partition(";")[0].split()[-1]) for r in rows]
        assert all(1e-3 < e < 0.1 for e in errors), errors


def test_peers_of_another_day_stand_beside_what_they_compare_with() -> None:
    layer = Layer("x", 4, 32, 64, 2, False, (("mxfp4", ((1, 1.0, 2.0, 3.5),)),), (7.5, 8.0))
    rows = run(grouped_products, [layer], activations=("bfloat16", "mxfp4", "fp8"),
               only=("1 token",), batch_invariant=True)  # fmt: skip
    notes = [r.note for r in rows]
    assert notes[0].endswith("record: bfloat16 3.5 us") and notes[1] == ""
    assert notes[2].endswith("record: bfloat16 3.5 us, e4m3 7.5 us")
    assert notes[4].startswith("largest error") and notes[4].endswith("record: e4m3 7.5 us")


def test_several_kinds_and_batch_invariant_plans_stand_in_one_run() -> None:
    rows = run(
        grouped_products, [UP], activations=("bfloat16", "mxfp4"), batch_invariant=True,
        only=("1 token",),
    )  # fmt: skip
    label = UP.label(1)
    assert [r.shape for r in rows] == [
        label, f"{label}, batch invariant",
        f"{label}, mxfp4 activations", f"{label}, mxfp4 activations, batch invariant",
    ]  # fmt: skip
    assert [r.reference for r in rows] == ["floor", "usual plan"] * 2
    assert all(r.ratio == pytest.approx(1, rel=0.02) for r in rows[1::2])
    assert [bool(r.target) for r in rows] == [True, False] * 2
    (r,) = run(
        dense_products, [DENSE], batch_invariant=True, only=("batch invariant",),
    )  # fmt: skip
    assert r.shape == f"{DENSE.label}, batch invariant" and r.reference == "floor"


@pytest.mark.parametrize("module", [dense_products, grouped_products])
def test_a_batch_invariant_plan_is_asked_for_where_it_is_measured(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    name, shapes = {
        dense_products: ("matmul", [DENSE]), grouped_products: ("grouped_matmul", [DOWN])
    }[module]  # fmt: skip
    real = getattr(module.api, name)

    def call(*args: Any, batch_invariant: bool = False, **more: Any) -> Any:
        asked.append(batch_invariant)
        return real(*args, batch_invariant=batch_invariant, **more)

    monkeypatch.setattr(module.api, name, call)
    run(module, shapes, batch_invariant=True)
    first = asked.index(True)
    assert first > 2 and len(asked) - first > 2
    asked.clear()
    run(module, shapes)
    assert not any(asked)


def test_pairs_for_which_there_is_no_product_have_no_rows() -> None:
    assert not run(dense_products, [DENSE], formats=("mxfp8_e4m3",), activations=("fp8",))
    options = Options(formats=("mxfp8_e4m3",), activations=("fp8",))
    assert not dense_products.calls(options, [DENSE])
    assert len(grouped_products.calls(options, [UP])) == 1  # what is small


def test_rows_of_another_kind_than_was_asked_for_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared are sums of the rows as they were quantised."""
    real = dense_products.api.matmul

    def call(a: Any, b: Any, **more: Any) -> Any:
        if hasattr(a, "format"):
            a = (a.dequantize() * np.float32(1.03125)).astype(ml_dtypes.bfloat16)
        return real(a, b, **more)

    monkeypatch.setattr(dense_products.api, "matmul", call)
    (r,) = run(dense_products, [DENSE], activations=("mxfp8_e4m3",))
    assert r.wrong and "sampled" in r.checked


def test_sums_of_fp8_tensor_cores_may_lose_bits_but_not_be_others() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((4, 2880)), rng.standard_normal((16, 2880))
    exact = a @ b.T
    near = exact + 0.2 * rng.uniform(-1, 1, exact.shape)  # some 14 bits of sums of 54
    assert check_products(near, a, b).startswith("WRONG")
    assert check_products(near, a, b, fp8=True) == "64 elements"
    assert check_products(exact[:, ::-1], a, b, fp8=True).startswith("WRONG")
    assert largest_error(near, a, b) == pytest.approx(0.2 / np.abs(exact).max(), rel=0.1)


def test_peers_stand_beside_rows_of_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [ProductPeer("a", "bfloat16", Peer(True).make),
             ProductPeer("b", "mxfp4", Peer(True).make, rows=FP8)]  # fmt: skip
    install(monkeypatch, *known)
    options: Any = {"activations": ("fp8",), "only": ("6 tokens",), "peers": True}
    rows = run(grouped_products, [UP], card=WithTensors(), **options)
    assert [(r.shape, r.what) for r in rows] == [
        (f"{UP.label(6)}, compute fp8", what) for what in ("nvfp4", "b")
    ]
    assert len({r.group for r in rows}) == 1 and all(r.us for r in rows)


def test_a_peer_of_fp8_rows_gets_the_codes_and_scales_that_ours_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch's scaled product, played by NumPy."""
    e4m3 = ml_dtypes.float8_e4m3fn

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any, *, offs: Any, **more: Any) -> Any:
        assert a.dtype == b.dtype == e4m3 and scale_a.shape == (a.shape[0],)
        assert scale_b.shape == (b.shape[0], b.shape[2]) and more["use_fast_accum"]
        expert = np.searchsorted(offs, np.arange(a.shape[0]), "right")
        wide = np.stack([row @ b[e].astype(np.float32) for row, e in zip(
            a.astype(np.float32), expert, strict=True)])  # fmt: skip
        return (wide * scale_a[:, None]).view(Tensor)

    torch = types.SimpleNamespace(
        float8_e4m3fn=e4m3, bfloat16=ml_dtypes.bfloat16, _scaled_grouped_mm=product
    )
    monkeypatch.setattr(peers_products, "_installed", lambda name: name == "torch")
    real = importlib.import_module
    monkeypatch.setattr(
        importlib, "import_module", lambda name, *a: torch if name == "torch" else real(name, *a)
    )
    (peer,) = peers_products.chosen_peers(Options(activations=("fp8",)))
    assert (peer.name, peer.format) == ("torch._scaled_grouped_mm", "float8_e4m3")
    card = WithTensors()
    quantize_rows = peers_products.api.quantize_rows
    monkeypatch.setattr(
        peers_products.api, "quantize_rows", lambda x: [y.view(Tensor) for y in quantize_rows(x)]
    )
    monkeypatch.setattr(
        card, "random_bytes", lambda *a: Card.random_bytes(card, *a).view(Tensor), raising=False
    )
    made = Run(card, Options(activations=("fp8",)), Deadline(9e9), Report("x", {}))
    layered = peer.make(made, DOWN)
    x, routings, gathered = peers_products.inputs(made, DOWN, 6, layered)
    assert not gathered
    assert peers_products._difference(layered, x, routings[0], False) < 1e-5
