"""The runner of ``checks`` on the simulated machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import nvfp4
from nvfp4 import launch
from nvfp4.arrays import as_array

from .checks import Out, launches


class Simulated:
    """Run plans on the simulated machine; ``schedule`` and ``checks`` as in ``nvfp4.simulate``.

    With `block` every launch has that block and, unless told otherwise, a grid of one block: bodies
    must not depend on either, but for what they say they need.
    """

    def __init__(
        self,
        arch: str = "sm_90a",
        schedule: Any = "round_robin",
        checks: Any = True,
        block: Any = None,
        grid: Any = None,
    ) -> None:
        self.arch, self.schedule, self.checks = arch, schedule, checks
        self.block, self.grid = block, grid
        #: Only reference kernels leave their block to the plan.
        self.reference_only = block is not None

    def __call__(
        self,
        plan: str,
        facts: Mapping[str, Any],
        buffers: Mapping[str, Any],
        outputs: Mapping[str, Out],
    ) -> dict[str, np.ndarray]:
        results = {name: out.poisoned() for name, out in outputs.items()}
        wrapped = {
            name: as_array(value, name) if isinstance(value, np.ndarray) else value
            for name, value in {**buffers, **results}.items()
        }
        planned = [self.changed(one) for one in launches(plan, self.arch, facts)]
        with nvfp4.simulate(self.arch, schedule=self.schedule, checks=self.checks) as machine:
            launch.run(planned, wrapped, machine=machine)
        return results

    def changed(self, one: launch.Launch) -> launch.Launch:
        """A launch with this runner's block and grid."""
        if self.block is None or one.empty:
            return one
        grid = self.grid or (1, 1, 1)
        return launch.Launch(one.program, grid, self.block, one.shared_bytes, one.args)
