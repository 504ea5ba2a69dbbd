from __future__ import annotations

from hypothesis import settings

# No test here may depend on how fast the machine is.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
