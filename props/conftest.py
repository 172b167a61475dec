"""How Hypothesis runs: the same examples every time unless HYPOTHESIS_PROFILE says otherwise."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

# What `make test` runs: a failure there is there on every machine, and none comes by chance.
settings.register_profile("ci", derandomize=True, max_examples=150, print_blob=True, **_COMMON)
# For an afternoon's search: HYPOTHESIS_PROFILE=search pytest props
settings.register_profile("search", max_examples=3000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
