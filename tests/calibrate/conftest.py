from __future__ import annotations

import pytest

from tests.native.conftest import stand_in, stand_in_580  # noqa: F401 (fixtures)
from tests.native.standin import StandIn


@pytest.fixture
def small(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:  # noqa: F811
    """A GPU of 16 TPCs, four in each of four GPCs; its settings can be changed through the environment."""
    gpcs = ";".join(",".join(str(tpc) for tpc in range(gpc, 16, 4)) for gpc in range(4))
    monkeypatch.setenv("CONFLUX_LIBCUDA", stand_in.path)
    monkeypatch.setenv("STAND_IN_TPCS", "16")
    monkeypatch.setenv("STAND_IN_GPCS", gpcs)
    return monkeypatch
