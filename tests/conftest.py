from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from tests import workers

# No test may depend on how fast the machine is.
settings.register_profile("conflux", deadline=None)
settings.load_profile("conflux")


@pytest.fixture
def prometheus() -> Iterator[ModuleType]:
    """prometheus_client, which afterwards knows the metrics that it knew before."""
    module = pytest.importorskip("prometheus_client")
    known = set(module.REGISTRY._collector_to_names)
    yield module
    for collector in set(module.REGISTRY._collector_to_names) - known:
        module.REGISTRY.unregister(collector)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return workers.make_scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: workers.place(item.nodeid))
