"""Asynchronous copies between global and shared memory, of bytes in a row.

*Bulk copies* (sm_90) are one instruction of one thread for any multiple of 16 bytes, both addresses
multiples of 16. A load ends by counting its bytes at an mbarrier. Stores are collected in groups,
which the thread that issued them closes and waits for. ``cp_async_16`` (sm_80) copies 16 bytes for
each thread, in groups too, ``cp_async_8`` and ``cp_async_4`` fewer; they belong to the ordinary
proxy, so an engine that reads what they brought needs ``fence_proxy_async_shared`` behind the wait.

An address in global memory is an i64, from ``memory.ptr_address``. A `policy` says what the second
level cache keeps: see :func:`policy_evict_first`. Source: PTX ISA, ``cp.async``, ``cp.async.bulk``,
``createpolicy``.
"""

from __future__ import annotations

from .instruction import instruction
from .machine import engines, thread

_HOPPER = (9, 0)


# Cache policies ----------------------------------------------------------------------------------


@instruction("i64()", asm="createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", min_cc=(8, 0))
def policy_evict_first():
    """For data that is read once."""
    return 0x12F0000000000000


@instruction("i64()", asm="createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", min_cc=(8, 0))
def policy_evict_last():
    """For data that many blocks read."""
    return 0x14F0000000000000


# Bulk copies -------------------------------------------------------------------------------------


@instruction(
    "void(u32, i64, u32, u32)",
    asm="cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    memory=True,
    min_cc=_HOPPER,
)
def bulk_load(target, address, count, mbarrier):
    """Copy `count` bytes from global `address` to shared `target`, counted at `mbarrier`."""
    engines().bulk_load(thread(), target, address, count, mbarrier)


@instruction(
    "void(u32, i64, u32, u32, i64)",
    asm="cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    " [$0], [$1], $2, [$3], $4;",
    memory=True,
    min_cc=_HOPPER,
)
def bulk_load_hint(target, address, count, mbarrier, policy):
    """:func:`bulk_load` with a cache policy."""
    engines().bulk_load(thread(), target, address, count, mbarrier)


@instruction(
    "void(i64, u32, u32)",
    asm="cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;",
    memory=True,
    min_cc=_HOPPER,
)
def bulk_store(address, source, count):
    """Copy `count` bytes from shared `source` to global `address`, in the thread's open group."""
    engines().bulk_store(thread(), address, source, count)


@instruction(
    "void(i64, u32, u32, i64)",
    asm="cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [$0], [$1], $2, $3;",
    memory=True,
    min_cc=_HOPPER,
)
def bulk_store_hint(address, source, count, policy):
    """:func:`bulk_store` with a cache policy."""
    engines().bulk_store(thread(), address, source, count)


@instruction(
    "void(i64, u32)",
    asm="cp.async.bulk.prefetch.L2.global [$0], $1;",
    memory=True,
    min_cc=_HOPPER,
)
def bulk_prefetch(address, count):
    """Bring `count` bytes to the second level cache; both are multiples of 16."""
    engines().bulk_prefetch(thread(), address, count)


@instruction("void()", asm="cp.async.bulk.commit_group;", memory=True, min_cc=_HOPPER)
def bulk_commit_group():
    """Close the group of the stores that this thread has issued since the last."""
    engines().bulk_commit(thread())


@instruction("void(imm)", asm="cp.async.bulk.wait_group {pending};", memory=True, min_cc=_HOPPER)
def bulk_wait_group(pending):
    """Wait until at most `pending` of this thread's groups have not been written."""
    engines().bulk_wait(thread(), pending, read_only=False)


@instruction(
    "void(imm)", asm="cp.async.bulk.wait_group.read {pending};", memory=True, min_cc=_HOPPER
)
def bulk_wait_group_read(pending):
    """Wait until the sources of all but `pending` of this thread's groups have been read."""
    engines().bulk_wait(thread(), pending, read_only=True)


# Copies of 4, 8 and 16 bytes ---------------------------------------------------------------------


@instruction("void(u32, i64, u32)", asm="cp.async.ca.shared.global [$0], [$1], 4, $2;", memory=True)
def cp_async_4(target, address, count):
    """Copy `count` bytes (0 to 4) to shared `target`, and zeros up to 4; as :func:`cp_async_16`."""
    engines().cp_async(thread(), target, address, 4, count)


@instruction("void(u32, i64, u32)", asm="cp.async.ca.shared.global [$0], [$1], 8, $2;", memory=True)
def cp_async_8(target, address, count):
    """Copy `count` bytes (0 to 8) to shared `target`, and zeros up to 8; as :func:`cp_async_16`."""
    engines().cp_async(thread(), target, address, 8, count)


@instruction(
    "void(u32, i64, u32)", asm="cp.async.cg.shared.global [$0], [$1], 16, $2;", memory=True
)
def cp_async_16(target, address, count):
    """Copy `count` bytes (0 to 16) to shared `target`, and zeros up to 16.

    With 0 nothing is read, whatever `address` is.
    """
    engines().cp_async(thread(), target, address, 16, count)


@instruction("void()", asm="cp.async.commit_group;", memory=True)
def cp_async_commit_group():
    """Close the group of the copies that this thread has issued since the last."""
    engines().cp_async_commit(thread())


@instruction("void(imm)", asm="cp.async.wait_group {pending};", memory=True)
def cp_async_wait_group(pending):
    """Wait until at most `pending` of this thread's groups are not complete."""
    engines().cp_async_wait(thread(), pending)


@instruction("void(u32)", asm="cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", memory=True)
def cp_async_arrive(mbarrier):
    """Arrive at an mbarrier once all copies that this thread has issued are complete.

    Counts as one of the arrivals that the mbarrier was made for.
    """
    engines().cp_async_arrive(thread(), mbarrier)
