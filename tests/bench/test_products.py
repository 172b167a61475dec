"""The suites of products on a pretended card: checked, judged, and left out where they are slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from nvfp4 import warm
from nvfp4.bench import (
    dense_products,
    devices,
    grouped_products,
    peers_build,
    peers_products,
    weights,
)
from nvfp4.bench.correct import check_products
from nvfp4.bench.peers_products import ProductPeer
from nvfp4.bench.report import Report, Row
from nvfp4.bench.run import Options, Run
from nvfp4.bench.shapes import DenseProduct, Layer
from nvfp4.bench.timing import Deadline
from nvfp4.formats import FORMATS, MXFP4, NVFP4

from .pretended import Card

DENSE = DenseProduct(48, 64, 5, ratio=0.5)
UP = Layer("Small up", 4, 32, 64, 2, True, (("mxfp4", ((1, 1.0, 2.0, 3.0),)),))
DOWN = Layer("Small down", 4, 32, 64, 2, False, ())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dense_products, grouped_products):
        monkeypatch.setattr(module, "copies_of", lambda fmt, shape: 2)
    monkeypatch.setattr(dense_products, "_PROBE", (32, 64, 4))
    monkeypatch.setattr(grouped_products, "_PROBE", (32, 64, 4, 2))
    monkeypatch.setattr(grouped_products, "TOKENS", (1, 6))


class Ticking(Card):
    """Time passes between marks too, as where a call is timed without a graph."""

    def mark(self) -> float:
        self.now += 1e-6
        return self.now

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        """Replays only take their time: what is called is checked outside of them."""
        self.captured.append(len(calls))

        def replay() -> None:
            self.now += self.each

        return replay


def run(
    module: Any, shapes: Any, card: Card | None = None, budget: float = 9e9, **options: Any
) -> list[Row]:
    chosen = Options(**{"peers": False, "formats": ("mxfp4",)} | options)
    made = Run(card or Ticking(), chosen, Deadline(budget), Report("matmul", {}))
    module.measure(made, shapes)
    return made.report.rows


@pytest.mark.parametrize("fmt", list(FORMATS)[:3])
def test_a_dense_product_is_checked_against_exact_sums(fmt: str) -> None:
    (r,) = run(dense_products, [DENSE], formats=(fmt,))
    assert r.checked.endswith(" elements") and r.format == fmt
    assert r.us == pytest.approx(1e-3 / 40 * 1e6, rel=0.01)
    assert r.target == "≥ 0.50 floor" and r.met is False and r.reference == "floor"
    assert r.tflops == pytest.approx(2 * 5 * 48 * 64 / (r.us * 1e-6) * 1e-12)


def test_without_cublas_its_targets_are_undecided() -> None:
    (r,) = run(dense_products, [DenseProduct(48, 64, 5, 1.0, "cuBLAS", exclusive=True)])
    assert (r.target, r.met, r.ratio) == ("> 1.00 cuBLAS", None, None)


class WithCublas(Ticking):
    def matmul(self, a: Any, b: Any, out: Any) -> None:
        out[...] = (a.astype(np.float32) @ b.astype(np.float32).T).astype(out.dtype)


def test_with_cublas_they_are_judged_in_the_same_run() -> None:
    rows = run(dense_products, [DenseProduct(48, 64, 5, 1.0, "cuBLAS", exclusive=True)],
               card=WithCublas())  # fmt: skip
    assert [r.what for r in rows] == ["cuBLAS", "nvfp4"]
    # A graph takes 1 ms; cuBLAS has 16 matrices in turns and so 48 calls in it.
    assert rows[1].reference == "cuBLAS" and rows[1].ratio == pytest.approx(40 / 48)


@pytest.mark.parametrize("layer", [UP, DOWN], ids=["gathered", "sorted"])
def test_a_layer_is_checked_with_every_number_of_tokens(layer: Layer) -> None:
    rows = run(grouped_products, [layer])
    assert [r.shape for r in rows] == [layer.label(1), layer.label(6)]
    assert all(r.checked.endswith(" elements") for r in rows)
    assert all(r.floor_us is not None and r.floor_us > 0 for r in rows)
    assert [bool(r.target) for r in rows] == [layer is UP, False]


@pytest.mark.parametrize("name", ["matmul", "grouped_matmul"])
def test_weights_are_prepared_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = getattr(dense_products.api, name)
    layouts: set[str] = set()

    def call(a: Any, b: Any, **more: Any) -> Any:
        layouts.add(b.scale_layout)
        return real(a, b, **more)

    monkeypatch.setattr(dense_products.api, name, call)
    module, shapes = {
        "matmul": (dense_products, [DENSE]), "grouped_matmul": (grouped_products, [UP])
    }[name]  # fmt: skip
    assert all(not r.wrong for r in run(module, shapes))
    assert layouts == {"sm90"}


def wrong_somewhere(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real: Callable[..., Any] = getattr(dense_products.api, name)

    def call(a: Any, b: Any, *, out: Any, **more: Any) -> Any:
        real(a, b, out=out, **more)
        out[0, 0] = out[0, 0] + 100
        return out

    monkeypatch.setattr(dense_products.api, name, call)


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_somewhere(monkeypatch, "matmul")
    wrong_somewhere(monkeypatch, "grouped_matmul")
    (r,) = run(dense_products, [DENSE])
    assert r.wrong and "sampled" in r.checked
    assert all(r.wrong for r in run(grouped_products, [UP]))


def test_elements_that_are_not_written_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dense_products.api.matmul

    def call(a: Any, b: Any, *, out: Any) -> Any:
        last = out[-1, -1].copy()
        real(a, b, out=out)
        out[-1, -1] = last
        return out

    monkeypatch.setattr(dense_products.api, "matmul", call)
    (r,) = run(dense_products, [DENSE])
    assert r.checked == "WRONG: two calls differ, or elements were not written"


def test_what_would_take_more_than_a_second_is_left_out_and_said() -> None:
    class Slow(Card):
        """A mark costs a second: so much does the small product seem to take."""

        def mark(self) -> float:
            self.now += 1.0
            return self.now

    (r,) = run(dense_products, [DENSE], card=Slow())
    assert r.us is None and r.met is None and r.target
    # The probe has 4 * 32 * 64 multiplications, this 5 * 48 * 64.
    assert r.note == "skipped: one call would take 1.9 s with the present kernel"
    rows = run(grouped_products, [UP], card=Slow())
    assert [r.us is None for r in rows] == [False, True]


def test_a_product_s_error_may_be_a_rounding_but_not_more() -> None:
    a = np.full((1, 64), 1.0, np.float32)
    b = np.full((1, 64), 1.0, np.float32)
    assert check_products(np.array([[64.0]]), a, b) == "1 elements"
    assert check_products(np.array([[64.2]]), a, b) == "1 elements"
    assert check_products(np.array([[64.5]]), a, b).startswith("WRONG")
    assert check_products(np.array([[np.nan]]), a, b).startswith("WRONG")


def test_routings_are_disjoint_where_tokens_are_few_and_have_distinct_experts() -> None:
    few = grouped_products.routings(1, 128, 4)
    assert len(few) == 32 and all(r.hit == 4 for r in few)
    starts = np.array([np.diff(r.offsets) for r in few])
    assert (starts.sum(axis=0) == 1).all()
    many = grouped_products.routings(512, 8, 2)
    assert len(many) == 8
    for r in many:
        assert r.offsets[-1] == 1024 and r.hit == 8
        expert = np.searchsorted(r.offsets, np.arange(1024), side="right") - 1
        pairs = {(int(t), int(e)) for t, e in zip(r.tokens, expert, strict=True)}
        assert len(pairs) == 1024  # no token twice at one expert
        assert (np.bincount(r.tokens) == 2).all()
    assert len(grouped_products.routings(8192, 8, 2)) == 2


def test_weights_are_enough_copies_and_have_no_special_values() -> None:
    monkeyed = weights.copies_of
    assert monkeyed(MXFP4, (128, 2880, 2880)) == 1
    assert monkeyed(MXFP4, (8192, 8192)) == 16
    assert monkeyed(NVFP4, (16, 16)) == weights.MOST_COPIES
    assert weights.bits_of(MXFP4) == 4.25 and weights.bits_of(NVFP4) == 4.5
    card = Card()
    for fmt in FORMATS.values():
        w = weights.make_weights(card, fmt, (3, 40, 64))
        values = weights.values_of(card, w, np.array([0, 39]), 2)
        whole = w.dequantize("float32")[2][[0, 39]]
        assert np.isfinite(values).all() and (values == whole).all()


def test_the_calls_to_build_are_those_that_are_measured() -> None:
    kinds = ("bfloat16", "mxfp4", "fp8")
    for module, only in ((dense_products, "8192 x 8192, 4096"), (grouped_products, "Qwen3")):
        built = []
        for options in (
            Options((only,), ("mxfp4",)),
            Options((only,), ("mxfp4",), batch_invariant=True),
            Options((only,), ("mxfp4",), activations=kinds, batch_invariant=True),
        ):
            calls = [one for call in module.calls(options) for one in warm.expand(call)]
            built.append(set(warm.programs(calls, "sm_90a")))
        assert built[0] < built[1] < built[2]


class Peer:
    """A layer of another library: right, or wrong by a little."""

    def __init__(self, gathers: bool, error: float = 0.0) -> None:
        self.gathers, self.error = gathers, error

    def make(self, run: Run, layer: Layer) -> peers_products.Layered:
        shape = layer.experts, layer.columns, layer.depth
        matrices = Tensor.random(shape)

        def bind(x: Any, routing: grouped_products.Routing) -> Callable[[], Any]:
            gathered = self.gathers and layer.gathered
            expert = np.searchsorted(routing.offsets, np.arange(routing.tokens.size), "right") - 1

            def call() -> Any:
                out = np.zeros((routing.tokens.size, layer.columns), np.float32)
                for r, e in enumerate(expert):
                    source = routing.tokens[r] if gathered else r
                    place = routing.slots[r] if gathered else r
                    out[place] = matrices[e] @ x[source].astype(np.float32)
                out[0, 0] += self.error * np.abs(out).max()
                return out.view(Tensor)

            return call

        return peers_products.Layered(bind, lambda e: matrices[e], 16.0, self.gathers)


class Tensor(np.ndarray):
    """NumPy with the two methods of PyTorch that are used."""

    @classmethod
    def random(cls, shape: tuple[int, ...]) -> Any:
        return np.random.default_rng(5).standard_normal(shape, dtype=np.float32).view(cls)

    def float(self) -> Any:
        return self.astype(np.float32)

    def abs(self) -> Any:
        return np.abs(self)


class WithTensors(Ticking):
    def random(self, count: int, seed: int = 0, dtype: str = "bfloat16") -> Any:
        return super().random(count, seed, dtype).view(Tensor)

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        raise AssertionError("not called")


def install(monkeypatch: pytest.MonkeyPatch, *known: ProductPeer) -> None:
    monkeypatch.setattr(peers_products, "peers", lambda: iter(known))


@pytest.mark.parametrize("layer", [UP, DOWN], ids=["gathered", "sorted"])
@pytest.mark.parametrize("gathers", [True, False])
def test_peers_are_measured_on_the_same_routings_and_compared(
    layer: Layer, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: Run, layer: Layer) -> Any:
        raise ImportError("no such thing")

    kinds = [("good", Peer(gathers).make), ("bad", Peer(gathers, 0.5).make), ("gone", fail)]
    install(monkeypatch, *(ProductPeer(name, "bfloat16", make) for name, make in kinds))
    rows = run(grouped_products, [layer], card=WithTensors(), peers=True)
    by_name = {(r.shape, r.what): r for r in rows}
    for tokens in (1, 6):
        label = layer.label(tokens)
        assert float(by_name[label, "good"].note.split()[-1]) < 1e-6
        assert by_name[label, "gone"].note == "skipped: ImportError: no such thing"
        assert by_name[label, "good"].us is not None
    assert float(by_name[layer.label(1), "bad"].note.split()[-1]) > 0.1
    assert [r.what for r in rows] == ["nvfp4", "good", "bad", "gone"] * 2


def test_peers_with_weights_of_other_formats_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *(ProductPeer(f, f, Peer(True).make) for f in (*FORMATS, "bfloat16")))
    named = [p.name for p in peers_products.chosen_peers(Options(formats=("nvfp4",)))]
    assert named == ["nvfp4", "bfloat16"]
    assert len(peers_products.chosen_peers(Options())) == len(FORMATS) + 1
    assert not peers_products.chosen_peers(Options(activations=("fp8", "mxfp4")))


def test_many_tokens_are_measured_first_with_every_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a budget ends, the shapes at which peers are nearest are there."""
    assert peers_products.in_passes([1, 32, 512, 8192, 1]) == [(8192, 512), (32, 1)]
    made: list[str] = []
    install(monkeypatch, *(ProductPeer(n, "bfloat16", Peer(True).make) for n in "ab"))
    card = WithTensors()
    run = Run(card, Options(), Deadline(9e9), Report("grouped-matmul", {}), made.append)
    peers_products.measure_peers(run, [(UP, t) for t in (1, 2, 3)])
    assert [(r.shape, r.what) for r in run.report.rows] == [
        (UP.label(t), name) for some in ((3, 2), (1,)) for name in "ab" for t in some
    ]
    # What came out is said at once: the rest may never come.
    assert sum(line.startswith("  Small up, 3 tokens, bfloat16, a: ") for line in made) == 1


def test_peers_compile_ahead_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def counted(run: Run, layer: Layer) -> peers_products.Layered:
        real = Peer(True).make(run, layer)

        def bind(x: Any, routing: grouped_products.Routing) -> Callable[[], Any]:
            calls.append((layer.name, x.shape[0]))
            return real.bind(x, routing)

        return peers_products.Layered(bind, real.values, 16.0, True)

    def broken(run: Run, layer: Layer) -> Any:
        raise RuntimeError("no such\nlayout")

    install(
        monkeypatch,
        ProductPeer("slow", "mxfp4", counted),
        ProductPeer("quick", "bfloat16", counted, compiles=False),
        ProductPeer("broken", "mxfp4", broken),
        ProductPeer("other", "nvfp4", counted),
    )
    monkeypatch.setattr(devices, "find_device", WithTensors)
    monkeypatch.setattr(peers_build, "TOKENS", (1, 6))
    said: list[str] = []
    errors = peers_build.build(
        Options(("6 tokens", "small down"), ("mxfp4",)), layers=[UP, DOWN], jobs=1, say=said.append
    )
    assert sorted(calls) == [("Small down", 2), ("Small down", 12), ("Small up", 6)]
    assert errors == [f"{x.name}, broken mxfp4: RuntimeError: no such layout" for x in (UP, DOWN)]
    assert said[0] == "4 layers of peers in 1 processes" and said[1:3] == errors


def test_rows_are_filled_up_to_blocks_by_expert() -> None:
    offsets, rows = np.array([0, 3, 3, 4]), np.array([7, 5, 9, 1], np.int32)
    ids, owners = peers_products.padded_blocks(offsets, rows, 2)
    assert ids.tolist() == [7, 5, 9, 4, 1, 4] and owners.tolist() == [0, 0, 2]


def test_every_shape_that_the_budget_does_not_reach_is_in_the_table() -> None:
    other = DenseProduct(32, 64, 3, ratio=0.5)
    for module, shapes, labels in (
        (dense_products, [DENSE, other], [DENSE.label, other.label]),
        (grouped_products, [UP, DOWN], [x.label(t) for x in (UP, DOWN) for t in (1, 6)]),
    ):
        rows = run(module, shapes, budget=-1)
        assert [r.shape for r in rows] == labels
        assert all(r.us is None and "budget" in r.note for r in rows)


@pytest.mark.parametrize("fmt, kinds", [
    ("nvfp4", ("bfloat16",)), ("mxfp4", ("mxfp8_e4m3", "nvfp4")), ("mxfp4", ("fp8",))
])  # fmt: skip
def test_the_kernels_of_a_layer_are_built_before_it_is_measured(
    fmt: str, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling in between would spend the budget, and the first figures."""
    chosen = {"formats": (fmt,), "activations": kinds, "batch_invariant": True}
    for module, shapes in ((grouped_products, [UP, DOWN]), (dense_products, [DENSE])):
        calls = [one for call in module.calls(Options(**chosen), shapes)
                 for one in warm.expand(call)]  # fmt: skip
        built = set(warm.programs(calls, "sm_90a"))
        monkeypatch.setattr(module, "_checked", lambda *_: ("", ""))
        with warm.recording("sm_90a") as launches:
            rows = run(module, shapes, **chosen)
        assert not [r for r in rows if r.wrong]
        needed = {program for launch in launches for program in launch.programs}
        assert len(needed) > 2 and needed <= built


def test_rows_with_targets_come_first() -> None:
    """A budget that is too short for all leaves out what nothing is asked of."""
    order = grouped_products.in_order(["mxfp4", "nvfp4"], [DOWN, UP])
    assert order[0] == ("mxfp4", UP) and len(order) == 4
    rows = run(grouped_products, [DOWN, UP], formats=("mxfp4", "nvfp4"))
    assert {(r.shape, r.format) for r in rows} == {
        (layer.label(t), fmt) for layer in (UP, DOWN) for t in (1, 6) for fmt in ("mxfp4", "nvfp4")
    }
