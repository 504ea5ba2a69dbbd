from __future__ import annotations

from hypothesis import settings

# No test may depend on how fast the machine is.
settings.register_profile("conflux", deadline=None)
settings.load_profile("conflux")
