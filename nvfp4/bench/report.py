"""What was measured: a row a figure, as a table, JSON, Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .targets import Target
from .timing import Timing

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Report", "Row", "brief", "failed", "markdown", "row", "skipped", "table"]

#: Of the JSON; raised when a field changes its meaning.
SCHEMA = 1


@dataclass
class Row:
    """One figure, or why there is none.

    Attributes
    ----------
    group
        What it is compared within: rows of one group stand together.
    shape, format, what
        What was done; `what` is ``"nvfp4"`` for this package, the name of a peer, ``"copy"``.
    us, low_us, high_us
        Microseconds of a call: median and quartiles; None: not measured.
    tbps, tflops
        Bytes (read and written) and operations a second, in units of 10^12.
    floor_us
        Time below which the call cannot be.
    ratio, reference
        Speed in units of the reference's.
    target, met
        In words; whether it is met, None where there is none or it cannot be said.
    checked
        What was compared, or ``"WRONG: ..."``; empty for what has no result.
    note
        Why it was skipped, and other remarks.
    calls, replays
        Calls in a graph, replays that count.
    """

    group: str
    shape: str
    format: str
    what: str
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    tbps: float | None = None
    tflops: float | None = None
    floor_us: float | None = None
    ratio: float | None = None
    reference: str = ""
    target: str = ""
    met: bool | None = None
    checked: str = ""
    note: str = ""
    calls: int = 0
    replays: int = 0

    @property
    def wrong(self) -> bool:
        """Whether the result was not what it must be."""
        return self.checked.startswith("WRONG")


def row(
    group: str,
    shape: str,
    format: str,
    what: str,
    timing: Timing,
    *,
    moved: float | None = None,
    flops: float | None = None,
    floor: float | None = None,
    references: dict[str, float] | None = None,
    target: Target | None = None,
    checked: str = "",
    note: str = "",
) -> Row:
    """The row of a measured time.

    Parameters
    ----------
    moved, flops
        Bytes and operations of a call.
    floor
        Seconds.
    references
        Name -> the seconds that the reference would take for this call: its speed in bytes or
        operations, applied to ours. The target's own is taken, else the first.
    target
    """
    seconds = timing.median
    known = dict(references or {})
    if floor is not None:
        known.setdefault("floor", floor)
    wanted = target.reference if target is not None and target.reference else next(iter(known), "")
    ratio = known[wanted] / seconds if wanted in known else None
    return Row(
        group,
        shape,
        format,
        what,
        us=seconds * 1e6,
        low_us=timing.low * 1e6,
        high_us=timing.high * 1e6,
        tbps=None if moved is None else moved / seconds * 1e-12,
        tflops=None if flops is None else flops / seconds * 1e-12,
        floor_us=None if floor is None else floor * 1e6,
        ratio=ratio,
        reference=wanted if ratio is not None else "",
        target="" if target is None else str(target),
        met=None if target is None else target.met(ratio=ratio, us=seconds * 1e6),
        checked=checked,
        note=note,
        calls=timing.calls,
        replays=timing.replays,
    )


def skipped(
    group: str, shape: str, format: str, what: str, why: str, target: Target | None = None
) -> Row:
    """The row of something that was not measured; a target that was not measured is not met."""
    return Row(
        group, shape, format, what, target="" if target is None else str(target),
        note=f"skipped: {why}",
    )  # fmt: skip


def failed(
    group: str, shape: str, format: str, error: Exception, target: Target | None = None
) -> Row:
    """The row of a call of ours that raised: as bad as a wrong result."""
    text = " ".join(str(error).split())
    return Row(
        group, shape, format, "nvfp4", target="" if target is None else str(target),
        checked=f"WRONG: {type(error).__name__}: {text}"[:200],
    )  # fmt: skip


@dataclass
class Report:
    """A run of one suite.

    Attributes
    ----------
    suite
    environment
        Card, driver, versions, commit, command.
    rows
    seconds
        Of the run; what was built before it apart.
    stopped
        What ended it early, so that rows are missing.
    """

    suite: str
    environment: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    stopped: str = ""

    @property
    def wrong(self) -> list[Row]:
        """The rows whose results are wrong."""
        return [r for r in self.rows if r.wrong]

    def counts(self) -> dict[str, int]:
        """How many targets are met, missed, and not decided."""
        judged = [r for r in self.rows if r.target]
        return {
            "met": sum(r.met is True for r in judged),
            "missed": sum(r.met is False for r in judged),
            "not measured": sum(r.met is None for r in judged),
            "wrong": len(self.wrong),
        }

    def as_json(self) -> dict[str, Any]:
        """Plain data, for ``json.dump``."""
        return {
            "schema": SCHEMA,
            "suite": self.suite,
            "environment": self.environment,
            "seconds": self.seconds,
            "stopped": self.stopped,
            "targets": self.counts(),
            "rows": [asdict(r) for r in self.rows],
        }


# --- text -----------------------------------------------------------------------------------------


def duration(us: float) -> str:
    """Microseconds with three digits or more, milliseconds from 10,000 us on."""
    if us >= 10_000:
        return f"{us / 1000:.1f} ms"
    return f"{us:.1f}" if us >= 100 else f"{us:.2f}"


def brief(r: Row) -> str:
    """A measured row in a line."""
    parts = [] if r.us is None else [f"{duration(r.us)} us"]
    if r.ratio is not None:
        parts.append(f"{r.ratio:.2f} of {r.reference}")
    if r.target and not r.wrong:
        parts.append(f"{r.target}: {_met(r)}")
    if r.wrong:
        parts.append(r.checked)
    return f"  {r.shape}, {r.format}, {r.what}: {', '.join(parts)}"


def _optional(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def _met(r: Row) -> str:
    if r.wrong:
        return "WRONG"
    if not r.target:
        return ""
    return {True: "yes", False: "NO", None: "?"}[r.met]


#: Heading -> the text of a row's cell.
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "shape": lambda r: r.shape,
    "format": lambda r: r.format,
    "by": lambda r: r.what,
    "us": lambda r: "" if r.us is None else duration(r.us),
    "TB/s": lambda r: _optional(r.tbps),
    "TFLOP/s": lambda r: _optional(r.tflops, ".0f"),
    "floor us": lambda r: "" if r.floor_us is None else duration(r.floor_us),
    "ratio": lambda r: "" if r.ratio is None else f"{r.ratio:.2f} {r.reference}",
    "target": lambda r: r.target,
    "met": _met,
    "checked": lambda r: r.checked,
    "note": lambda r: r.note,
}
_ALWAYS = ("shape", "format", "by", "us")
_RIGHT = ("us", "TB/s", "TFLOP/s", "floor us", "ratio")


def _used(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Columns that say something, and their cells."""
    rows = list(rows)
    cells = {name: [text(r) for r in rows] for name, text in _COLUMNS.items()}
    return {name: column for name, column in cells.items() if name in _ALWAYS or any(column)}


def _groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for r in rows:
        found.setdefault(r.group, []).append(r)
    return found


def table(rows: Iterable[Row], title: str = "") -> Table:
    """A table for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    cells = _used(rows)
    made = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in cells:
        made.add_column(
            name,
            justify="right" if name in _RIGHT else "left",
            no_wrap=name not in ("note", "checked"),
        )
    for index, r in enumerate(rows):
        style = "bold red" if r.wrong else "dim" if r.us is None or r.what != "nvfp4" else ""
        texts = [Text(column[index]) for column in cells.values()]
        if "met" in cells and not r.wrong and r.target:
            colour = {True: "green", False: "red", None: "yellow"}[r.met]
            texts[list(cells).index("met")].stylize(colour)
        last = index + 1 == len(rows) or rows[index + 1].shape != r.shape
        made.add_row(*texts, style=style, end_section=last)
    return made


def markdown(report: Report) -> str:
    """The rows as Markdown tables, one a group, with a line about the card above."""
    lines = [_provenance(report.environment), ""]
    for group, rows in _groups(report.rows).items():
        cells = _used(rows)
        lines += [f"#### {group}", ""]
        lines.append("| " + " | ".join(cells) + " |")
        lines.append("|" + "|".join("---:" if name in _RIGHT else "---" for name in cells) + "|")
        for index, r in enumerate(rows):
            texts = [column[index].replace("|", "\\|") for column in cells.values()]
            if r.what == "nvfp4" and r.us is not None:
                texts[list(cells).index("us")] = f"**{texts[list(cells).index('us')]}**"
            lines.append("| " + " | ".join(texts) + " |")
        lines.append("")
    counts = report.counts()
    lines.append("Targets: " + ", ".join(f"{n} {name}" for name, n in counts.items()) + ".")
    if report.stopped:
        lines.append(f"**Not complete**: {report.stopped}")
    return "\n".join(lines)


def _provenance(environment: dict[str, Any]) -> str:
    parts = [environment.get("card", "unknown card")]
    if environment.get("driver"):
        parts.append(f"driver {environment['driver']}")
    parts += [f"{name} {v}" for name, v in environment.get("versions", {}).items() if v]
    commit = environment.get("commit") or "no commit"
    parts.append(f"{commit[:12]}, sources {environment.get('sources', '?')}")
    return f"{', '.join(parts)}: `{environment.get('command', '')}`"


def print_report(report: Report, console: Any) -> None:
    """All groups, and what came out."""
    from rich.text import Text

    console.print(Text(_provenance(report.environment)), soft_wrap=True)
    for group, rows in _groups(report.rows).items():
        console.print()
        console.print(table(rows, group))
    counts = report.counts()
    said = ", ".join(f"{n} {name}" for name, n in counts.items())
    spent = ", ".join(f"{name} {value:.0f} s" for name, value in report.seconds.items())
    console.print(Text(f"\nTargets: {said}. Time: {spent}."))
    if report.stopped:
        console.print(Text(f"Not complete: {report.stopped}", style="bold red"))
