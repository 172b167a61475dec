"""Plans of products of many rows with prepared weights on Hopper: ``kernels.matmul_sm90``.

``nvfp4.plans_products`` asks for them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .kernels.matmul_sm90 import shared_bytes, threads_of
from .kernels.prepared import HEADER
from .kernels.sm90_quantized_rows import PRODUCER_WARPS
from .kernels.sm90_weights import BLOCKS, BOX
from .launch import Launch
from .plans_prepared import (
    RECORD_BYTES,
    STEP_BYTES,
    check_groups,
    check_pairs,
    most_chunks,
    program_of,
)
from .program import Kernel
from .tensor_maps import MapOf
from .tiling import ceil_div
from .tuning import Choice

__all__ = ["prefill"]

#: Rows of a range, in the mean, from which on ``kernels.matmul_sm90`` is faster: where tiles of 16
#: rows are at least so many for each multiprocessor. (Its blocks do not share the depth of ranges:
#: with few tiles some multiprocessors have none.) Measured on an H200.
MANY_ROWS = ((30, 3), (10, 5), (3, 6), (0.9, 8), (0, 24))
#: The same of rows that are not copied as they are.
MANY_ROWS_MADE = ((10, 8), (3, 10), (0, 24))
#: The same of a dense product whose columns alone fill the card, and of one where they do not:
#: whose blocks may share the depth, and others.
MANY_ROWS_DENSE = (17, 40, 128)
#: Rows of a tile that registers allow.
MOST_TOKENS = 152
#: The same by elements of a quantised A, which is made bfloat16 on the way: of four bits, of eight.
MOST_TOKENS_QUANTIZED = (64, 40)
#: The same of rows without block scales: multiplied as they are, made bfloat16 on the way.
MOST_TOKENS_ROWS = (128, 112)
#: The same of float16 rows, each of which is multiplied as two of bfloat16; the second where the
#: result is quantised.
MOST_TOKENS_HALF = (144, 128)
#: The same where the result is quantised; the second of weights of eight bits or a quantised A.
MOST_TOKENS_CODES = (144, 96)
#: The same where blocks share the depth: their sums take 1 KiB a row, where the ring was.
MOST_TOKENS_SPLIT = 128
#: What sharing costs, in the unit of :func:`time_of_tile` for 128 steps: microseconds of an H200.
TIME_OF_SPLIT = 5.0
#: Clusters that a card has at once, of its multiprocessors: those of a cluster are neighbours, and
#: groups of neighbours are of 14 to 18, differently on each card.
CLUSTERS = {2: 0.97, 4: 0.88, 8: 0.75}
#: Rows of a tile up to which two blocks share a multiprocessor (of 40 registers do not suffice:
#: ``wgmma`` is serialized), where there are more tiles than multiprocessors: else two may have to
#: share one while another has none. (8 ranges of 4096 x 14336 with 64 rows, 128 tiles: 120 us, and
#: 70 with a block each.)
TOKENS_OF_TWO = 32
#: Shared memory of a multiprocessor that blocks may take.
SHARED = 222 << 10
#: Stages in shared memory that are worth their room.
MOST_STAGES = 10
#: Stages of float16 rows: one that is multiplied, one that is split, and two on their way.
STAGES_HALF = 4
#: In a batch-invariant product: rows of a tile, so that all rows are of one kind of instruction;
INVARIANT_TOKENS = 64
#: and tiles of 256 columns, of all matrices, from which on ``kernels.matmul_sm90`` makes it: with
#: fewer it leaves multiprocessors idle where there are few rows.
INVARIANT_TILES = 132


class Shape(NamedTuple):
    """What of a product decides about its tiles.

    Attributes
    ----------
    rows, groups
        groups is None in a dense product.
    across
        Tiles of columns.
    steps
        Of 64 of the depth.
    processors
    most
        Rows of a tile that there is room for.
    parts
        How often each row is multiplied.
    copied, shared
        Whether rows are multiplied as they are, and whether blocks may share the depth of a tile.
    """

    rows: int
    groups: int | None
    across: int
    steps: int
    processors: int
    most: int
    parts: int
    copied: bool
    shared: bool

    @property
    def mean(self) -> float:
        """Rows of a range, in the mean."""
        return self.rows / (self.groups or 1)


class Tile(NamedTuple):
    """How ``kernels.matmul_sm90`` divides a product.

    Attributes
    ----------
    tokens
        Rows of a tile.
    split
        Blocks that share its depth.
    resident
        Blocks of a multiprocessor.
    """

    tokens: int
    split: int = 1
    resident: int = 1


def many_rows(
    *,
    rows: int,
    columns: int,
    groups: int | None,
    processors: int,
    split: bool = True,
    made: bool = False,
) -> int:
    """Rows of a range, in the mean, from which on ``kernels.matmul_sm90`` makes a product."""
    tiles = ceil_div(columns, 256)
    if groups is None:
        return MANY_ROWS_DENSE[0 if 4 * tiles >= 3 * processors else 1 if split else 2]
    tiles *= min(rows, groups)
    limits = MANY_ROWS_MADE if made else MANY_ROWS
    return next(many for full, many in limits if tiles >= full * processors)


def prefill(
    constants: Mapping[str, Any],
    *,
    rows: int,
    columns: int,
    depth: int,
    groups: int | None,
    processors: int,
    kernel: Kernel,
    args: tuple[int | float | str, ...],
    choice: Choice | None = None,
    experts: int = 1,
    matrices: int | None = None,
) -> Launch | None:
    """Products of many rows with each matrix: ``kernels.matmul_sm90``, where it can make them.

    Parameters
    ----------
    constants, rows, columns, depth, groups, processors, kernel, args, choice, matrices
        As in ``plans_prepared.decode``; COMPUTE and MATRICES may be among the constants.
    experts
        Matrices of the weights.

    Raises
    ------
    UnsupportedError
        As in ``plans_prepared.decode``.
    """
    check_pairs(constants, columns)
    check_groups(groups)
    many = many_rows(
        rows=rows,
        columns=columns,
        groups=groups,
        processors=processors,
        split=_may_split(constants),
        made=not _are_copied(constants),
    )
    if choice is not None:
        many = 0 if choice.kernel == "sm90" else rows + 1
    if matrices is not None:
        choice = None
        many = 0 if matrices * ceil_div(columns, 256) >= INVARIANT_TILES else rows + 1
    nothing = not (experts and columns and depth)  # of which there is no tensor map
    if rows / (groups or 1) < many or nothing:
        return None
    shape = shape_of(constants, rows, columns, depth, groups, processors)
    tile = chosen(choice, shape)
    if matrices is not None:
        tile = alone(min(INVARIANT_TOKENS, shape.most), shape)
    if tile is None:
        tile = tile_of(shape)
    tokens, split, resident = tile
    wide = shape.across
    made = _are_made(constants)
    row, codes, record = _bytes_of_step(constants)
    shared = functools.partial(
        shared_bytes,
        tokens=tokens,
        step=codes + record,
        groups=groups,
        row=row,
        results=min(64, tokens // split) if _is_plain(constants) else 64,
    )
    room = SHARED // resident - shared(stages=0)
    # A warp that makes rows has every fourth step, one that loads them every second: with fewer
    # stages it would be two turns of the ring ahead, which parities do not tell from none.
    least = PRODUCER_WARPS if made else 2
    if split > 1:  # sums of all of the tile, where the ring was
        least = ceil_div(tokens << 10, tokens * row + BLOCKS * (codes + record))
    each = shared(stages=1) - shared(stages=0)
    most = min(MOST_STAGES, room // each)
    steps = 2 if _may_pair(constants, depth) and most // 2 >= max(3, least / 2) else 1
    stages = max(ceil_div(least, steps), most // steps)
    own: dict[str, Any] = {
        "GROUPED": groups is not None,
        "CHUNK": tokens,
        "HALF_TOKENS": tokens // 2,
        "SPLIT": split,
        "SHARE": tokens // 2 // split,
        "STAGES": stages,
        "STEPS": steps,
        "BLOCKS_PER_SM": resident,
        "WHOLE": depth % (64 * steps) == 0,
        "THREADS": threads_of(constants["A_ELEMENT"], constants["INPUT"]),
        "COMPUTE": constants.get("COMPUTE", "bfloat16"),
        "MATRICES": constants.get("MATRICES", "all"),
    }
    program = program_of(kernel, {**constants, **own}, groups)
    items = max(1, most_chunks(rows, tokens, groups) * wide)
    extents = (ceil_div(depth, 64), ceil_div(columns, 16), max(experts, 1))
    maps = (
        ("codes_map", _map_of("b_codes", codes, extents, steps)),
        ("records_map", _map_of("b_scales", record, extents, steps, header=HEADER)),
    )
    blocks = items * split if split > 1 else min(items, processors * resident)
    return Launch(
        program,
        (blocks, 1, 1),
        (own["THREADS"], 1, 1),
        shared(stages=steps * stages),
        ("codes_map", "records_map", *args),
        programmatic=True,
        maps=maps,
        cluster=(split, 1, 1),
    )


def _map_of(
    name: str, size: int, extents: tuple[int, int, int], steps: int, header: int = 0
) -> MapOf:
    """The map of `size` bytes a block and step of a buffer, of boxes of `steps` steps.

    `extents` are steps, blocks of 16 rows of the weights, matrices; each of these has a header.
    """
    of_block = size * extents[0]
    strides = (size, of_block, header + of_block * extents[1])
    box = (size // 4, steps, BOX, 1)
    return MapOf(name, "u32", (size // 4, *extents), strides, box, offset=header)


def _are_made(constants: Mapping[str, Any]) -> bool:
    """Whether rows of A are quantised, and made bfloat16 on the way."""
    return constants["A_ELEMENT"] != "none" and constants.get("COMPUTE") != "fp8"


def _parts(constants: Mapping[str, Any]) -> int:
    """How often each row of A is multiplied: those of float16 as two of bfloat16."""
    return 2 if constants["A_ELEMENT"] == "none" and not _are_copied(constants) else 1


def _bytes_of_step(constants: Mapping[str, Any]) -> tuple[int, int, int]:
    """Bytes of a row of A in a stage; of codes and scales of 16 rows of the weights."""
    row = 64 if constants.get("COMPUTE") == "fp8" else 128 * _parts(constants)
    codes = STEP_BYTES[constants["B_ELEMENT"] != "e2m1"]
    return row, codes, RECORD_BYTES[constants["B_SCALE"] == "e4m3"]


def _most_tokens(constants: Mapping[str, Any]) -> int:
    """Rows of a tile that registers allow."""
    made = _are_made(constants)
    if constants["A_ELEMENT"] == "none":
        of_half = MOST_TOKENS_HALF[constants["OUTPUT"] == "codes"]
        most = MOST_TOKENS if _are_copied(constants) else of_half
    elif constants["A_SCALE"] == "none":
        most = MOST_TOKENS_ROWS[made]
    else:
        most = MOST_TOKENS_QUANTIZED[constants["A_ELEMENT"] != "e2m1"]
    if constants["OUTPUT"] == "codes":
        most = min(most, MOST_TOKENS_CODES[constants["B_ELEMENT"] != "e2m1" or made])
    return most


def _tokens_that_fit(row: int, step: int, groups: int | None) -> int:
    """Rows of a tile of which STAGES_HALF stages fit; `row` and `step` are bytes of one of them."""
    rest = shared_bytes(tokens=0, stages=STAGES_HALF, step=step, groups=groups)
    return (SHARED - rest) // (STAGES_HALF * row) // 8 * 8


def _are_copied(constants: Mapping[str, Any]) -> bool:
    """Whether rows of A are multiplied as they are."""
    return constants["A_ELEMENT"] == "none" and constants["INPUT"] == "bfloat16"


def _may_pair(constants: Mapping[str, Any], depth: int) -> bool:
    """Whether a stage may have two steps: rows as they are, and no step more than there are."""
    return _are_copied(constants) and (ceil_div(depth, 64) % 2 == 0 or depth > 1024)


def _may_split(constants: Mapping[str, Any]) -> bool:
    """Whether blocks may share the depth of a tile: rows as they are, a result that is plain."""
    return _is_plain(constants) and constants["A_ELEMENT"] == "none"


def _is_plain(constants: Mapping[str, Any]) -> bool:
    """Whether results are only scaled and rounded to 16 bits."""
    plain = constants["OUTPUT"] in ("bfloat16", "float16") and constants["EPILOGUE"] == "none"
    return plain and constants["PAIR"] == "none"


def shape_of(
    constants: Mapping[str, Any],
    rows: int,
    columns: int,
    depth: int,
    groups: int | None,
    processors: int,
) -> Shape:
    """What decides about the tiles of a product; `constants` as in :func:`prefill`."""
    parts = _parts(constants)
    most = _most_tokens(constants)
    if parts == 2:
        row, *of_weights = _bytes_of_step(constants)
        most = min(most, _tokens_that_fit(row, sum(of_weights), groups))
    halves = constants["PAIR"] == "halves"
    across = ceil_div(columns // 2 if halves else columns, 128 if halves else 256)
    shared = groups is None and _may_split(constants)
    return Shape(
        *(rows, groups, across, ceil_div(depth, 64), processors, most, parts),
        *(_are_copied(constants), shared),
    )


def tile_of(shape: Shape) -> Tile:
    """The division of a product by the formulas."""
    processors, parts = shape.processors, shape.parts
    tokens = tokens_of(shape.mean, shape.groups, shape.most, shape.across, processors, parts)
    if shape.shared:
        of_shape = (shape.rows, shape.across, shape.steps)
        split, tokens = split_of(*of_shape, tokens, processors, parts)
        if split > 1:
            return Tile(tokens, split)
    return alone(tokens, shape)


def alone(tokens: int, shape: Shape) -> Tile:
    """A tile of so many rows whose depth nobody shares."""
    tiles = shape.across * max(ceil_div(shape.rows, tokens), min(shape.rows, shape.groups or 1))
    two = can_have(Tile(tokens, resident=2), shape) and tiles > shape.processors
    return Tile(tokens, resident=2 if two else 1)


def chosen(choice: Choice | None, shape: Shape) -> Tile | None:
    """The division of a table's row, where it is one of this product."""
    if choice is None or choice.kernel != "sm90":
        return None
    if choice.split == 1 and not choice.resident:
        tile = alone(choice.tokens, shape)
    else:
        tile = Tile(choice.tokens, choice.split, max(1, choice.resident))
    return tile if can_have(tile, shape) else None


def can_have(tile: Tile, shape: Shape) -> bool:
    """Whether there are registers, shared memory and depth for a division."""
    tokens, split, resident = tile
    if split > 1:
        shares = shape.shared and resident == 1 and shape.steps >= 4 * split
        return shares and tokens <= MOST_TOKENS_SPLIT and tokens % (8 * split) == 0
    if resident > 1:
        return shape.copied and tokens <= TOKENS_OF_TWO
    return tokens <= shape.most


def tiles_of(shape: Shape) -> Iterator[Tile]:
    """Every division that the formulas choose among, and others that the kernel has.

    Those are one and two blocks a multiprocessor where there is room for two, and more clusters
    than a card has at once.
    """
    for tokens in range(16, _largest(shape.mean, shape.groups, shape.most) + 1, 8):
        for resident in (1, 2):
            if can_have(Tile(tokens, resident=resident), shape):
                yield Tile(tokens, resident=resident)
    for split in CLUSTERS:
        for share in range(max(16, 8 * split), MOST_TOKENS_SPLIT + 1, 8 * split):
            if share - 8 * split < shape.rows and can_have(Tile(share, split), shape):
                yield Tile(share, split)


def time_of(tile: Tile, shape: Shape) -> float:
    """Microseconds of an H200 by the formulas; it only ranks divisions.

    One block of a multiprocessor or two make no difference to it.
    """
    tokens, split, _ = tile
    each = ceil_div(shape.steps, split) * time_of_tile(shape.parts * tokens) / 128
    if split == 1:
        of_card = (shape.across, shape.processors)
        return _rounds(shape.mean, shape.groups, tokens, *of_card) * each
    clusters = ceil_div(shape.rows, tokens) * shape.across
    rounds = ceil_div(clusters, int(CLUSTERS[split] * shape.processors / split))
    return rounds * (each + TIME_OF_SPLIT)


def split_of(
    rows: int, wide: int, steps: int, tokens: int, processors: int, parts: int = 1
) -> tuple[int, int]:
    """Blocks that share the depth of a dense product's tiles, and rows of a tile.

    Those for which the card takes the shortest time, with all blocks on it at once; `tokens` are
    the rows of a tile that nobody shares, of `wide` beside each other, each multiplied `parts`
    times.
    """
    of_rows = Shape(rows, None, wide, steps, processors, tokens, parts, True, True)
    best = (time_of(Tile(tokens), of_rows), 1, tokens)
    for split in CLUSTERS:
        for tiles in range(1, int(CLUSTERS[split] * processors / split / wide) + 1):
            share = max(16, ceil_div(ceil_div(rows, tiles), 8 * split) * 8 * split)
            if can_have(Tile(share, split), of_rows):
                best = min(best, (time_of(Tile(share, split), of_rows), split, share))
    return best[1], best[2]


def tokens_of(
    mean: float, groups: int | None, most_tokens: int, across: int, processors: int, parts: int = 1
) -> int:
    """Rows of a tile: a multiple of 8 that wastes little on ranges of so many rows in the mean.

    Rows of ranges are taken to spread like those of a random routing. There are `across` tiles of
    columns; of the numbers of rows, the one that costs the least, by the time of a tile and the
    rounds of the card that their number takes. Each row is multiplied `parts` times.
    """
    costs = []
    for tokens in range(16, _largest(mean, groups, most_tokens) + 1, 8):
        rounds = _rounds(mean, groups, tokens, across, processors)
        costs.append((rounds * time_of_tile(parts * tokens), tokens))
    # Of those that cost about as much, the one of the most rows: weights are made less often.
    return max(tokens for cost, tokens in costs if cost <= 1.02 * min(costs)[0])


def _largest(mean: float, groups: int | None, most_tokens: int) -> int:
    """Rows of the largest tile that such ranges may need."""
    most = mean if groups is None else mean + 3 * math.sqrt(mean)
    return min(most_tokens, max(16, ceil_div(math.ceil(most), 8) * 8))


def _rounds(mean: float, groups: int | None, tokens: int, across: int, processors: int) -> float:
    """Rounds of the card that tiles of so many rows take."""
    if groups is None:
        of_range: float = math.ceil(mean / tokens)
    elif groups < 64:
        # With few ranges one that needs a tile more than others costs a round of the card.
        spread = mean + 2 * math.sqrt(mean)
        of_range = (math.ceil(mean / tokens) + math.ceil(spread / tokens)) / 2
    else:
        of_range = tiles_of_range(mean, tokens)
    rounds = of_range * across * (groups or 1) / processors
    return math.ceil(rounds) if groups is None or rounds < 16 else rounds


def tiles_of_range(mean: float, tokens: int) -> float:
    """Tiles of so many rows that a range has, of so many rows in the mean, in the mean.

    The rows of ranges are distributed normally, with a variance of the mean.
    """
    # One for each multiple of `tokens` that a range is larger than.
    return sum(
        math.erfc((tiles * tokens + 0.5 - mean) / math.sqrt(2 * mean)) / 2
        for tiles in range(math.ceil((mean + 4 * math.sqrt(mean)) / tokens) + 1)
    )


def time_of_tile(tokens: int) -> float:
    """The time of a tile of so many rows, up to a factor.

    Measured on an H200 at 33792 x 8192, a tile each multiprocessor, us: 37.6 (16 rows, two tiles a
    multiprocessor in twice that), 43 (24 and 32, the same), 49 (40), 54 (48), 62 (64), 68 (80), 76
    (96), 85 (112), 94 (128), 105 (144), 116 (160): tensor cores, or else the weights.
    """
    return 37.6 if tokens <= 16 else max(43, 30 + 0.5 * tokens, 0.727 * tokens)
