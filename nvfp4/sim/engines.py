"""What the machine does asynchronously, and what a warp does with matrices: for models.

Models in ``nvfp4.ptx`` call these with the running thread first.
"""

from __future__ import annotations

from .clusters import (
    cluster_arrive,
    cluster_arrive_remote,
    cluster_load,
    cluster_map,
    cluster_wait,
)
from .copies import (
    bulk_commit,
    bulk_load,
    bulk_prefetch,
    bulk_store,
    bulk_wait,
    cp_async,
    cp_async_arrive,
    cp_async_commit,
    cp_async_wait,
    tensormap_acquire,
    tensormap_prefetch,
    tensormap_release,
    tma_gather,
    tma_gather_cluster,
    tma_load,
    tma_load_multicast,
    tma_load_pair,
    tma_store,
)
from .launch_control import try_cancel
from .matrices import ldmatrix, mma_resolver, stmatrix
from .mbarriers import (
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_inval,
    mbarrier_test,
    mbarrier_try_wait,
    mbarrier_wait,
)
from .order import proxy_fence
from .registers import setmaxnreg
from .scaled_matrices import ldmatrix_e2m1, scaled_mma_resolver
from .tcgen05 import (
    tcgen05_alloc,
    tcgen05_dealloc,
    tcgen05_fence_after,
    tcgen05_fence_before,
    tcgen05_ld,
    tcgen05_relinquish,
    tcgen05_st,
    tcgen05_wait_ld,
    tcgen05_wait_st,
)
from .tcgen05_products import tcgen05_commit, tcgen05_cp, tcgen05_mma
from .warpgroups import wgmma, wgmma_commit, wgmma_fence, wgmma_values, wgmma_wait

__all__ = [
    "bulk_commit",
    "bulk_load",
    "bulk_prefetch",
    "bulk_store",
    "bulk_wait",
    "cluster_arrive",
    "cluster_arrive_remote",
    "cluster_load",
    "cluster_map",
    "cluster_wait",
    "cp_async",
    "cp_async_arrive",
    "cp_async_commit",
    "cp_async_wait",
    "ldmatrix",
    "ldmatrix_e2m1",
    "mbarrier_arrive",
    "mbarrier_expect_tx",
    "mbarrier_init",
    "mbarrier_inval",
    "mbarrier_test",
    "mbarrier_try_wait",
    "mbarrier_wait",
    "mma_resolver",
    "proxy_fence",
    "scaled_mma_resolver",
    "setmaxnreg",
    "stmatrix",
    "tcgen05_alloc",
    "tcgen05_commit",
    "tcgen05_cp",
    "tcgen05_dealloc",
    "tcgen05_fence_after",
    "tcgen05_fence_before",
    "tcgen05_ld",
    "tcgen05_mma",
    "tcgen05_relinquish",
    "tcgen05_st",
    "tcgen05_wait_ld",
    "tcgen05_wait_st",
    "tensormap_acquire",
    "tensormap_prefetch",
    "tensormap_release",
    "tma_gather",
    "tma_gather_cluster",
    "tma_load",
    "tma_load_multicast",
    "tma_load_pair",
    "tma_store",
    "try_cancel",
    "wgmma",
    "wgmma_commit",
    "wgmma_fence",
    "wgmma_values",
    "wgmma_wait",
]
