"""The picture of a run: a bar a figure, the reference as a line, what a target wants as a tick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import Report, Row

__all__ = ["draw"]

# As in the demonstration: distinct for colour-blind readers too.
COLOURS = {
    "nvfp4": "#0072b2",
    "mxfp4": "#d55e00",
    "mxfp8_e4m3": "#009e73",
    "mxfp8_e5m2": "#aa4499",
    "bfloat16": "#888888",
}
INK, FAINT = "#222222", "#dddddd"


def draw(report: Report, file: Path) -> None:
    """Draw the picture into `file`; its suffix chooses the kind.

    Rates where there are rates (quantisers), else fractions of the floor or of cuBLAS (products).
    A group without either, such as the host's times, is left to the table.

    Raises
    ------
    OSError
        The file cannot be written.
    ValueError
        There is nothing to draw.
    """
    from matplotlib.figure import Figure

    groups: dict[str, list[Row]] = {}
    for r in report.rows:
        if r.us is not None and _value(r) is not None:
            groups.setdefault(r.group, []).append(r)
    if not groups:
        raise ValueError("no row has a rate or a ratio to draw")
    heights = [len(rows) + 1.2 * len({r.shape for r in rows}) for rows in groups.values()]
    figure = Figure(
        figsize=(11, 1.2 + 0.2 * sum(heights) + 0.6 * len(groups)),
        layout="constrained",
        facecolor="white",
    )
    card = report.environment.get("card") or "no card"
    figure.suptitle(f"nvfp4 bench {report.suite}: {card}", x=0.01, ha="left", color=INK)
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (group, rows) in zip(panels, groups.items(), strict=True):
        _panel(axes, group, rows)
    figure.savefig(file, dpi=120)


def _value(r: Row) -> float | None:
    """TB/s, or the ratio."""
    return r.tbps if r.tbps is not None and r.floor_us is None else r.ratio


def _panel(axes: Any, group: str, rows: list[Row]) -> None:
    rates = rows[0].tbps is not None and rows[0].floor_us is None
    y, last, ticks, names = 0.0, None, [], []
    reference = None
    for r in rows:
        if r.shape != last:
            y += 1.2
            axes.text(0, y + 0.4, r.shape, fontsize=8, fontweight="bold", color=INK, va="bottom")
            reference, last = None, r.shape
        y += 1
        value = _value(r) or 0.0
        own = r.what == "nvfp4"
        kind, _, variant = r.format.partition(", ")
        if r.what == "copy":
            reference = value
        axes.barh(
            y, value, 0.85, color=COLOURS.get(kind, INK), hatch="xx" if r.wrong else None,
            alpha=0.35 if not own else 0.7 if variant else 1.0,
        )  # fmt: skip
        if rates and reference is not None:
            axes.plot([reference] * 2, [y - 0.45, y + 0.45], color=INK, linewidth=1)
        verdict = {True: "", False: "  missed", None: ""}[r.met] + ("  WRONG" if r.wrong else "")
        axes.text(
            value, y, f" {value:.2f}  {r.us:.4g} us{verdict}", va="center", fontsize=7,
            color="#b00020" if verdict else INK,
        )  # fmt: skip
        ticks.append(y)
        names.append(f"{r.format} {'' if own else r.what}".strip())
    axes.set_yticks(ticks, names, fontsize=7)
    axes.set_ylim(y + 0.8, 0)
    axes.set_xlim(0, 1.25 * max(_value(r) or 0.0 for r in rows))
    axes.set_title(group, loc="left", fontsize=9, color=INK)
    what = "TB/s, read and written; the line is a copy" if rates else "fraction of the reference"
    axes.set_xlabel(what, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color=FAINT)
    axes.set_axisbelow(True)
