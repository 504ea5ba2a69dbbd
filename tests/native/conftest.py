from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import conflux_native

from .standin import GREEN, SINCE_13_1, StandIn, build

if TYPE_CHECKING:
    from conflux_native import Device


@pytest.fixture(scope="session")
def stand_in_580(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(build(tmp_path_factory.mktemp("stand_in_580"), without=SINCE_13_1))


@pytest.fixture(scope="session")
def stand_in_newest(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(build(tmp_path_factory.mktemp("stand_in_newest")))


@pytest.fixture(scope="session")
def stand_in_old(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    without = (*GREEN, "cuDeviceGetUuid_v2", "cuLaunchKernelEx", "cuOccupancyMaxActiveClusters")
    return StandIn(build(tmp_path_factory.mktemp("stand_in_old"), without=without))


def fresh(library: StandIn) -> Iterator[StandIn]:
    library.reset()
    yield library
    library.reset()


@pytest.fixture
def stand_in(stand_in_580: StandIn) -> Iterator[StandIn]:
    """libcuda as of CUDA 13.0, driver 580: green contexts, but no structured split."""
    yield from fresh(stand_in_580)


@pytest.fixture
def newest(stand_in_newest: StandIn) -> Iterator[StandIn]:
    """libcuda as of CUDA 13.1, with cuDevSmResourceSplit."""
    yield from fresh(stand_in_newest)


@pytest.fixture
def old(stand_in_old: StandIn) -> Iterator[StandIn]:
    """libcuda without green contexts, clusters and the UUID."""
    yield from fresh(stand_in_old)


@pytest.fixture
def device(stand_in: StandIn) -> Device:
    """The GPU of a fresh ``stand_in``."""
    return conflux_native.Device(conflux_native.Driver(stand_in.path))
