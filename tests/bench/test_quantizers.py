"""The suite of quantisers, run on a pretended card: what is measured, checked and said."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from nvfp4 import warm
from nvfp4.bench import fused_quantizers, host_costs, peers_quantizers, quantizers
from nvfp4.bench.report import Report, Row
from nvfp4.bench.run import Options, Run
from nvfp4.bench.shapes import DENSE, GROUPED, DenseShape, GroupedShape
from nvfp4.bench.timing import BUFFERS_IN_L2, Deadline

from .pretended import Card

SMALL = DenseShape(40, 128, most_us=4.0)
IN_L2 = DenseShape(1, 256, in_l2=True, limits=(("nvfp4", 2.0), ("mxfp4", 2.0)))
RANGES = GroupedShape(4, 4 * 48, columns=128)
DECODE = GroupedShape(16, 8, columns=128, decode=True, in_l2=True)


@pytest.fixture(autouse=True)
def few_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two inputs in place of hundreds, and no processes."""
    monkeypatch.setattr(
        quantizers, "rotations", lambda moved, in_l2=False: BUFFERS_IN_L2 if in_l2 else 2
    )
    monkeypatch.setattr(host_costs, "_first_calls", lambda run: None)


def run(
    dense: Any = (),
    grouped: Any = (),
    card: Card | None = None,
    budget: float = 1e6,
    fused: fused_quantizers.Shape | None = None,
    **options: Any,
) -> list[Row]:
    made = Run(
        card or Card(),
        Options(**{"only": ("x", "experts"), "formats": (), "peers": False} | options),
        Deadline(budget, lambda: 0.0),
        Report("quantize", {}),
    )
    quantizers.measure(made, dense, grouped, fused)
    return made.report.rows


def by(rows: list[Row], **wanted: Any) -> list[Row]:
    return [r for r in rows if all(getattr(r, name) == value for name, value in wanted.items())]


def test_every_format_is_measured_beside_a_copy_and_checked_in_full() -> None:
    rows = run([SMALL])
    assert [r.format for r in by(rows, what="nvfp4")] == [
        "nvfp4", "nvfp4, g = 1", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2",
    ]  # fmt: skip
    assert {r.checked for r in by(rows, what="nvfp4")} == {"all bytes"}
    (copy,) = by(rows, what="copy")
    # 40 calls in a graph that takes 1 ms; 40 * 128 elements of two bytes, read and written.
    assert copy.us == pytest.approx(25) and copy.calls == 40
    assert copy.tbps == pytest.approx(4 * 40 * 128 / 25e-6 * 1e-12)


def test_the_ratio_is_of_bytes_a_second_and_the_target_is_judged_by_it() -> None:
    rows = run([SMALL], formats=("mxfp8_e4m3",))
    (r,) = by(rows, what="nvfp4")
    # The same time for 3 + 1/32 bytes an element as for the copy's 4.
    assert r.ratio == pytest.approx((3 + 1 / 32) / 4)
    assert (r.reference, r.met, r.target) == ("copy", False, "≥ 0.95 copy or ≤ 4 us")
    (r,) = by(run([SMALL], formats=("mxfp8_e4m3",), card=Card(100e-6)), what="nvfp4")
    assert (r.us, r.met) == (pytest.approx(2.5), True)


def test_a_small_shape_stays_in_the_cache_and_is_judged_by_its_time() -> None:
    card = Card(1e-4)
    rows = run([IN_L2], formats=("nvfp4",), card=card)
    assert card.captured == [48] * 4  # two copies, two formats: 16 buffers, three times each
    assert [r.met for r in by(rows, what="nvfp4")] == [False, False]
    assert [r.target for r in by(rows, what="nvfp4")] == ["≤ 2 us"] * 2


def test_ranges_are_compared_with_a_dense_call_of_the_same_rows() -> None:
    rows = run((), [RANGES])
    assert {r.format for r in rows} == {"nvfp4", "nvfp4, g = 1", "mxfp8_e4m3"}
    for r in by(rows, what="nvfp4"):
        assert (r.ratio, r.reference, r.met) == (pytest.approx(1), "dense", True)
        assert r.checked == "73 rows" or r.checked.endswith(" rows")
    assert len(by(rows, what="dense, same rows")) == 3


def test_decode_shapes_have_a_time_as_target_and_no_dense_twin() -> None:
    rows = run((), [DECODE], formats=("mxfp4",), card=Card(1e-4))
    assert [(r.what, r.target, r.met) for r in rows] == [("nvfp4", "≤ 3 us", True)]
    assert not any(r.wrong for r in rows)


def test_wrong_bytes_are_found_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Any] = []
    made = quantizers.outputs
    monkeypatch.setattr(
        quantizers, "outputs", lambda *a, **b: results.append(made(*a, **b)) or results[-1]
    )
    for dense, grouped, part in (
        ((SMALL,), (), "codes"),
        ((SMALL,), (), "scales"),
        ((), (DECODE,), "codes"),
        ((), (DECODE,), "scales"),
    ):
        card = Card()

        def spoil(part: str = part) -> None:
            if results:
                getattr(results[-1][-1], part).reshape(-1)[0] ^= 1

        card.spoil = spoil
        rows = run(dense, grouped, card, formats=("mxfp4",))
        (r,) = by(rows, what="nvfp4")
        assert r.wrong, part
        assert part in r.checked


def test_bytes_that_are_not_written_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    call = quantizers.api.quantize

    class Lazy:
        """Forgets the last byte of the scales."""

        grouped_quantize = staticmethod(quantizers.api.grouped_quantize)

        @staticmethod
        def quantize(x: Any, *args: Any, out: Any, **more: Any) -> Any:
            last = out.scales.reshape(-1)[-1]
            call(x, *args, out=out, **more)
            out.scales.reshape(-1)[-1] = last

    monkeypatch.setattr(quantizers, "api", Lazy)
    (r,) = by(run([SMALL], formats=("mxfp4",)), what="nvfp4")
    assert r.checked == "WRONG: two replays differ, or bytes were not written"


def test_what_the_budget_does_not_reach_is_in_the_table() -> None:
    rows = run([SMALL], [DECODE], budget=-1)
    assert rows and all(r.us is None and "budget" in r.note for r in rows)
    judged = [r for r in rows if r.target]
    assert len(judged) == 5 + 3 and all(r.met is None for r in judged)


def test_only_and_format_choose() -> None:
    rows = run([SMALL, IN_L2], [RANGES], only=("40x128",), formats=("mxfp4",))
    assert {r.shape for r in rows} == {"40 x 128"}
    assert {r.format for r in rows} == {"bfloat16", "mxfp4"}


def test_the_calls_to_build_are_those_that_are_measured() -> None:
    from nvfp4 import warm

    options = Options(only=("1 x 7168", "experts"), formats=("nvfp4",))
    calls = [one for call in quantizers.calls(options) for one in warm.expand(call)]
    assert {c["call"] for c in calls} == {"quantize", "grouped_quantize"}
    assert {c.get("encode_scale") for c in calls} == {None, "array", "by_expert"}
    assert [1, 7168] in [c["shape"] for c in calls]
    found = warm.programs(calls, "sm_90a")
    assert 2 <= len(found) <= len(calls)


def test_all_shapes_of_the_tables_are_there() -> None:
    sizes = [(s.rows, s.columns) for s in DENSE if s.judged]
    assert sizes == [
        (8192, 7168), (512, 7168), (8192, 2880), (65536, 7168), (1, 7168), (32, 7168),
    ]  # fmt: skip
    ranges = [(g.experts, g.rows // g.experts, g.skewed) for g in GROUPED if not g.decode]
    assert sorted(ranges) == sorted([
        (256, 192, False), (128, 192, False), (32, 192, False), (8, 192, False), (48, 48, False),
        (256, 768, False), (8, 3072, False), (256, 192, True),
    ])  # fmt: skip
    assert {g.rows for g in GROUPED if g.decode} == {8, 16, 32, 64}
    assert (
        DENSE[0].target("nvfp4") is not None and str(DENSE[4].target("mxfp8_e4m3")) == "≤ 1.43 us"
    )


def test_offsets_are_equal_skewed_or_routed() -> None:
    assert quantizers.offsets_of(GroupedShape(4, 12)).tolist() == [0, 3, 6, 9, 12]
    skewed = quantizers.offsets_of(GroupedShape(4, 12, skewed=True))
    assert skewed.tolist() == [0, 0, 12, 12, 12]
    routed = quantizers.offsets_of(GroupedShape(256, 8, decode=True))
    assert routed[0] == 0 and routed[-1] == 8 and routed.dtype == np.int32


def test_host_costs_are_measured_without_allocations_or_the_row_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once = host_costs.host_seconds
    monkeypatch.setattr(
        host_costs, "host_seconds", lambda call, wait: once(call, wait, batch=1, batches=2)
    )

    class Greedy(Card):
        count = 0

        def allocations(self) -> int:
            self.count += 1
            return self.count

    for card, note in ((Card(), ""), (Greedy(), "1 allocations in 10 calls, none are allowed")):
        made = Run(card, Options(formats=("mxfp8_e4m3",)), Deadline(9e9), Report("quantize", {}))
        for _, fmt, call in host_costs._public_calls(made)[:1]:
            r = host_costs._repeated(made, "quantize", fmt, call)
        assert r.note == note and r.target == "≤ 10 us"
        assert r.met is False  # the golden model takes longer than that
        assert r.checked == ("" if note else "allocates nothing")


def test_a_peer_s_codes_are_recognised_and_compared_under_the_rounding_that_fits() -> None:
    from nvfp4 import golden
    from nvfp4.formats import MXFP4

    x = Card().random(64 * 64).reshape(64, 64)
    for rounding in ("floor", "rceil"):
        codes, scales, _ = golden.quantize(x, MXFP4, scale_rounding=rounding, scale_layout="linear")
        assert peers_quantizers.codes_of((scales, codes), 64 * 32) is codes
        share, name = peers_quantizers.fitting_rounding(x, codes, "mxfp4")
        assert (share, name) == (1.0, rounding)
    assert peers_quantizers.codes_of((scales,), 64 * 32) is None


def test_a_call_that_raises_is_a_row_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = quantizers.api.quantize

    def quantize(x: Any, fmt: str, **more: Any) -> Any:
        if fmt == "mxfp4":
            raise ValueError("no such kernel")
        return real(x, fmt, **more)

    monkeypatch.setattr(quantizers.api, "quantize", quantize)
    rows = run([SMALL], formats=("mxfp4", "mxfp8_e4m3"))
    (bad,) = by(rows, format="mxfp4")
    assert bad.wrong and bad.checked == "WRONG: ValueError: no such kernel" and bad.target
    (good,) = by(rows, format="mxfp8_e4m3")
    assert good.checked == "all bytes"


OTHERS = fused_quantizers.Shape(64, 128, 4)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_quantizers, "rotations", lambda moved: 2)


def test_gates_norms_and_counted_rows_are_measured_beside_a_copy_and_checked(others: None) -> None:
    rows = by(run(fused=OTHERS, only=("64 x 128", "half of")), group=fused_quantizers.GROUP)
    shapes = [k.label(OTHERS) for k in fused_quantizers.KINDS for _ in k.formats]
    assert [r.shape for r in rows] == shapes and "4 x 16 x 128, half of the rows counted" in shapes
    assert {r.checked for r in rows} == {"all bytes", "3 matrices"}, rows
    assert {r.reference for r in rows} == {"copy"} and not any(r.target for r in rows)
    # 40 calls in a graph that takes 1 ms; a sum reads two matrices and writes one of two bytes.
    size = 64 * 128
    (sum_,) = by(rows, shape="64 x 128, rmsnorm of a sum", format="mxfp8_e4m3")
    assert sum_.tbps == pytest.approx((6 * size + size + size / 32) / 25e-6 * 1e-12)


@pytest.mark.parametrize("kind", fused_quantizers.KINDS, ids=lambda k: k.name)
def test_a_wrong_byte_of_the_others_is_found(
    others: None, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right result of an input that is a little another one."""
    for name in ("quantize", "swiglu_quantize", "rmsnorm_quantize"):
        real = getattr(fused_quantizers.api, name)

        def wrong(x: Any, *rest: Any, real: Any = real, **more: Any) -> Any:
            return real(x * 1.5 if "out" in more else x, *rest, **more)

        monkeypatch.setattr(fused_quantizers.api, name, wrong)
    rows = by(run(fused=OTHERS, only=(kind.label(OTHERS),)), group=fused_quantizers.GROUP)
    assert rows and all(r.checked.startswith("WRONG") for r in rows), rows


def test_the_calls_of_the_others_are_those_that_are_measured(others: None) -> None:
    options = Options(("64 x 128", "half of"), (), peers=False)
    made = fused_quantizers.calls(options, OTHERS)
    assert len(made) == sum(len(k.formats) for k in fused_quantizers.KINDS)
    programs = warm.programs([one for c in made for one in warm.expand(c)], "sm_90a")
    assert programs


def test_the_others_are_measured_by_a_process_that_has_imported_nothing_else() -> None:
    """What tests import beside it may be what a benchmark lacks."""
    lines = (
        "from nvfp4.bench import fused_quantizers as f, quantizers as q",
        "from nvfp4.bench.report import Report",
        "from nvfp4.bench.run import Options, Run",
        "from nvfp4.bench.timing import Deadline",
        "from tests.bench.pretended import Card",
        "f.rotations = lambda moved: 2",
        "options = Options(('rmsnorm', 'swiglu'), (), peers=False)",
        "r = Run(Card(), options, Deadline(9e9), Report('x', {}))",
        "q.measure(r, (), (), f.Shape(64, 128, 4))",
        "print({row.checked for row in r.report.rows})",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "{'all bytes'}\n", done.stdout + done.stderr
