from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from tests import workers

# No test may depend on how fast the machine is.
settings.register_profile("conflux", deadline=None)
settings.load_profile("conflux")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return workers.make_scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: workers.place(item.nodeid))
