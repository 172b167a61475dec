"""``nvfp4 tune``: the search, with a clock that is told; the table; what it says without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from nvfp4 import api, cache, plans_prepared, plans_products, plans_sm90, tuning, warm
from nvfp4 import compile as compiler
from nvfp4.bench import devices, timing, tuner, tuner_build
from nvfp4.bench.run import Options
from nvfp4.bench.shapes import GROUPED_PRODUCTS
from nvfp4.cli import tune as tune_command
from nvfp4.cli.main import program
from nvfp4.launch import Launch
from nvfp4.tuning import Choice, Table

from .pretended import Card

CARD = ("NVIDIA H200", 132)
CALL = {"call": "matmul", "a": "bfloat16", "b": "mxfp4", "m": 16, "n": 8192, "k": 8192}
GROUPED = {"call": "grouped_matmul", "a": "bfloat16", "b": "mxfp4", "m": 8, "n": 32, "k": 64,
           "experts": 2}  # fmt: skip
GOOD, BAD = (Choice("decode", 16, team, 2, 2, 2) for team in (4, 8))


def told(seconds: dict[Choice | None, float]) -> Callable[[Choice | None], float]:
    return lambda choice: seconds[choice]


def test_the_fastest_is_kept_where_it_saves_enough() -> None:
    outcome = tuner.search([BAD, GOOD], told({None: 1.0, GOOD: 0.9, BAD: 1.1}))
    assert outcome.choice == GOOD and outcome.tried == 2
    assert (outcome.formula_us, outcome.us) == (1e6, 0.9e6)
    outcome = tuner.search([BAD, GOOD], told({None: 1.0, GOOD: 0.99, BAD: 1.1}))
    assert outcome.choice is None and outcome.us == 0.99e6


def test_one_that_is_faster_only_once_is_not() -> None:
    times = {None: [1.0, 0.91], GOOD: [0.9, 0.9]}
    outcome = tuner.search([GOOD], lambda choice: times[choice].pop(0))
    assert outcome.choice is None and outcome.formula_us == 0.91e6


def test_what_fails_and_what_no_time_is_left_for_is_said() -> None:
    def measure(choice: Choice | None) -> float:
        if choice == BAD:
            raise ValueError("another result")
        return 1.0 if choice is None else 0.5

    outcome = tuner.search([BAD, GOOD], measure)
    assert outcome.choice == GOOD and "another result" in outcome.notes[0]
    outcome = tuner.search([GOOD], measure, lambda: True)
    assert outcome.choice is None and outcome.notes == ("the budget is spent",)


def own_choice(launch: Launch) -> Choice:
    """The choice that says how a launch is divided."""
    made = dict(launch.program.constants)
    more = {"resident": made["BLOCKS_PER_SM"]}
    if launch.program.kernel.name == "matmul_sm90":
        return Choice("sm90", tokens=made["CHUNK"], split=made["SPLIT"], **more)
    names = ("chunk", "team", "stripes", "slots", "warps")
    return Choice("decode", **more, **{name: made[name.upper()] for name in names})


def test_every_candidate_is_a_choice_that_its_plan_takes() -> None:
    for call, kernels in ((CALL, {"decode", "sm90"}), ({**CALL, "m": 4096}, {"sm90"}), (GROUPED,
                          {"decode", "sm90"})):  # fmt: skip
        product = tuner.product_of(call, CARD, "sm_90a")
        found = tuner.candidates(product)
        assert {c.kernel for c in found} == kernels and len(set(found)) == len(found)
        for choice in found:
            assert not choice.wrong()
            with tuner.forced(choice), warm.recording("sm_90a", CARD) as launches:
                options = {k: v for k, v in product.call.items() if k != "call"}
                warm.CALLS[product.call["call"]](**options)
            made = dict(launches[-1].program.constants)
            assert launches[-1].program.kernel.name == f"matmul_{choice.kernel}"
            assert own_choice(launches[-1]) == choice
            assert made["THREADS"] == (384 if choice.kernel == "sm90" else 32 * choice.warps)
            assert tuner.division(launches[-1]) == tuner.said(choice)
    assert not [c for c in tuner.candidates(tuner.product_of(CALL, CARD, "sm_80"))
                if c.kernel == "sm90"]  # fmt: skip


SIZES = ((5760, 2880), (4096, 14336), (33792, 8192), (1024, 2048))
KINDS: list[dict[str, Any]] = [{}, {"b": "mxfp8_e4m3", "epilogue": "swiglu"}]
KINDS += [{"call": "grouped_matmul", "experts": experts} for experts in (4, 32, 128)]
SOME = [
    CALL | {"m": rows, "n": n, "k": k} | more
    for n, k in SIZES
    for rows in (1, 16, 100, 512, 4096)
    for more in KINDS
]
SOME += [GROUPED | {"m": 2, "n": 14336, "k": 4096}]


def test_there_is_one_model_and_what_the_formulas_choose_is_its_best() -> None:
    """Of tiles that cost 2 % more the formulas take that of more rows; few rows have neighbours."""
    kinds = set()
    for call in SOME:
        product = tuner.product_of(call, CARD, "sm_90a")
        own = own_choice(product.launch)
        if own.kernel == "sm90":
            times = tuner.sm90_times(product)
            assert times[own] <= 1.02 * min(times.values()), call
        else:
            assert own in tuner.decode_times(product), call
        kinds.add((own.kernel, own.split, own.warps, own.resident, own.tokens > 128))
        with tuner.forced(own):
            again = tuner._launches(product.call, CARD, "sm_90a")[-1]
        assert tuner._identity(again) == tuner._identity(product.launch), call
    # All kinds of divisions were there: clusters, small blocks, two a multiprocessor, large tiles.
    assert {k[1] for k in kinds} >= {1, 2} and {k[2] for k in kinds} == {4, 6, 8}
    assert any(k[0] == "sm90" and k[3] == 2 for k in kinds) and any(k[4] for k in kinds)


def test_the_tuners_order_is_that_of_the_plans_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan's model that changes changes the order: here every tile costs what it must not."""
    product = tuner.product_of(CALL | {"m": 4096}, CARD, "sm_90a")
    found = [c.tokens for c in tuner.candidates(product) if c.split == 1]
    assert found[0] > 100 and len(found) > 5
    times = tuner.sm90_times(product)
    ranked = [times[c] for c in tuner.candidates(product)]
    assert ranked == sorted(ranked)
    # Of two alike the first has as many blocks a multiprocessor as the formulas.
    small = tuner.product_of(GROUPED | {"m": 2048, "n": 5760, "k": 2880, "experts": 128},
                             CARD, "sm_90a")  # fmt: skip
    alike = [c.resident for c in tuner.candidates(small) if c.tokens == 32]
    assert small.constants["BLOCKS_PER_SM"] == 2 and alike == [2, 1]
    monkeypatch.setattr(plans_sm90, "time_of_tile", lambda tokens: 1.0 if tokens == 40 else 1e3)
    assert tuner.product_of(CALL | {"m": 4096}, CARD, "sm_90a").constants["CHUNK"] == 40
    times = tuner.sm90_times(product)
    assert min(times, key=times.__getitem__).tokens == 40
    monkeypatch.setattr(plans_prepared, "time_of", lambda cut, *_: 9.0 - cut.stripes)
    few = tuner.product_of(CALL | {"m": 1}, CARD, "sm_90a")
    assert {c.stripes for c in tuner.candidates(few)[:9]} == {2}


def test_blocks_of_four_and_six_warps_are_tried() -> None:
    """What the formulas choose among is, and others near it."""
    call = GROUPED | {"m": 4, "n": 5760, "k": 2880, "experts": 128, "groups": 4}
    product = tuner.product_of(call, CARD, "sm_90a")
    times = tuner.decode_times(product)
    assert {4, 6, 8} == {c.warps for c in times} == {c.warps for c in tuner.candidates(product)}
    assert {c.team for c in times if c.warps == 6} == {1, 2, 3, 6}
    for each in (0.0, 7.0, 8.0, 100.0):
        for stripes in (1, 2):
            facts = (product.constants, 8, stripes, 2880, 4, None, each)
            for cut in plans_prepared._cuts(*facts):
                assert Choice("decode", 8, *cut[2:], warps=cut.warps) in times
    assert all(plans_prepared.chosen(c, product.constants, 2880) for c in times)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"call": "quantize"}, "matmul or grouped_matmul"),
        ({"a": "mxfp8"}, "a must be bfloat16"),
        ({"out_dtype": "nvfp4"}, "out_dtype must be"),
        ({"batch_invariant": True}, "batch_invariant must be left out"),
        ({"m": 0}, "m must be at least 1"),
        ({"call": "grouped_matmul", "experts": 0}, "experts must be at least 1"),
    ],
)
def test_other_calls_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        tuner.product_of(CALL | changes, CARD, "sm_90a")


@pytest.mark.parametrize("call", [CALL | {"n": 48, "k": 64}, GROUPED, GROUPED | {
    "row_indices": 12, "expert_ids": True, "epilogue": "swiglu"}])  # fmt: skip
def test_a_timer_times_the_call_under_the_choice(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "copies_of", lambda fmt, shape: 2)
    seen = []
    fill = Card.fill

    def noted(card: Card, array: np.ndarray, value: float) -> None:
        seen.append(tuning.find(CARD, lambda: pytest.fail("a table was asked")))
        fill(card, array, value)

    monkeypatch.setattr(Card, "fill", noted)
    measure = tuner.timer(Card(), tuner.product_of(call, CARD, "sm_90a"))
    assert measure(None) == pytest.approx(1e-3 / 40, rel=0.3)
    assert measure(GOOD) > 0 and seen == [None, GOOD]


def test_a_choice_with_another_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "copies_of", lambda fmt, shape: 1)
    product = tuner.product_of(CALL | {"n": 48, "k": 64}, CARD, "sm_90a")
    real = api.matmul

    def call(a: Any, b: Any, *, out: Any, **more: Any) -> Any:
        real(a, b, out=out, **more)
        if tuning.find(None, lambda: pytest.fail("")) is not None:
            out[0, 0] += 100
        return out

    monkeypatch.setattr(api, "matmul", call)
    measure = tuner.timer(Card(), product)
    measure(None)
    with pytest.raises(ValueError, match="another result"):
        measure(GOOD)


class Inline(Executor):
    """Builds at once, in this process; from the `late`-th program on not at all."""

    def __init__(self, late: int = 10**6) -> None:
        self.tasks: list[Future[Any]] = []
        self.late = late

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        task: Future[Any] = Future()
        if len(self.tasks) < self.late:
            task.set_result(fn(*args, **kwargs))
        self.tasks.append(task)
        return task

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for task in self.tasks:
            task.cancel()


class Built:
    spill_bytes = (0, 0)


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that are built; teams of eight with two stripes are not."""
    made: list[Any] = []

    def build(program: Any, arch: str) -> Built:
        made.append(program)
        constants = dict(program.constants)
        if constants.get("TEAM") == 8 and constants.get("STRIPES") == 2:
            raise RuntimeError("too many registers")
        return Built()

    monkeypatch.setattr(compiler, "build", build)
    monkeypatch.setattr(compiler, "find", lambda program, arch: None)
    return made


def test_divisions_are_built_once_and_those_that_do_not_build_are_said(builds: list[Any]) -> None:
    products = [tuner.product_of(CALL | {"m": m}, CARD, "sm_90a") for m in (1, 2)]
    builder = tuner_build.Builder(pool=Inline())
    for product in products:
        builder.want(product, [BAD, GOOD])
    assert len(builds) == len(set(builds)) and builder.waiting == 0
    for product in products:
        usable, notes = builder.usable(product, [BAD, GOOD], 0)
        assert usable == [GOOD] and "too many registers" in notes[0]


def test_divisions_that_spill_are_not_timed(
    builds: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Built, "spill_bytes", (0, 16))
    product = tuner.product_of(CALL | {"m": 1}, CARD, "sm_90a")
    builder = tuner_build.Builder(pool=Inline())
    builder.want(product, [GOOD])
    usable, notes = builder.usable(product, [GOOD], 0)
    assert usable == [] and "spills 16 bytes" in notes[0]


def test_what_is_not_built_in_time_is_said(builds: list[Any]) -> None:
    product = tuner.product_of(CALL | {"m": 1}, CARD, "sm_90a")
    needed = len(warm.programs([product.call], *reversed((CARD, "sm_90a"))))
    builder = tuner_build.Builder(pool=Inline(late=needed))
    builder.want(product, [GOOD])
    usable, notes = builder.usable(product, [GOOD], 0.01)
    assert usable == [] and notes[0].endswith("not built in time")
    builder = tuner_build.Builder(pool=Inline(late=0))
    builder.want(product, [])
    with pytest.raises(TimeoutError):
        builder.usable(product, [], 0)
    builder.close()


def test_the_products_of_a_suite_are_those_that_it_measures() -> None:
    options = Options(only=("512 tokens", "8192 x 8192, 16"), formats=("mxfp4", "mxfp8_e4m3"))
    found = tuner.suite_products(["grouped-matmul", "matmul"], options, CARD, "sm_90a")
    names = [product.label for product in found]
    assert len(names) == 2 * (7 + 1) and "gpt-oss-120b up, 512 tokens, mxfp4" in names
    judged = [GROUPED_PRODUCTS[0].label(512) + f", {fmt}" for fmt in ("mxfp4", "mxfp8_e4m3")]
    assert names.index(judged[0]) < names.index("8192 x 8192, 16 rows, mxfp8_e4m3")
    assert names.index(judged[1]) >= 9  # nothing is asked of it: after all that have targets
    up = next(p for p in found if p.label == "gpt-oss-120b up, 512 tokens, mxfp4")
    assert (up.rows, up.groups, up.key.columns) == (2048, 128, 5760)
    planned = [tuner.division(p.launch) for p in found]
    assert any(p.startswith("sm90 tokens ") for p in planned)
    assert any(p.startswith("decode chunk ") for p in planned)


def test_the_most_promising_divisions_come_first_and_few_are_tried() -> None:
    product = tuner.product_of(GROUPED | {"n": 5760, "k": 2880, "experts": 128, "m": 2048},
                               CARD, "sm_90a")  # fmt: skip
    found = tuner.candidates(product)
    kinds = [c.kernel for c in found]
    assert kinds.count("sm90") <= tuner.MOST["sm90"] and set(kinds) == {"decode", "sm90"}
    assert kinds.count("decode") <= tuner.MOST["decode"]
    launches = set()
    for choice in (None, *found):
        with tuner.forced(choice):
            launches.add(tuner._identity(tuner._launches(product.call, CARD, "sm_90a")[-1]))
    assert len(launches) == len(found) + 1  # no two alike, none that of the formulas
    # Tiles that hold the 16 rows of most ranges; of blocks of which two share a multiprocessor.
    assert next(c for c in found if c.kernel == "sm90").tokens in (24, 32)
    one = tuner.product_of(CALL | {"m": 1}, CARD, "sm_90a")
    assert {c.resident for c in tuner.candidates(one)} >= {3, 4}


# The command -------------------------------------------------------------------------------------


class Ready:
    """A builder that has built all."""

    waiting = 0

    def __init__(self, jobs: int | None) -> None:
        pass

    def want(self, product: Any, choices: Any) -> None:
        pass

    def usable(self, product: Any, choices: Any, seconds: float) -> Any:
        return choices, []

    def close(self) -> None:
        pass


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NVFP4_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(devices, "find_device", lambda purpose: Card())
    monkeypatch.setattr(tune_command, "_present", lambda: (CARD, "sm_90a"))
    monkeypatch.setattr(tuner_build, "Builder", Ready)
    monkeypatch.setattr(tuner, "candidates", lambda p: [BAD, GOOD] if p.rows < 512 else [BAD])
    seconds = {None: 1.0, GOOD: 0.8}
    monkeypatch.setattr(
        tuner, "timer", lambda device, product: lambda choice: seconds.get(choice, 2.0)
    )
    file = tmp_path / "shapes.json"
    file.write_text(json.dumps([CALL]))
    return file


def test_what_is_better_is_stored_and_planned_afterwards(
    shapes: Path, runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shapes.with_name("table.json")
    result = runner.invoke(program, ["tune", "--shapes", str(shapes), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert f"NVFP4_TUNE_TABLE={out}" in result.stdout
    line = next(x for x in result.stdout.splitlines() if x.endswith("stored"))
    assert line.split("  ")[0] == "16 x 8192 x 8192, bfloat16 x mxfp4" and "+25.0%" in line
    assert line.count("decode chunk 16") == 2 and "team 4 stripes 2" in line
    table = tuning.read(out)
    assert list(table.choices.values()) == [GOOD]
    assert next(iter(table.notes.values()))["formula_us"] == 1e6
    monkeypatch.setenv(tuning.VARIABLE, str(out))
    tuning.forget()
    plans_products.matmul.cache_clear()
    import nvfp4

    assert nvfp4.plan_matmul(16, 8192, 8192, card="H200").constants["TEAM"] == 4
    monkeypatch.undo()
    tuning.forget()
    plans_products.matmul.cache_clear()


def test_a_row_goes_when_the_formulas_are_as_good(shapes: Path, runner: CliRunner) -> None:
    file = tuning.file_of_card(CARD[0])
    key = tuner.product_of(CALL, CARD, "sm_90a").key
    other = key._replace(depth=64)
    tuning.write(file, Table(*CARD, {key: BAD, other: BAD}, {key: {}, other: {}}))
    shapes.write_text(json.dumps([CALL | {"m": 4096}, CALL]))
    result = runner.invoke(program, ["tune", "--shapes", str(shapes)])
    assert result.exit_code == 0 and "formulas kept" in result.stdout
    assert tuning.read(file).choices == {other: BAD, key: GOOD}


def test_the_budget_counts_everything_and_what_it_leaves_out_is_said(
    shapes: Path, runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(10**6))
    real = timing.Deadline
    monkeypatch.setattr(timing, "Deadline", lambda budget: real(budget, lambda: next(ticks)))
    shapes.write_text(json.dumps([CALL | {"m": [1, 2, 4, 16, 64]}]))
    out = shapes.with_name("table.json")
    command = ["tune", "--shapes", str(shapes), "-o", str(out), "--budget", "20"]
    result = runner.invoke(program, command)
    assert result.exit_code == 0, result.output
    lines = [x for x in result.stdout.splitlines() if "bfloat16 x mxfp4" in x]
    assert len(lines) == 5
    late = [x for x in lines if x.endswith("left out, the budget is spent")]
    assert 1 <= len(late) < 5 and lines[-len(late) :] == late
    assert 1 <= len(tuning.read(out).choices) <= 5 - len(late)


def test_what_fails_of_a_product_is_said_and_the_others_are_tuned(
    shapes: Path, runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = tuner.timer

    def timer(device: Any, product: Any) -> Any:
        if product.rows == 1:
            raise MemoryError("the card is full")
        return measure(device, product)

    monkeypatch.setattr(tuner, "timer", timer)
    shapes.write_text(json.dumps([CALL | {"m": [1, 16]}]))
    result = runner.invoke(program, ["tune", "--shapes", str(shapes)])
    assert result.exit_code == 0 and "MemoryError: the card is full" in result.stdout
    assert len(tuning.read(tuning.file_of_card(CARD[0])).choices) == 1


def test_products_of_one_row_are_tuned_once(shapes: Path, runner: CliRunner) -> None:
    """The last of them would decide about all."""
    shapes.write_text(json.dumps([CALL | {"m": [9, 16, 4096]}]))
    result = runner.invoke(program, ["tune", "--shapes", str(shapes)])
    lines = [x for x in result.stdout.splitlines() if "bfloat16 x mxfp4" in x]
    assert result.exit_code == 0 and len(lines) == 3, result.output
    assert lines[1].endswith("left out, its row is that of 9 x 8192 x 8192, bfloat16 x mxfp4")
    assert "3 products" in result.stderr and lines[0].endswith("stored")


def test_a_place_that_cannot_be_written_is_said_before_anything_is_timed(
    shapes: Path, runner: CliRunner
) -> None:
    out = shapes / "table.json"  # in a file
    result = runner.invoke(program, ["tune", "--shapes", str(shapes), "-o", str(out)])
    assert result.exit_code == 2 and "cannot be written" in result.stderr
    assert "to build" not in result.stderr


def test_suites_are_tuned_by_name(shapes: Path, runner: CliRunner) -> None:
    only = ["--only", "8192 x 8192, 16", "--only", "Qwen3-30B-A3B up, 1 token"]
    command = ["tune", "--suite", "matmul,grouped-matmul", "--format", "nvfp4", *only]
    result = runner.invoke(program, command)
    assert result.exit_code == 0, result.output
    assert "8192 x 8192, 16 rows, nvfp4" in result.stdout
    assert "Qwen3-30B-A3B up, 1 token, nvfp4" in result.stdout
    for more, said in ((["--suite", "quantize"], "a suite must be one of"),
                       (["--suite", "matmul", "--only", "nothing"], "no such shape")):  # fmt: skip
        result = runner.invoke(program, ["tune", *more])
        assert result.exit_code == 2 and said in result.stderr


def test_rows_of_other_kernels_are_dropped(
    shapes: Path, runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tuning.file_of_card(CARD[0])
    key = tuner.product_of(CALL, CARD, "sm_90a").key._replace(depth=64)
    with monkeypatch.context() as other:
        other.setattr(tuning, "kernels", lambda: "of yesterday")
        tuning.write(file, Table(*CARD, {key: BAD}, {key: {}}))
    result = runner.invoke(program, ["tune", "--shapes", str(shapes)])
    assert result.exit_code == 0 and "1 rows of other kernels are dropped" in result.stderr
    assert list(tuning.read(file).choices.values()) == [GOOD]


def test_mistakes_are_said(shapes: Path, runner: CliRunner) -> None:
    bad = shapes.with_name("bad.json")
    bad.write_text("{")
    result = runner.invoke(program, ["tune", "--shapes", str(shapes), "-o", str(bad)])
    assert result.exit_code == 2 and "is no table" in result.stderr
    tuning.write(bad, Table("NVIDIA H100 PCIe", 114, {}, {}))
    result = runner.invoke(program, ["tune", "--shapes", str(shapes), "-o", str(bad)])
    assert result.exit_code == 2 and "is of NVIDIA H100 PCIe with 114 multi" in result.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "default_cache", lambda: cache.Cache([]))
        result = runner.invoke(program, ["tune", "--shapes", str(shapes)])
    assert result.exit_code == 2 and "name a file by -o" in result.stderr
    shapes.write_text(json.dumps([CALL | {"a": "mxfp8"}]))
    result = runner.invoke(program, ["tune", "--shapes", str(shapes)])
    assert result.exit_code == 2 and "bfloat16 to be tuned" in result.stderr
    result = runner.invoke(program, ["tune"])
    assert result.exit_code == 2 and "--shapes" in result.stderr


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "shapes.json"
    file.write_text(json.dumps([CALL]))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "nvfp4", "tune", "--shapes", str(file)],
        capture_output=True, text=True, cwd=root, timeout=120,
        env={**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("nvfp4: tuning needs a GPU, and none can be used here")
    assert len(done.stderr.splitlines()) == 1
