"""Plans of products of few rows with prepared weights: ``kernels.matmul_decode``.

``nvfp4.plans_products`` asks for them. Many rows: ``nvfp4.plans_sm90``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .architectures import capability
from .errors import UnsupportedError
from .kernels.matmul_decode import shared_bytes
from .launch import Launch
from .program import Kernel, Program
from .tiling import ceil_div
from .tuning import Choice

__all__ = ["decode"]

#: Whether weights are loaded before the kernels ahead in the stream have ended.
AHEAD = True
#: Ranges whose table fits in shared memory beside the sums.
MOST_GROUPS = 2048


def decode(
    arch: str,
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
    matrices: int | None = None,
) -> Launch:
    """Products of few rows with each matrix: ``kernels.matmul_decode``.

    Parameters
    ----------
    arch
    constants
        Those of the naive kernels.
    rows, columns, depth
    groups
        None in a dense product.
    processors
    kernel
        For the epilogue's arrays.
    args
        Of the kernel.
    choice
        What a table has for this product.
    matrices
        Of the weights, in a batch-invariant product: what decides about the order of sums then
        depends on neither rows nor ranges nor tables.

    Raises
    ------
    UnsupportedError
        Pairs in halves of a number of columns that is no multiple of 32.
    """
    check_pairs(constants, columns)
    check_groups(groups)
    team = None if matrices is None else invariant_team(columns, depth)
    cut = None if team else chosen(choice, constants, depth)
    if cut is None:
        cut = tile(constants, rows, columns, depth, groups, processors, team)
    if capability(arch)[0] >= 12:
        # Its code needs a few registers more: with four blocks some were spilled.
        cut = cut._replace(resident=max(1, cut.resident - 1))
    if capability(arch)[0] == 10 and choice is None:
        # Of more some were spilled.
        cut = cut._replace(slots=min(cut.slots, 4 - cut.stripes))
        if constants["OUTPUT"] == "codes" and "counts" in constants.get("OFFSETS", ""):
            cut = cut._replace(resident=min(cut.resident, 2))
    steps = ceil_div(depth, 64)
    # The last steps of a run are read together, and with fewer some that were read before.
    cut = cut._replace(slots=max(1, min(cut.slots, steps // cut.team)))
    own: dict[str, Any] = {
        "GROUPED": groups is not None,
        "CHUNK": cut.chunk,
        "WARPS": cut.warps,
        "TEAM": cut.team,
        "STRIPES": cut.stripes,
        "SLOTS": cut.slots,
        "PASSES": passes(constants),
        "AHEAD": AHEAD
        and capability(arch) >= (9, 0)
        and _may_begin(constants, groups, 32 * cut.warps),
        "EVEN": steps % (cut.team * cut.slots) == 0,
        "WHOLE": depth % 64 == 0,
        "THREADS": 32 * cut.warps,
        "BLOCKS_PER_SM": cut.resident,
    }
    program = program_of(kernel, {**constants, **own}, groups)
    items = max(
        1,
        most_chunks(rows, cut.chunk, groups)
        * ceil_div(ceil_div(columns, 16), cut.stripes * passes(constants)),
    )
    shared = shared_bytes(chunk=cut.chunk, warps=cut.warps, stripes=cut.stripes, groups=groups)
    resident = min(cut.resident, max(1, shared_of_processor(arch) // (shared + 1024)))
    grid = min(ceil_div(items, cut.warps // cut.team), processors * resident)
    return Launch(
        program,
        (grid, 1, 1),
        (32 * cut.warps, 1, 1),
        shared,
        args,
        programmatic=capability(arch) >= (9, 0),
    )


def program_of(kernel: Kernel, constants: Mapping[str, Any], groups: int | None) -> Program:
    """A kernel with those of the constants that it has; a dense product has no arrays of ranges."""
    given = dict(constants)
    if groups is None:
        given |= {"OFFSETS": "int32", "IDS": "none", "INDICES": "none", "A_STARTS": "none"}
        given["STARTS"] = "none"
    return kernel.program(**{name: given[name] for name in kernel.constants})


def most_chunks(rows: int, chunk: int, groups: int | None) -> int:
    """The most chunks of so many rows that there can be, however rows spread over the ranges."""
    return min(ceil_div(rows, chunk) + (groups or 0), rows)


def _may_begin(constants: Mapping[str, Any], groups: int | None, threads: int) -> bool:
    """Whether all that says where weights are is known, or looked at again, at the beginning."""
    if groups is None:
        return True
    names = ("IDS", "A_STARTS")
    known = all(constants[n] == "none" for n in names) and "counts" not in constants["OFFSETS"]
    return known and groups <= threads  # a thread looks at its range again


def shared_of_processor(arch: str) -> int:
    """Bytes of shared memory of a multiprocessor; each block takes 1 KiB more than it asks for."""
    major, minor, _ = capability(arch)
    kib = {8: 164 if minor == 0 else 100, 12: 100}.get(major, 228)
    return kib << 10


def check_groups(groups: int | None) -> None:
    """The table of ranges must fit in shared memory."""
    if groups is not None and groups > MOST_GROUPS:
        raise UnsupportedError(
            f"grouped products with prepared weights take at most {MOST_GROUPS} ranges; got "
            f"{groups}: pass the weights that they were made of"
        )


def check_pairs(constants: Mapping[str, Any], columns: int) -> None:
    """Gates and their partners stand in the same places of their stripes of 16 columns."""
    if constants["PAIR"] == "halves" and columns % 32:
        raise UnsupportedError(
            "an epilogue of pairs in halves needs a number of columns (N) that is a multiple of 32 "
            f"with prepared weights; got {columns}: pass the weights that they were made of, or "
            "interleave the pairs (halves=False)"
        )


#: Bytes of 16 rows of the weights in a step of 64 columns: codes of four bits and of eight, scales
#: of blocks of 32 and of 16.
STEP_BYTES = (512, 1024)
RECORD_BYTES = (32, 64)


def invariant_team(columns: int, depth: int) -> int:
    """Warps that share the depth in a batch-invariant product by ``kernels.matmul_decode``.

    As many as columns alone need to fill a card, each with four steps at least.
    """
    steps = ceil_div(depth, 64)
    most = 8 if columns < 16384 else 4
    return next(team for team in (8, 4, 2, 1) if team <= most and (team == 1 or steps >= 4 * team))


def passes(constants: Mapping[str, Any]) -> int:
    """Passes of an item of ``kernels.matmul_decode``: two where pairs make blocks of 32 columns."""
    if constants["OUTPUT"] != "codes" or constants["PAIR"] == "none":
        return 1
    return 2 if constants["SCALE"] == "e8m0" else 1


def whole_blocks(constants: Mapping[str, Any]) -> bool:
    """Whether an item must have two stripes, to have whole blocks of a quantised result."""
    pairs, small = constants["PAIR"] != "none", constants["SCALE"] == "e4m3"
    return constants["OUTPUT"] == "codes" and (pairs or not small)


class Cut(NamedTuple):
    """How ``kernels.matmul_decode`` divides a product.

    Attributes
    ----------
    chunk
        Rows of A of an item.
    warps
        Of a block.
    team
        Warps that share the depth of an item.
    stripes
        Blocks of 16 columns of an item.
    slots
        Steps in flight, a warp and stripe.
    resident
        Blocks of a multiprocessor.
    """

    chunk: int
    warps: int
    team: int
    stripes: int
    slots: int
    resident: int


def chosen(choice: Choice | None, constants: Mapping[str, Any], depth: int) -> Cut | None:
    """The division of a table's row, where it is one of this product."""
    if choice is None or choice.kernel != "decode":
        return None
    two = constants["PAIR"] == "halves" or whole_blocks(constants)
    if (two and choice.stripes != 2) or (choice.team > 1 and ceil_div(depth, 64) < choice.team):
        return None
    # What certainly spills. (Blocks of four warps may be one more than have as many warps.)
    warps = 8 * _resident(choice.chunk, choice.stripes, constants)
    plain = constants["A_ELEMENT"] == "none" and constants["INPUT"] == "bfloat16"
    plain = plain and constants["OUTPUT"] != "codes"
    most = 5 - choice.stripes if plain and choice.chunk == 8 else 2
    if choice.warps * choice.resident > warps + 4 or choice.slots > most:
        return None
    return Cut(choice.chunk, choice.warps, *choice[2:6])


def tile(
    constants: Mapping[str, Any],
    rows: int,
    columns: int,
    depth: int,
    groups: int | None,
    processors: int,
    of_team: int | None = None,
) -> Cut:
    """The division of a product; by `of_team` warps, if that is given.

    How rows spread over the ranges is not known here: the mean must do.
    """
    many = rows > 8 if groups is None else rows > 6 * groups
    chunk = 16 if many else 8
    chunks = chunks_of(rows, chunk, groups)
    across = ceil_div(ceil_div(columns, 16), passes(constants))
    halves = constants["PAIR"] == "halves"
    least = (math.inf, Cut(chunk, 8, 1, 1, 1, 1))
    for stripes in (2,) if halves or many or whole_blocks(constants) else (1, 2):
        items = max(1, chunks * ceil_div(across, stripes))
        each = items / processors
        for cut in _cuts(constants, chunk, stripes, depth, groups, of_team, each):
            time = time_of(cut, constants, items, ceil_div(depth, 64), processors)
            if time < least[0]:
                least = (time, cut)
    cut = least[1]
    if groups is None and run_is_short(cut, depth):
        cut = cut._replace(slots=min(cut.slots, 2))
    return cut


def run_is_short(cut: Cut, depth: int) -> bool:
    """Whether a warp's run is so short that few steps in flight suffice, and rows have registers.

    8192 x 8192: 10.9 us (1 row) and 11.8 (8 rows) with two, 11.2 and 12.8 with four.
    """
    return cut.stripes == 1 and ceil_div(depth, 64) <= 16 * cut.team


def chunks_of(rows: int, chunk: int, groups: int | None) -> int:
    """Chunks of all ranges, where rows go to them at random."""
    if not groups:
        return ceil_div(rows, chunk)
    hit = groups * (1 - (1 - 1 / groups) ** rows)
    return max(1, min(rows, math.ceil(max(hit, rows / chunk + hit / 2))))


def _cuts(
    constants: Mapping[str, Any],
    chunk: int,
    stripes: int,
    depth: int,
    groups: int | None,
    of_team: int | None,
    each: float,
) -> Iterator[Cut]:
    """Divisions that are worth a thought; `each` are items of a multiprocessor."""
    steps = ceil_div(depth, 64)
    resident = _resident(chunk, stripes, constants)
    kinds = [(8, team, resident) for team in (8, 4, 2, 1)]
    if stripes == 2 and resident == 3:
        # As many warps in smaller blocks, of teams that share the depth evenly. (Only these: other
        # odd teams, of one stripe, took up to half as long again.) A range needs a thread.
        kinds += [(4, 4, 7)] * (steps % 8 == 0 and (groups or 0) <= 128 and each <= 7)
        kinds += [(6, 3, 4)] * (steps % 9 == 0 and (groups or 0) <= 192 and each >= 8)
    for warps, team, blocks in kinds:
        if of_team is not None and (warps, team) != (8, of_team):
            continue
        if team == 1 or steps >= 4 * team or of_team is not None:
            slots = _slots(constants, chunk, stripes, steps, team, groups, blocks)
            yield Cut(chunk, warps, team, stripes, slots, blocks)


def _slots(
    constants: Mapping[str, Any],
    chunk: int,
    stripes: int,
    steps: int,
    team: int,
    groups: int | None,
    resident: int,
) -> int:
    """Steps in flight: as many as there are registers for, and a run has a whole multiple of.

    With runs that are no multiple some registers are for knowing it.
    """
    most = 4 if stripes == 1 else 3
    plain = _resident(8, stripes, constants) == (4 if stripes == 1 else 3)
    if chunk == 16 or not plain or resident > 4:
        return 2
    if groups is None and stripes == 1:
        return most
    return next((n for n in range(most, 2, -1) if steps % (team * n) == 0), 2)


#: What a product takes on an H200, in microseconds: fitted to 70 timings of divisions of 14 with
#: mxfp4 (8192 x 8192 and 28672 x 4096 with 1, 8, 16 rows; ranges of 128 matrices of 2880 x 2880,
#: 5760 x 2880, 2048 x 768, 1536 x 2048 with 1 and 32 tokens), for it to rank them: of those it was
#: fitted to it takes the fastest of each product, but only 53 times are within 10 %, the worst is
#: 35 % off, and all other shapes are a guess. Left out were blocks of 3, 5 and 16 warps, of 6 with
#: one stripe, and what spilled much. (Launches took some 1 us longer then.) A launch begins and
#: ends:
START = 2.16
#: A step's weights are so long on their way,
LATENCY = 1.17
#: and take a multiprocessor so long at the speed of memory, if they have 544 bytes;
MEMORY = 0.0148
#: their instructions so long, and those for a step's rows of A, once for all stripes, so long.
#: (Rows above the fit: 256 ranges of 4096 x 7168, 32 tokens, take 665 us with a stripe, 612 with
#: two.)
STEP, ROWS = 0.0091, 0.0072
#: Each warp's share of an item's end takes a multiprocessor so long, and a team longer by so much.
END, LAST = 0.045, 0.063
#: What warps take longer that have an item for themselves.
ALONE = 1.082


def time_of(
    cut: Cut, constants: Mapping[str, Any], items: int, steps: int, processors: int
) -> float:
    """What a product takes: where the longest way of a team and a multiprocessor's work meet."""
    run = steps / cut.team
    if steps % (cut.team * cut.slots):
        run = math.ceil(run)
    teams = cut.resident * (cut.warps // cut.team)
    rounds, others = divmod(items, processors * teams)
    share = rounds * teams + ceil_div(others, processors)
    codes = STEP_BYTES[constants["B_ELEMENT"] != "e2m1"]
    stripe = (codes + RECORD_BYTES[constants["B_SCALE"] == "e4m3"]) / 544
    step = max(MEMORY * stripe * cut.stripes, STEP * cut.stripes + ROWS * cut.chunk / 8)
    work = share * cut.team * (run * step + END)
    way = (rounds + (others > 0)) * (run * LATENCY / cut.slots + LAST)
    together: float = (work**3 + way**3) ** (1 / 3)
    return START + together * (ALONE if cut.team == 1 else 1.0)


def _resident(chunk: int, stripes: int, constants: Mapping[str, Any]) -> int:
    """Blocks of a multiprocessor for which there are registers."""
    plain = constants["A_ELEMENT"] == "none" and constants["INPUT"] == "bfloat16"
    codes = constants["OUTPUT"] == "codes"
    if not plain or chunk == 16 or (codes and stripes == 2):
        return 1 if codes and not plain else 2
    most = 3 if stripes == 2 or codes else 4
    return most if constants["B_ELEMENT"] == "e2m1" else most - 1
