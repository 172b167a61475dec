"""Tables of measured divisions: what plans take from them, and files that are none."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nvfp4
from nvfp4 import plans_products, tuning
from nvfp4.planned import Plan
from nvfp4.tuning import Choice, Key, Table

CARD = ("NVIDIA H200", 132)
KEY = Key("bfloat16", "mxfp4", "plain", "none", 8192, 8192, 0, 16)
CHOICE = Choice("decode", chunk=16, team=4, stripes=1, slots=2, resident=2)
NOW = {"key": KEY._asdict(), "choice": CHOICE._asdict(), "kernels": tuning.kernels()}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that the environment names, not written yet; no other table."""
    monkeypatch.setenv("NVFP4_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "table.json"
    monkeypatch.setenv(tuning.VARIABLE, str(file))
    forget()
    yield file
    monkeypatch.undo()
    forget()


def forget() -> None:
    tuning.forget()
    plans_products.matmul.cache_clear()
    plans_products.grouped_matmul.cache_clear()


def written(file: Path, **changes: Any) -> None:
    found = Table(*CARD, {KEY: CHOICE}, {KEY: {"us": 10.0}})._replace(**changes)
    tuning.write(file, found)


def planned(rows: int = 16, **options: Any) -> Plan:
    return nvfp4.plan_matmul(rows, 8192, 8192, card="H200", **options)


def test_a_table_overrules_the_formulas_for_its_own_class_of_shapes(table: Path) -> None:
    written(table)
    plan = planned()
    assert plan.tuned and (plan.constants["TEAM"], plan.constants["STRIPES"]) == (4, 1)
    assert "chosen by a table" in str(plan)
    assert planned(9).tuned and not planned(8).tuned and not planned(17).tuned
    assert planned().constants != planned(8).constants
    for other in ({"b": "nvfp4"}, {"a": "float16"}, {"out_dtype": "mxfp4"}, {"experts": 1}):
        assert not planned(**other).tuned, other
    with pytest.warns(RuntimeWarning, match="is of NVIDIA H200"):
        assert not nvfp4.plan_matmul(16, 8192, 8192, card="H100").tuned


def test_a_table_chooses_the_kernel_too(table: Path) -> None:
    key = KEY._replace(groups=8, rows=64)
    written(table, choices={key: Choice("sm90", tokens=48)})
    plan = planned(64, experts=8)
    assert plan.kernel == "matmul_sm90" and plan.constants["CHUNK"] == 48
    many = KEY._replace(rows=4096)
    written(table, choices={many: CHOICE})
    forget()
    assert planned(4096).kernel == "matmul_decode" and planned(2048).kernel == "matmul_sm90"


def test_a_table_says_warps_clusters_and_blocks_of_a_multiprocessor(table: Path) -> None:
    few, many = KEY._replace(rows=1), KEY._replace(rows=64)
    ranges = KEY._replace(groups=8, rows=256)
    choices = {
        few: Choice("decode", 8, 3, 2, 3, 4, warps=6),
        many: Choice("sm90", tokens=64, split=4, resident=1),
        ranges: Choice("sm90", tokens=24, resident=1),
    }
    written(table, choices=choices)
    assert tuning.read(table).choices == choices
    plan = planned(1)
    names = ("WARPS", "TEAM", "STRIPES", "SLOTS", "BLOCKS_PER_SM", "THREADS")
    assert plan.tuned and [plan.constants[n] for n in names] == [6, 3, 2, 3, 4, 192]
    assert plan.launches[0].block == (192, 1, 1)
    plan = planned(64)
    assert plan.tuned and (plan.constants["CHUNK"], plan.launches[0].cluster) == (64, (4, 1, 1))
    plan, formulas = planned(256, experts=8), planned(128, experts=8)
    assert plan.tuned and (plan.constants["CHUNK"], plan.constants["BLOCKS_PER_SM"]) == (24, 1)
    assert not formulas.tuned and formulas.constants["BLOCKS_PER_SM"] == 2
    written(table, choices={ranges: Choice("sm90", tokens=24)})  # as the formulas have it
    forget()
    assert planned(256, experts=8).constants["BLOCKS_PER_SM"] == 2


def test_what_a_row_does_not_name_is_as_before_it_could_be_named(table: Path) -> None:
    """Rows without warps have blocks of eight; the sum of no row's bytes is another one."""
    written(table)
    row = NOW | {"choice": {"kernel": "decode", **{n: getattr(CHOICE, n) for n in (
        "chunk", "team", "stripes", "slots", "resident")}}}  # fmt: skip
    table.write_text(json.dumps(json.loads(table.read_text()) | {"rows": [row]}))
    assert tuning.read(table).choices == {KEY: CHOICE}
    assert planned().tuned and planned().constants["WARPS"] == 8


DENSE, RANGES = {"rows": 16}, {"rows": 512, "experts": 8}


@pytest.mark.parametrize(
    "key, choice, options",
    [
        # A quantised result in blocks of 32 needs two stripes.
        (KEY._replace(result="codes 32"), CHOICE, DENSE | {"out_dtype": "mxfp4"}),
        # Registers: of blocks of four warps, of steps under way, of rows of a tile.
        (KEY, Choice("decode", 8, 4, 2, 2, 8, warps=4), DENSE),
        (KEY, Choice("decode", 8, 8, 1, 2, 5), DENSE),
        (KEY, Choice("decode", 8, 8, 2, 4, 2), DENSE),
        (KEY, Choice("decode", 16, 8, 1, 3, 2), DENSE),
        (KEY._replace(rows=512, groups=8), Choice("sm90", tokens=160), RANGES),
        (KEY._replace(rows=512, groups=8), Choice("sm90", tokens=40, resident=2), RANGES),
        (KEY._replace(rows=512, groups=8), Choice("decode", 8, 8, 1, 2, 5), RANGES),
        # Ranges whose depth nobody shares, and a cluster of too many rows.
        (KEY._replace(rows=512, groups=8), Choice("sm90", tokens=64, split=2), RANGES),
        (KEY._replace(rows=512), Choice("sm90", tokens=144, split=2), {"rows": 512}),
        (KEY._replace(rows=64), Choice("sm90", tokens=32, split=2, resident=2), {"rows": 64}),
    ],
)
def test_a_choice_that_a_product_cannot_have_is_left(
    table: Path, key: Key, choice: Choice, options: dict[str, Any]
) -> None:
    """The formulas say the kernel, too."""
    assert not choice.wrong()
    written(table, choices={})
    expected = planned(**options)
    forget()
    written(table, choices={key: choice})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = planned(**options)
    assert plan.launches == expected.launches and not plan.tuned


def test_a_choice_that_one_launch_of_two_cannot_have_is_left_by_both(table: Path) -> None:
    """On FP8 tensor cores: 120 rows have registers for matrices of e4m3, and not for others."""
    key = KEY._replace(a="e4m3", rows=512, groups=8)
    options: dict[str, Any] = {"a": "e4m3", "compute": "fp8", "experts": 8}
    for tokens, tuned in ((120, False), (48, True)):
        written(table, choices={key: Choice("sm90", tokens=tokens)})
        forget()
        plan = planned(512, **options)
        made = [dict(one.program.constants) for one in plan.launches]
        assert [one["MATRICES"] for one in made] == ["narrow", "others"]
        assert plan.tuned is tuned
        assert (made[0]["CHUNK"], made[1]["CHUNK"]) == ((48, 48) if tuned else (80, 80))


def test_a_row_that_is_not_taken_is_not_said_to_be_where_the_formulas_divide_alike(
    table: Path,
) -> None:
    """It differs in blocks of a multiprocessor, too many, or in steps under way."""
    written(table, choices={})
    expected = planned(1)
    names = ("CHUNK", "TEAM", "STRIPES", "SLOTS", "BLOCKS_PER_SM")
    chunk, team, stripes, slots, resident = (expected.constants[name] for name in names)
    own = Choice("decode", chunk, team, stripes, slots, resident)
    for choice, tuned in ((own, True), (own._replace(resident=resident + 2), False)):
        written(table, choices={KEY._replace(rows=1): choice})
        forget()
        plan = planned(1)
        assert plan.launches == expected.launches and plan.tuned is tuned


@pytest.mark.parametrize("card", ["H200", "B200"])
def test_a_batch_invariant_product_asks_no_table(table: Path, card: str) -> None:
    """On Blackwell a row would let three steps be under way, of which some are spilled."""
    name = {"H200": CARD, "B200": ("NVIDIA B200", 148)}[card]
    key = KEY._replace(depth=6144, rows=1)

    def plan(**options: Any) -> Plan:
        forget()
        return nvfp4.plan_matmul(1, 8192, 6144, card=card, **options)

    written(table, card=name[0], processors=name[1], choices={})
    expected = plan(batch_invariant=True)
    written(
        table,
        card=name[0],
        processors=name[1],
        choices={key: Choice("decode", 8, 4, 2, 2, 2)},
    )
    assert plan().tuned
    invariant = plan(batch_invariant=True)
    assert invariant.launches == expected.launches and not invariant.tuned


def test_a_share_of_a_card_has_no_warning_of_the_table_of_the_package(table: Path) -> None:
    """Nobody asked for that one; of the user's own there is a warning."""
    table.unlink(missing_ok=True)
    written(tuning.file_of_card(CARD[0]), processors=66, choices={KEY: CHOICE})
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.delenv(tuning.VARIABLE)
        warnings.simplefilter("error")
        assert tuning.find((CARD[0], 66), lambda: KEY) == CHOICE
        forget()
        with pytest.raises(RuntimeWarning, match="with 66 multiprocessors, and this is"):
            tuning.find(CARD, lambda: KEY)


def test_a_depth_of_few_steps_is_not_shared(table: Path) -> None:
    for choice in (Choice("decode", 8, 8, 1, 2, 2), Choice("sm90", tokens=64, split=8)):
        written(table, choices={KEY._replace(depth=448): choice})
        forget()
        plan = nvfp4.plan_matmul(16, 8192, 448, card="H200")
        assert not plan.tuned and plan.kernel == "matmul_decode" and plan.constants["TEAM"] < 8


def test_the_users_table_in_the_cache_counts_where_the_environment_names_none(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(tuning.VARIABLE)
    forget()
    written(tuning.file_of_card(CARD[0]))
    assert tuning.file_of_card(CARD[0]).parent.parent == table.parent / "cache"
    assert planned().tuned


def test_the_environment_may_name_a_file_in_the_home(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NVFP4_CACHE_DIR may."""
    monkeypatch.setenv("HOME", str(table.parent))
    monkeypatch.setenv("USERPROFILE", str(table.parent))
    monkeypatch.setenv(tuning.VARIABLE, f"~/{table.name}")
    written(table)
    assert planned().tuned


def test_tables_are_read_once(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(table)
    reads = []
    read = tuning.read

    def noted(file: Path) -> Table:
        reads.append(file)
        return read(file)

    monkeypatch.setattr(tuning, "read", noted)
    for rows in range(1, 30):
        planned(rows)
    assert reads.count(table) == 1


@pytest.mark.parametrize(
    "text, match",
    [
        (None, "no such file"),
        ("", "not JSON, or cut off"),
        ("[" * 100_000, "not JSON, or cut off"),
        ('{"kind": "nvfp4 tune table", "schema": 1, "rows": [', "not JSON, or cut off"),
        ("[1]", "not a table"),
        ({"kind": "other"}, "not a table"),
        ({"schema": 2}, "schema must be 1; got 2"),
        ({"rows": None}, "must be a name, a number and a list"),
        ({"card": "NVIDIA H100 80GB HBM3"}, "is of NVIDIA H100 80GB HBM3 with 132"),
        ({"processors": 16}, "with 16 multiprocessors"),
        ({"rows": [3]}, "row 1: key and choice must be whole"),
        ({"rows": [NOW | {"key": {}}]}, "row 1: key and choice must be whole"),
        ({"rows": [NOW | {"key": KEY._asdict() | {"rows": "16"}}]}, "rows must be of type int"),
        ({"rows": [NOW | {"key": KEY._asdict() | {"rows": 12}}]}, "rows must be a power of two"),
        ({"rows": [NOW | {"key": KEY._asdict() | {"rows": 0}}]}, "rows must be a power of two"),
        ({"rows": [NOW | {"key": KEY._asdict() | {"depth": -64}}]}, "depth must not be negative"),
        ({"rows": [NOW | {"choice": {"kernel": "sm90", "tokens": 17}}]}, "tokens of 'sm90' must"),
        ({"rows": [NOW | {"choice": CHOICE._asdict() | {"warps": 5}}]}, "4, 6, 8; got 5"),
        ({"rows": [NOW | {"choice": CHOICE._asdict() | {"team": 3}}]}, "team must divide warps"),
        ({"rows": [NOW | {"choice": CHOICE._asdict() | {"tokens": 16}}]}, "tokens of 'decode' m"),
        ({"rows": [NOW | {"choice": CHOICE._asdict() | {"warps": True}}]}, "got True"),
        (
            {"rows": [NOW | {"choice": {"kernel": "sm90", "tokens": 40, "split": 2}}]},
            "tokens must be a multiple of 8 * split, 16; got 40",
        ),
        ({"rows": [NOW | {"choice": {"kernel": "fast"}}]}, "kernel must be one"),
    ],
)
def test_a_file_that_is_no_table_of_the_card_is_warned_of_and_ignored(
    table: Path, text: Any, match: str
) -> None:
    written(table, choices={})
    expected = planned(16)
    forget()
    table.unlink()
    if isinstance(text, dict):
        written(table)
        text = json.dumps(json.loads(table.read_text()) | text)
    if text is not None:
        table.write_text(text)
    with pytest.warns(RuntimeWarning, match="tune table") as caught:
        plan = planned(16)
    assert match in str(caught[0].message) and str(table) in str(caught[0].message)
    assert not plan.tuned and plan.constants == expected.constants
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(15)  # not a second time


@pytest.mark.parametrize("named", [True, False])
def test_a_file_that_must_not_be_read_is_ignored(
    table: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """As in the home of another user; of a named file there is a warning."""
    if not named:
        monkeypatch.delenv(tuning.VARIABLE)

    def refused(file: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "stat", refused)
    monkeypatch.setattr(Path, "read_text", lambda file, **_: refused(file))
    forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert tuning.find(CARD, lambda: KEY) is None
    assert len(caught) == named
    assert all("Permission denied" in str(one.message) for one in caught)


@pytest.mark.parametrize("change", [{"kernels": "of yesterday"}, {"kernels": None},
                                    {"kernels": None, "choice": {"kernel": "gone"}}])  # fmt: skip
def test_rows_of_other_kernels_are_left_out_without_a_word(
    table: Path, change: dict[str, Any]
) -> None:
    other = NOW | {"key": KEY._replace(rows=32)._asdict()}
    written(table)
    text = json.loads(table.read_text()) | {"rows": [NOW | change, other]}
    table.write_text(json.dumps(text))
    found = tuning.read(table)
    assert list(found.choices) == [KEY._replace(rows=32)] and found.stale == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not planned(16).tuned and planned(32).tuned


def test_the_digest_of_kernels_is_of_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments, docstrings and empty lines change nothing; code does, in kernels and formulas."""
    now = tuning.kernels()
    read = Path.read_text
    changed = {"file": "", "text": ""}

    def text(file: Path, **more: Any) -> str:
        return read(file, **more) + (changed["text"] if file.name == changed["file"] else "")

    monkeypatch.setattr(Path, "read_text", text)

    def digest(file: str, added: str) -> str:
        changed.update(file=file, text=added)
        return tuning.kernels.__wrapped__()

    for file in (
        "matmul_sm90.py",
        "matmul_decode.py",
        "decode_steps.py",
        "decode_results.py",
        "plans_prepared.py",
        "plans_sm90.py",
        "sm90_rows.py",
    ):
        assert digest(file, '\n\n# words\n"""More\nwords."""\n') == now
        assert digest(file, "\nPENDING = 4\n") != now, file
    assert digest("quantize.py", "\nPENDING = 4\n") == now


def test_the_shipped_table_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    files = list((Path(tuning.__file__).parent / "tables").glob("*.json"))
    assert files
    for file in files:
        found = tuning.read(file)
        assert file.stem == tuning.slug(found.card)
        assert found.choices.keys() == found.notes.keys()
        assert all("us" in note for note in found.notes.values())
        # Stale rows would be ignored without a word: `nvfp4 tune` measures them again. Where the
        # machine code of their kernels was compared and is the same, their digest may be renewed.
        assert found.choices and not found.stale, f"{file.name}: rows of other kernels"
