"""plan_matmul: what a product would run, asked without arrays and without a GPU, to be printed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from .cards import CardFacts, card_of_arch, named_card, present_card
from .epilogue import Epilogue
from .errors import ToolchainError
from .formats import FORMAT_ALIASES, FORMATS, BlockFormat, block_format
from .launch import Launch

__all__ = ["Plan", "plan_matmul"]

_PLAIN_BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "e4m3": 8}
#: Operations of FP8 tensor cores for each in bfloat16, about.
_FP8_RATE = 1.9


@dataclass(frozen=True)
class Plan:
    """What a product runs; print it.

    Attributes
    ----------
    title
        The product in words.
    card : CardFacts
        The card that it is for.
    launches : tuple of Launch
        One a kernel, in order: ``program`` (kernel and constants), ``grid``, ``block``,
        ``shared_bytes``.
    moved, operations
        Bytes that must be read and written, and additions and multiplications.
    tuned
        Whether a table of measured divisions chose it (``nvfp4 tune``), not the formulas.
    rate
        Operations of its tensor cores for each of bfloat16.
    """

    title: str
    card: CardFacts
    launches: tuple[Launch, ...]
    moved: float
    operations: float
    tuned: bool = False
    rate: float = 1.0

    @property
    def kernel(self) -> str:
        """Name of the kernel that makes the product."""
        return self.launches[-1].program.kernel.name

    @property
    def constants(self) -> dict[str, Any]:
        """Its compile-time constants."""
        return dict(self.launches[-1].program.constants)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Its blocks."""
        return self.launches[-1].grid

    @property
    def threads(self) -> int:
        """Threads of a block."""
        x, y, z = self.launches[-1].block
        return x * y * z

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        return self.launches[-1].shared_bytes

    @property
    def tile(self) -> str:
        """What a block, or a team of warps, makes at a time, in words; "" of the naive kernels."""
        return _tile(self.launches[-1])

    @property
    def stages(self) -> int | None:
        """Steps of the depth in shared memory, or in the registers of a warp; None: no ring."""
        found = self.constants
        stages = found.get("STAGES", found.get("SLOTS"))
        return None if stages is None else int(stages)

    @property
    def floor_us(self) -> float | None:
        """Microseconds below which the call cannot be; None: too little is known of the card."""
        seconds, _ = self.card.floor(self.moved, self.operations / self.rate)
        return seconds * 1e6 if self.card.bandwidth else None

    def __str__(self) -> str:
        card = self.card
        lines = [
            self.title,
            f"  on       {card.name}: {card.arch}, {card.processors} multiprocessors",
        ]
        for launch in self.launches:
            x, y, z = launch.grid
            threads = launch.block[0] * launch.block[1] * launch.block[2]
            blocks = " x ".join(str(n) for n in (x, y, z) if n > 1) or "1"
            lines.append(
                f"  kernel   {launch.program.kernel.name}: {blocks} blocks of {threads} threads, "
                f"{launch.shared_bytes} bytes of shared memory"
                + (", chosen by a table" if self.tuned else "")
            )
            tile = _tile(launch)
            lines += [f"  tile     {tile}"] if tile else []
            lines += _wrapped(dict(launch.program.constants))
        lines.append(f"  floor    {self._floor()}")
        return "\n".join(lines)

    def _floor(self) -> str:
        _, bound = self.card.floor(self.moved, self.operations / self.rate)
        what = f"{self.moved / 1e6:.1f} MB, {self.operations / 1e9:.1f} GFLOP"
        if self.floor_us is None:
            return f"not known for this card ({what})"
        rate = f"{self.card.bandwidth / 1e12:.2f} TB/s"
        if bound != "memory":
            rate = f"{self.card.flops * self.rate / 1e12:.0f} TFLOP/s"
        return f"{self.floor_us:.1f} us: {what}, bound by {bound} at {rate}"


def _tile(launch: Launch) -> str:
    """Rows, columns and depth that are made at a time, and what is in flight."""
    name, of = launch.program.kernel.name, dict(launch.program.constants)
    if name == "matmul_decode":
        size = f"{of['CHUNK']} rows x {16 * of['STRIPES'] * of['PASSES']} columns"
        team = f"{of['TEAM']} warps share the depth" if of["TEAM"] > 1 else "a warp each"
        return f"{size}, {team}, {of['SLOTS']} steps of 64 in flight"
    if name == "matmul_sm90":
        rest = {"narrow": ", e4m3 products", "others": ", matrices that are not e4m3"}
        size = f"{of['CHUNK']} rows x 256 columns x {64 * of['STEPS']}"
        return f"{size}, {of['STAGES']} stages{rest.get(of['MATRICES'], '')}"
    if "TILE_N" in of:
        high = 256 if of.get("PAIR_OF_BLOCKS") else 128
        rows, columns = (of["TILE_N"], high) if of["SWAP"] else (high, of["TILE_N"])
        return f"{rows} rows x {columns} columns x {of['TILE_K']}, {of['STAGES']} stages"
    if name.endswith("matmul_sm120"):
        return f"{of['ROWS']} rows x 128 columns"
    return "64 rows x 64 columns" if name.endswith("matmul_sm80") else ""


def _wrapped(constants: dict[str, Any], width: int = 88) -> list[str]:
    """Constants as lines that are not too long."""
    lines = [""]
    for name, value in constants.items():
        text = f"{name}={value}"
        if lines[-1] and len(lines[-1]) + len(text) + 2 > width:
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + text
    return [f"           {line}" for line in lines if line]


def plan_matmul(
    m: int,
    n: int,
    k: int,
    *,
    a: str | BlockFormat = "bfloat16",
    b: str | BlockFormat = "mxfp4",
    experts: int | None = None,
    groups: int | None = None,
    rows: int | None = None,
    expert_ids: bool = False,
    row_counts: bool = False,
    out_dtype: str | BlockFormat = "bfloat16",
    epilogue: Epilogue | Any = None,
    alpha: Any = None,
    prepared: bool = True,
    scale_layout: str = "tcgen",
    compute: str | None = None,
    batch_invariant: bool = False,
    card: str | None = None,
    arch: str | None = None,
) -> Plan:
    """What :func:`nvfp4.matmul` or :func:`nvfp4.grouped_matmul` would run; no GPU is needed.

    The call is made on a machine that only notes what it is told to launch, so the plan is the one
    that the same call gets on such a card. Its arrays are addresses without memory, so sizes may be
    any.

    Parameters
    ----------
    m, n, k : int
        Of A [M, K] and B [N, K], or [E, N, K].
    a : {"bfloat16", "float16"} or a format
        What A is; with ``compute="fp8"`` also "e4m3": codes with a scale a row, quantised before.
    b : str or BlockFormat
        Format of B.
    experts : int, optional
        Matrices of a grouped product; None: a dense one.
    groups : int, optional
        Ranges of rows; as many as experts by default.
    rows : int, optional
        Rows of the result where they are gathered (``row_indices``); A then has `m`.
    expert_ids : bool
        Whether the ranges name their experts.
    row_counts : bool
        Whether A is [E, m, K] and the first rows of each matrix count (``row_counts``).
    out_dtype : {"bfloat16", "float16", "float32"} or a format
    epilogue, alpha
        As :func:`nvfp4.matmul` takes them, arrays on the host.
    prepared : bool
        Whether B is prepared (:func:`nvfp4.prepare_weights`).
    scale_layout : {"tcgen", "linear"}
        Of scales of A, and of B that is not prepared.
    compute, batch_invariant
        As :func:`nvfp4.matmul` takes them.
    card : str, optional
        Such as ``"H200"``: one of ``nvfp4.cards.CARDS``. By default the present GPU.
    arch : str, optional
        Such as ``"sm_90a"``, instead of a card: the best known card of that architecture.

    Returns
    -------
    Plan
        ``print(plan)`` shows kernel, tile, constants, grid, threads, shared memory, and the floor:
        the larger of bytes by what a copy reaches and operations by what large bfloat16 products
        reach (1.9 times that on FP8 tensor cores). Of the experts, as many count as so many rows
        hit on average in a random routing.

    Raises
    ------
    TypeError
        A size that is no int.
    ValueError
        An unknown card, format or option, shapes that do not fit; no card is given and there is no
        GPU.
    UnsupportedError
        There is no kernel for such a call.
    """
    if card is not None and arch is not None:
        raise ValueError(f"give card or arch, not both; got {card!r} and {arch!r}")
    sizes = {"m": m, "n": n, "k": k, "experts": experts, "groups": groups, "rows": rows}
    for name, size in sizes.items():
        if size is None and name not in "mnk":
            continue
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise TypeError(f"{name} must be an int; got {size!r}")
        if size < 0:
            raise ValueError(f"{name} must not be negative; got {size}")
    where = _where(card, arch)
    if row_counts and (experts is None or groups is not None or rows is not None or expert_ids):
        raise ValueError("row_counts needs experts=, and no groups, rows or expert_ids beside it")
    launches = _launches(
        where, m, n, k, a, b, experts, groups, rows, expert_ids, row_counts, out_dtype, epilogue,
        alpha, prepared, scale_layout, compute, batch_invariant,
    )  # fmt: skip
    names = [
        value.name if isinstance(value, BlockFormat) else FORMAT_ALIASES.get(value, value)
        for value in (a, b, out_dtype)
    ]
    in_rows = m * experts if row_counts and experts is not None else m
    out_rows = in_rows if rows is None else rows
    pairs = isinstance(epilogue, Epilogue) and epilogue.pair
    moved = (
        in_rows * k * _bits(names[0])
        + _hit(out_rows, experts) * n * k * _bits(names[1])
        + out_rows * (n // 2 if pairs else n) * _bits(names[2])
    ) / 8
    what = f"matmul {m} x {n} x {k}"
    if experts is not None:
        ranges = f"{m} counted rows each" if row_counts else f"{groups or experts} ranges"
        what = f"grouped_matmul {out_rows} x {n} x {k}, {experts} experts, {ranges}"
    title = f"{what}: {names[0]} times {'prepared ' if prepared else ''}{names[1]} to {names[2]}"
    if compute == "fp8":
        title += ", compute fp8"
    tuned = prepared and not batch_invariant
    tuned = tuned and _tuned(where, launches, out_rows, n, k, experts and (groups or experts))
    narrow = any(dict(one.program.constants).get("COMPUTE") == "fp8" for one in launches)
    rate = _FP8_RATE if narrow else 1.0
    return Plan(title, where, launches, moved, 2.0 * out_rows * n * k, tuned, rate)


def _where(card: str | None, arch: str | None) -> CardFacts:
    if card is not None:
        return named_card(card)
    if arch is not None:
        return card_of_arch(arch)
    try:
        return present_card()
    except ToolchainError as error:
        raise ValueError(
            "card must be given where there is no GPU, such as plan_matmul(..., card='H200'); got "
            f"none ({error})"
        ) from error


def _tuned(
    card: CardFacts, launches: tuple[Launch, ...], rows: int, columns: int, depth: int,
    groups: int | None,
) -> bool:  # fmt: skip
    """Whether a table has a row for the product, and one that it can have."""
    from . import plans_prepared, tuning

    constants = dict(launches[-1].program.constants)
    key = functools.partial(tuning.key_of, constants, rows, columns, depth, groups)
    choice = tuning.find(card.identity, key)
    if choice is None or not choice.made(constants):
        return False
    # The formulas may divide like a row that is not taken, but for steps under way and blocks.
    few = choice.kernel == "decode"
    return not few or plans_prepared.chosen(choice, constants, depth) is not None


def _hit(rows: int, experts: int | None) -> float:
    """Experts that so many rows hit, on average of random routings."""
    if experts is None or not experts:
        return 1.0
    return experts * (1.0 - (1.0 - 1.0 / experts) ** rows)


def _bits(kind: str) -> float:
    """Of an element, with its share of a block scale."""
    if kind in _PLAIN_BITS:
        return _PLAIN_BITS[kind]
    fmt = FORMATS[kind]
    return 8 / fmt.codes_per_byte + 8 / fmt.block


def _launches(
    card: CardFacts, m: int, n: int, k: int, a: Any, b: Any, experts: int | None,
    groups: int | None, rows: int | None, expert_ids: bool, row_counts: bool, out_dtype: Any,
    epilogue: Any, alpha: Any, prepared: bool, scale_layout: str, compute: str | None,
    batch_invariant: bool,
) -> tuple[Launch, ...]:  # fmt: skip
    """What the call launches, on memory that is never touched."""
    from . import api, warm

    if alpha is None:
        alpha = 1.0 if experts is None else None
    layout = "sm90" if prepared else scale_layout
    kind = a.name if isinstance(a, BlockFormat) else FORMAT_ALIASES.get(a, a)
    name = block_format(b).name
    more: dict[str, Any] = {
        "alpha": alpha, "out_dtype": out_dtype, "epilogue": epilogue, "compute": compute,
        "batch_invariant": batch_invariant,
    }  # fmt: skip
    narrow = compute == "fp8"
    if kind not in (*FORMATS, "bfloat16", "float16", *(["e4m3"] if narrow else [])):
        raise ValueError(
            f"a must be one of bfloat16, float16, {', '.join(FORMATS)}, with compute='fp8' e4m3 "
            f"too; got {kind!r}"
        )
    if kind == "e4m3":
        kind, more["a_scale"] = "uint8", warm.operand("float32", (m,), scale_layout)
    with warm.recording(card.arch, card.identity) as launches:
        if experts is None:
            if groups is not None or rows is not None or expert_ids:
                raise ValueError(
                    "groups, rows and expert_ids are for a grouped product: say experts="
                )
            left = warm.operand(kind, (m, k), scale_layout)
            api.matmul(left, warm.operand(name, (n, k), layout), **more)
        else:
            left, ranges = _ranges(
                kind, m, k, experts, groups, rows, expert_ids, row_counts, scale_layout
            )
            api.grouped_matmul(left, warm.operand(name, (experts, n, k), layout), **ranges, **more)
    return tuple(launches)


def _ranges(
    kind: str, m: int, k: int, experts: int, groups: int | None, rows: int | None,
    expert_ids: bool, row_counts: bool, scale_layout: str,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """A of a grouped product, and what says which rows belong to which expert."""
    import numpy as np

    from . import warm

    if row_counts:
        left = warm.operand(kind, (experts, m, k), scale_layout)
        return left, {"row_counts": np.zeros(experts, np.int32)}
    count = groups or experts
    total = m if rows is None else rows
    offsets = np.linspace(0, total, count + 1).astype(np.int32 if total < 1 << 31 else np.int64)
    gathered = rows is not None
    left = warm.operand(kind, (m, k), scale_layout, None if gathered else offsets)
    return left, {
        "row_offsets": offsets,
        "expert_ids": np.arange(count, dtype=np.int32) % experts if expert_ids else None,
        "row_indices": None if rows is None else warm.operand("int32", (rows,), scale_layout),
    }
