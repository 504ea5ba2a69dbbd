"""On a real GPU: the search from nothing, every single TPC, and the topology."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("conflux_native._core", reason="the extension is not built")

from conflux_native import CudaError, Device, Driver, DriverMissing, Mask, MaskSlot
from conflux_native.child import NO_EFFECT, VERIFIED
from conflux_native.measure import measure_topology
from conflux_native.offsets import known_offset
from conflux_native.search import find_slot
from conflux_native.topology import tpc_count
from conflux_native.verify import Verdict, standard_masks, verify

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def driver() -> Driver:
    try:
        driver = Driver()
    except (DriverMissing, CudaError) as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")
    if not driver.device_count:
        pytest.skip("needs an NVIDIA GPU")
    return driver


@pytest.fixture(scope="module")
def known(driver: Driver) -> int:
    offset = known_offset(driver.version)
    if offset is None:
        pytest.skip(f"nothing is known to compare with for CUDA version {driver.version}")
    return offset


def test_the_known_offset_is_verified_in_a_second_or_so(known: int, tmp_path: Path) -> None:
    found = find_slot(remembered_dir=tmp_path)
    assert (found.offset, found.how) == (known, "known")
    again = find_slot(remembered_dir=tmp_path)
    assert (again.offset, again.how) == (known, "remembered")
    print(f"{found.seconds:.2f} s, {again.seconds:.3f} s when remembered; a fresh stream holds {found.tried[0].before}")


def test_a_search_that_knows_nothing_finds_it_and_survives_what_it_tries_before(known: int) -> None:
    found = find_slot(skip_known=True, use_memory=False)
    print(f"{len(found.tried)} tried in {found.seconds:.1f} s")
    for attempt in found.tried:
        if attempt.outcome != NO_EFFECT:
            print(f"{attempt.offset:#x}: {attempt.outcome} (was {attempt.before})")
    assert found.offset == known
    assert found.tried[-1].outcome == VERIFIED
    assert len(found.tried) > 1


def test_wrong_offsets_before_it_do_no_harm(known: int) -> None:
    # Places near it and far from it; among them what was a pointer, since nothing is left out.
    wrong = [known - 4, known + 4, known + 16, known - 16, 0x8, 0x10, 0x40, 0x100, 0x200]
    found = find_slot(offsets=[*wrong, known], use_memory=False)
    print(*(f"{attempt.offset:#x}: {attempt.outcome}" for attempt in found.tried), f"{found.seconds:.1f} s", sep="\n")
    assert found.offset == known
    assert {attempt.offset for attempt in found.tried} == {*wrong, known}


def test_every_single_tpc_can_be_masked(driver: Driver) -> None:
    device = Device(driver)
    slot = MaskSlot(find_slot(use_memory=False).offset)
    tpcs = tpc_count(device.sm_count)
    masks = [Mask([tpc]) for tpc in range(tpcs)] + standard_masks(tpcs)
    assert verify(device, slot, masks) == Verdict(True, len(masks))


def test_the_topology_is_measured_the_same_each_time(driver: Driver) -> None:
    device = Device(driver)
    topology = measure_topology(device)
    print(topology.to_json())
    if device.compute_capability >= (9, 0):
        assert topology == measure_topology(device)
        assert topology.hosting(2) == frozenset(range(topology.tpcs))
        for gpc in topology.gpcs:
            assert topology.hosting(4).issuperset(gpc) == (len(gpc) > 1)
