"""The picture of the demonstration: what each format costs, and how large its errors are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .job import Measured

__all__ = ["draw"]

# Distinct for colour-blind readers too; a format has the same colour in both panels.
COLOURS = {
    "nvfp4": "#0072b2",
    "mxfp4": "#d55e00",
    "mxfp8_e4m3": "#009e73",
    "mxfp8_e5m2": "#aa4499",
}
INK, FAINT = "#222222", "#dddddd"


def draw(measured: list[Measured], title: str, file: Path) -> None:
    """Draw the picture into `file`; its suffix (.png, .svg, .pdf) chooses the kind.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    from matplotlib.figure import Figure

    # A figure of its own: no window, and no state that other code could share.
    figure = Figure(figsize=(11, 5), layout="constrained", facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    _signal_to_noise(left, measured)
    _distribution(right, measured)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=9)
    figure.savefig(file, dpi=150)


def _signal_to_noise(axes: Any, measured: list[Measured]) -> None:
    """Three bars a format: experts, tokens and their product."""
    height = 0.26
    for place, m in enumerate(measured):
        colour = COLOURS[m.format]
        bars = (("experts", m.weights_db), ("tokens", m.rows_db), ("product", m.product_db))
        for i, (name, value) in enumerate(bars):
            y = place + (i - 1) * height
            main = name == "product"
            axes.barh(y, value, height * 0.88, color=colour if main else _pale(colour))
            axes.text(0.4, y, name, va="center", fontsize=8, color="white" if main else INK)
            axes.text(value + 0.3, y, f"{value:.1f}", va="center", fontsize=8, color=INK)
    names = [f"{m.format}\n{m.ratio:.0%} of bf16" for m in measured]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("dB")
    axes.set_title("Signal to quantisation noise (more is better)", loc="left", fontsize=10)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)


def _pale(colour: str) -> tuple[float, ...]:
    """The colour mixed with white."""
    from matplotlib.colors import to_rgb

    return tuple(0.4 * part + 0.6 for part in to_rgb(colour))


def _distribution(axes: Any, measured: list[Measured]) -> None:
    """Share of the outputs whose error is at most x: a curve a format."""
    share = np.linspace(0.01, 0.9999, 500)
    for m in measured:
        errors = np.quantile(m.errors, share)
        axes.plot(errors, share * 100, color=COLOURS[m.format], linewidth=2, label=m.format)
        axes.plot(np.median(m.errors), 50, "o", color=COLOURS[m.format], markersize=5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_ylim(0, 102)
    axes.set_yticks(range(0, 101, 25), [f"{y}%" for y in range(0, 101, 25)])
    axes.set_xlabel("error of an output, as a share of the RMS of all outputs")
    axes.set_title("Outputs of the product with at most this error", loc="left", fontsize=10)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
