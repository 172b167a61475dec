"""Instructions that the lanes of a warp execute together.

`mask` names the lanes that take part, bit i for lane i; each of them must come, and must pass the
same mask. Source: PTX ISA, ``shfl.sync``, ``vote.sync``, ``match.sync``, ``redux.sync``,
``elect.sync``, ``bar.warp.sync``.
"""

from __future__ import annotations

from functools import reduce

from .instruction import instruction
from .machine import thread
from .rounding import MASK, signed


def _each(function):
    """A resolve function that gives every lane the same function of the payloads."""

    def resolve(payloads):
        result = function(payloads)
        return dict.fromkeys(payloads, result)

    return resolve


# Identity ----------------------------------------------------------------------------------------


@instruction("u32()", asm="mov.u32 $0, %laneid;")
def lane_id():
    """The thread's lane, 0..31."""
    return thread().lane


@instruction("u32()", asm="activemask.b32 $0;", memory=True)
def activemask():
    """The lanes that happen to execute this together.

    On the simulated machine, where lanes run in turn, it is this one. Which lanes will come later
    it does not say; no kernel may depend on it.
    """
    return 1 << thread().lane


@instruction("void(u32)", asm="bar.warp.sync $0;", memory=True)
def syncwarp(mask):
    """Wait for the lanes of `mask`; orders their accesses to memory."""
    thread().collective("bar.warp.sync", mask & MASK, None, dict.fromkeys)


# Shuffles ----------------------------------------------------------------------------------------


def _shuffle(name, mask, value, operand, source):
    """`source(lane, operand)` is the lane to read, or None to keep the lane's own value."""

    def resolve(payloads):
        results = {}
        for lane, (own, argument) in payloads.items():
            other = source(lane, argument)
            if other is None:
                results[lane] = own
            elif other in payloads:
                results[lane] = payloads[other][0]
            else:
                raise _absent(name, mask, lane, other)
        return results

    return thread().collective(name, mask & MASK, (value, operand & 31), resolve)


def _absent(name, mask, lane, other):
    from ..sim import WarpMaskError

    return WarpMaskError(
        f"{name} with mask {mask & MASK:#010x}: lane {lane} reads lane {other}, which takes no part"
    )


def _by_index(lane, index):
    return index


def _from_below(lane, delta):
    return lane - delta if lane >= delta else None


def _from_above(lane, delta):
    return lane + delta if lane + delta < 32 else None


def _by_xor(lane, lane_mask):
    return lane ^ lane_mask


@instruction("u32(u32, u32, u32)", asm="shfl.sync.idx.b32 $0, $2, $3, 0x1f, $1;", memory=True)
def shfl_idx_u32(mask, value, source):
    """The `value` of lane `source`."""
    return _shuffle("shfl.idx", mask, value & MASK, source, _by_index)


@instruction("f32(u32, f32, u32)", asm="shfl.sync.idx.b32 $0, $2, $3, 0x1f, $1;", memory=True)
def shfl_idx_f32(mask, value, source):
    """The `value` of lane `source`."""
    return _shuffle("shfl.idx", mask, value, source, _by_index)


@instruction("u32(u32, u32, u32)", asm="shfl.sync.up.b32 $0, $2, $3, 0, $1;", memory=True)
def shfl_up_u32(mask, value, delta):
    """The `value` of the lane `delta` below; its own where there is none."""
    return _shuffle("shfl.up", mask, value & MASK, delta, _from_below)


@instruction("f32(u32, f32, u32)", asm="shfl.sync.up.b32 $0, $2, $3, 0, $1;", memory=True)
def shfl_up_f32(mask, value, delta):
    """The `value` of the lane `delta` below; its own where there is none."""
    return _shuffle("shfl.up", mask, value, delta, _from_below)


@instruction("u32(u32, u32, u32)", asm="shfl.sync.down.b32 $0, $2, $3, 0x1f, $1;", memory=True)
def shfl_down_u32(mask, value, delta):
    """The `value` of the lane `delta` above; its own where there is none."""
    return _shuffle("shfl.down", mask, value & MASK, delta, _from_above)


@instruction("f32(u32, f32, u32)", asm="shfl.sync.down.b32 $0, $2, $3, 0x1f, $1;", memory=True)
def shfl_down_f32(mask, value, delta):
    """The `value` of the lane `delta` above; its own where there is none."""
    return _shuffle("shfl.down", mask, value, delta, _from_above)


@instruction("u32(u32, u32, u32)", asm="shfl.sync.bfly.b32 $0, $2, $3, 0x1f, $1;", memory=True)
def shfl_xor_u32(mask, value, lane_mask):
    """The `value` of the lane whose number is this one's xor `lane_mask`."""
    return _shuffle("shfl.xor", mask, value & MASK, lane_mask, _by_xor)


@instruction("f32(u32, f32, u32)", asm="shfl.sync.bfly.b32 $0, $2, $3, 0x1f, $1;", memory=True)
def shfl_xor_f32(mask, value, lane_mask):
    """The `value` of the lane whose number is this one's xor `lane_mask`."""
    return _shuffle("shfl.xor", mask, value, lane_mask, _by_xor)


# Votes -------------------------------------------------------------------------------------------


_PREDICATE = "{ .reg .pred p, q; setp.ne.b32 p, $2, 0; "


@instruction(
    "bool(u32, bool)",
    asm=_PREDICATE + "vote.sync.any.pred q, p, $1; selp.b32 $0, 1, 0, q; }",
    memory=True,
)
def vote_any(mask, condition):
    """Whether it is true on a lane of `mask`."""
    return thread().collective(
        "vote.any", mask & MASK, bool(condition), _each(lambda lanes: any(lanes.values()))
    )


@instruction(
    "bool(u32, bool)",
    asm=_PREDICATE + "vote.sync.all.pred q, p, $1; selp.b32 $0, 1, 0, q; }",
    memory=True,
)
def vote_all(mask, condition):
    """Whether it is true on all lanes of `mask`."""
    return thread().collective(
        "vote.all", mask & MASK, bool(condition), _each(lambda lanes: all(lanes.values()))
    )


@instruction(
    "u32(u32, bool)",
    asm="{ .reg .pred p; setp.ne.b32 p, $2, 0; vote.sync.ballot.b32 $0, p, $1; }",
    memory=True,
)
def ballot(mask, condition):
    """The lanes of `mask` on which it is true."""
    return thread().collective("vote.ballot", mask & MASK, bool(condition), _each(_ballot))


def _ballot(lanes):
    return sum(1 << lane for lane, value in lanes.items() if value)


@instruction("u32(u32, u32)", asm="match.any.sync.b32 $0, $2, $1;", memory=True)
def match_any_u32(mask, value):
    """The lanes of `mask` that have the same `value` as this one."""

    def resolve(payloads):
        same: dict[int, int] = {}
        for lane, word in payloads.items():
            same[word] = same.get(word, 0) | 1 << lane
        return {lane: same[word] for lane, word in payloads.items()}

    return thread().collective("match.any", mask & MASK, value & MASK, resolve)


@instruction(
    "bool(u32)",
    asm="{ .reg .pred p; elect.sync _|p, $1; selp.b32 $0, 1, 0, p; }",
    memory=True,
    min_cc=(9, 0),
)
def elect(mask):
    """True on one lane of `mask`, the lowest, for work that one thread does."""
    return thread().collective(
        "elect.sync",
        mask & MASK,
        None,
        lambda payloads: {lane: lane == min(payloads) for lane in payloads},
    )


elect.lowering(
    asm="{ .reg .pred p; .reg .b32 lowest, lane; bar.warp.sync $1;"
    " neg.s32 lowest, $1; and.b32 lowest, lowest, $1;"
    " mov.u32 lane, %lanemask_eq; setp.eq.u32 p, lowest, lane; selp.b32 $0, 1, 0, p; }",
    memory=True,
)


# Reductions --------------------------------------------------------------------------------------


def _reduce(name, mask, value, function):
    return thread().collective(
        name, mask & MASK, value, _each(lambda lanes: reduce(function, lanes.values()))
    )


@instruction("u32(u32, u32)", asm="redux.sync.add.u32 $0, $2, $1;", memory=True)
def redux_add_u32(mask, value):
    """The sum over the lanes of `mask`, modulo 2^32."""
    return _reduce("redux.add", mask, value & MASK, lambda a, b: (a + b) & MASK)


@instruction("i32(u32, i32)", asm="redux.sync.add.s32 $0, $2, $1;", memory=True)
def redux_add_i32(mask, value):
    """The sum over the lanes of `mask`, modulo 2^32."""
    return _reduce("redux.add", mask, signed(value), lambda a, b: signed(a + b))


@instruction("u32(u32, u32)", asm="redux.sync.min.u32 $0, $2, $1;", memory=True)
def redux_min_u32(mask, value):
    """The smallest over the lanes of `mask`."""
    return _reduce("redux.min", mask, value & MASK, min)


@instruction("i32(u32, i32)", asm="redux.sync.min.s32 $0, $2, $1;", memory=True)
def redux_min_i32(mask, value):
    """The smallest over the lanes of `mask`."""
    return _reduce("redux.min", mask, signed(value), min)


@instruction("u32(u32, u32)", asm="redux.sync.max.u32 $0, $2, $1;", memory=True)
def redux_max_u32(mask, value):
    """The largest over the lanes of `mask`."""
    return _reduce("redux.max", mask, value & MASK, max)


@instruction("i32(u32, i32)", asm="redux.sync.max.s32 $0, $2, $1;", memory=True)
def redux_max_i32(mask, value):
    """The largest over the lanes of `mask`."""
    return _reduce("redux.max", mask, signed(value), max)


@instruction("u32(u32, u32)", asm="redux.sync.and.b32 $0, $2, $1;", memory=True)
def redux_and(mask, value):
    """Bitwise and over the lanes of `mask`."""
    return _reduce("redux.and", mask, value & MASK, lambda a, b: a & b)


@instruction("u32(u32, u32)", asm="redux.sync.or.b32 $0, $2, $1;", memory=True)
def redux_or(mask, value):
    """Bitwise or over the lanes of `mask`."""
    return _reduce("redux.or", mask, value & MASK, lambda a, b: a | b)


@instruction("u32(u32, u32)", asm="redux.sync.xor.b32 $0, $2, $1;", memory=True)
def redux_xor(mask, value):
    """Bitwise exclusive or over the lanes of `mask`."""
    return _reduce("redux.xor", mask, value & MASK, lambda a, b: a ^ b)
