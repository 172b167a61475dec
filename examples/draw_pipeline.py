"""Draw what a block of the Blackwell product does, from the trace of a simulated run, as SVG.

    python examples/draw_pipeline.py docs/blackwell.svg

Nothing here is measured: time is counted in turns of the simulated machine's scheduler, which
picks at random who goes on, so the picture shows what may overlap, and what waits for what.
"""

import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np

import nvfp4
from nvfp4 import plans_blackwell

ROWS, COLUMNS, DEPTH, TILE_N, TILE_K = 128, 384, 1024, 128, 256
STEPS = DEPTH // TILE_K
COLOURS = ("#0072b2", "#d55e00", "#009e73")  # a tile of the result each
INK, FAINT = "#222222", "#e4e4e4"
LEFT, TOP, LINE, WIDTH = 190, 58, 22, 1000


def traced():
    """The trace of a product of three tiles by one block, and its stages of shared memory."""
    rng = np.random.default_rng(0)
    a = nvfp4.quantize(rng.standard_normal((ROWS, DEPTH), np.float32), "nvfp4")
    b = nvfp4.quantize(rng.standard_normal((COLUMNS, DEPTH), np.float32), "nvfp4")
    with (
        mock.patch.object(plans_blackwell, "PROCESSORS", {"sm_100a": 1}),
        mock.patch.object(plans_blackwell, "tile_of", lambda *facts: (TILE_N, TILE_K)),
        nvfp4.simulate("sm_100a", schedule=7, checks=False, trace=True) as machine,
    ):
        nvfp4.matmul(a, b)
    names = {process for process, *_ in machine.trace.events}
    stages = int(re.search(r"STAGES=(\d+)", min(names)).group(1))
    return machine.trace.events, stages


def loads(events, stages):
    """Bars of the ring: (row, from, to, tile, text) of each stage that arrives."""
    spans = [
        (start, start + duration)
        for _, _, name, start, duration, _ in events
        if name in ("tensor load", "bulk load")
    ]
    spans.sort()
    for k in range(len(spans) // 4):
        four = spans[4 * k : 4 * k + 4]
        yield f"stage {k % stages}", min(four)[0], max(end for _, end in four), k // STEPS, str(k)


def products(events):
    """Bars of the tensor core, whose operations go one after the other."""
    free, count = 0, 0
    ops = [event for event in events if event[2].startswith("tcgen05") and "engines" in event[0]]
    for _, _, name, start, duration, _ in sorted(ops, key=lambda event: event[3] + event[4]):
        end = start + duration
        tile = count // (4 * STEPS)
        if " " in name:  # tcgen05.mma and its shape
            yield "products", max(start, free), end, tile, ""
            count += 1
        elif name.endswith("cp"):
            yield "scales to tensor memory", max(start, free), end, tile, ""
        free = end


def turns(events):
    """Turns of warps, those of warps 0 to 3 by the tile whose accumulators they took last."""
    taken = dict.fromkeys(range(6), 0)
    for _, track, name, start, _, _ in events:
        warp = int(track.split()[1]) if track.startswith("warp") else -1
        if name.startswith("tcgen05.ld"):
            taken[warp] += 1
        elif name == "run":
            job = {4: "warp 4: copies", 5: "warp 5: products"}.get(warp, f"warp {warp}: results")
            tile = (taken[warp] - 1) // (TILE_N // 32) if taken[warp] else None
            yield job, start, start + 1, tile, ""


def svg(bars, rows):
    """The picture."""
    last = max(end for _, _, end, _, _ in bars)
    height = TOP + LINE * len(rows) + 46
    scale = WIDTH / last
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{LEFT + WIDTH + 20}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" fill="{INK}" font-size="14">One block, three tiles of {ROWS} x '
        f"{TILE_N} x {DEPTH} (nvfp4): a simulated run</text>",
    ]
    for tile, colour in enumerate(COLOURS):
        x = LEFT + 110 * tile
        out.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 18}" y="42" fill="{INK}">tile {tile}</text>')
    for place, row in enumerate(rows):
        y = TOP + LINE * place
        out.append(f'<text x="10" y="{y + 15}" fill="{INK}">{row}</text>')
        out.append(
            f'<rect x="{LEFT}" y="{y + 2}" width="{WIDTH}" height="{LINE - 4}" fill="{FAINT}"/>'
        )
    for row, start, end, tile, text in bars:
        x, y = LEFT + start * scale, TOP + LINE * rows.index(row) + 2
        width = max((end - start) * scale - 0.5, 1)
        colour = "#888888" if tile is None else COLOURS[tile]
        out.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LINE - 4}" fill="{colour}"/>'
        )
        if text:
            out.append(f'<text x="{x + 3:.1f}" y="{y + 13}" fill="white">{text}</text>')
    y = TOP + LINE * len(rows) + 16
    out += [
        f'<text x="{LEFT + mark * scale:.1f}" y="{y}" fill="{INK}">{mark}</text>'
        for mark in range(0, last + 1, 100)
    ]
    out.append(f'<text x="{LEFT}" y="{y + 18}" fill="{INK}">turns of the scheduler</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main(file):
    """Run, and write the picture to `file`."""
    events, stages = traced()
    bars = [*loads(events, stages), *products(events), *turns(events)]
    rows = ["warp 4: copies", *[f"stage {stage}" for stage in range(stages)], "warp 5: products"]
    rows += ["scales to tensor memory", "products"]
    rows += [f"warp {warp}: results" for warp in range(4)]
    Path(file).write_text(svg(bars, rows), encoding="utf-8")


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "blackwell.svg"
    main(target)
    print(target)
