"""The planner's promises, on the recorded H200 and on random devices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_native.topology import Topology
from sglang_ext.sm.levels import LEAST_SHARE, MOST_SHARE, RATIO, geometric_levels
from sglang_ext.sm.planner import PartitionPlanner, Split
from tests.sm.topologies import h200, topologies, topology


def counts(planner: PartitionPlanner, side: tuple[int, ...]) -> list[int]:
    """TPCs of ``side`` in each of the planner's GPCs."""
    return [len(set(side).intersection(gpc)) for gpc in planner.gpcs]


def check(planner: PartitionPlanner, tpcs: int, split: Split) -> None:
    device = planner.topology
    assert len(split.decode) == tpcs
    assert set(split.decode).isdisjoint(split.prefill)
    assert sorted(split.decode + split.prefill) == list(range(device.tpcs))
    for gpc in device.gpcs:
        decode, prefill = (len(set(side).intersection(gpc)) for side in (split.decode, split.prefill))
        # A GPC is whole on one side, or clusters fit on both.
        assert min(decode, prefill) == 0 or min(decode, prefill) >= planner.min_per_gpc
    for side in (split.decode, split.prefill):
        assert list(side) == sorted(side)
        used = [count for count in counts(planner, side) if count]
        # Not on loose TPCs alone.
        assert used
        assert min(used) >= planner.min_per_gpc


def check_clusters(device: Topology, side: tuple[int, ...]) -> None:
    """No cluster of up to eight blocks that this device can run waits for room on a side, in whichever GPC it lands."""
    shares = [len(set(side).intersection(gpc)) for gpc in device.gpcs]
    for size in range(2, 9):
        room = [2 * share >= size for share in shares]
        hosts = [2 * len(gpc) >= size for gpc in device.gpcs]
        assert any(room) or not any(hosts)
        assert all(fits or not host or share == 0 for fits, host, share in zip(room, hosts, shares, strict=True))


def ways(planner: PartitionPlanner, tpcs: int) -> list[tuple[int, ...]]:
    """Every safe way to give decode ``tpcs``, by brute force, as its TPCs in each GPC that is not loose."""
    least, sizes = planner.min_per_gpc, [len(gpc) for gpc in planner.gpcs]
    loose = {sum(taken) for taken in itertools.product(*((0, len(gpc)) for gpc in planner.loose))}
    found = []
    for shares in itertools.product(*(range(size + 1) for size in sizes)):
        rest = [size - share for size, share in zip(sizes, shares, strict=True)]
        safe = all(side == 0 or side >= least for side in (*shares, *rest))
        if safe and any(shares) and any(rest) and tpcs - sum(shares) in loose:
            found.append(shares)
    return found


def test_the_h200_gets_eight_levels_from_an_eighth_to_three_quarters() -> None:
    planner = PartitionPlanner(h200())
    assert planner.levels == (8, 12, 16, 20, 24, 32, 40, 48)
    assert planner.min_per_gpc == 4
    assert planner.loose == ((62,), (63,), (64,), (65,))
    for level in planner.levels:
        split = planner.split(level)
        check(planner, level, split)
        # Loose TPCs stay with prefill.
        assert {62, 63, 64, 65} <= set(split.prefill)
        for side in (split.decode, split.prefill):
            check_clusters(h200(), side)
            assert {1, 2, 3}.isdisjoint(counts(planner, side))


def test_the_h200_has_the_sets_on_which_a_small_models_gemms_ended() -> None:
    planner = PartitionPlanner(h200())
    eight = (6, 7, 14, 15, 22, 23, 30, 31)
    assert planner.split(8).decode == eight
    assert planner.split(20).decode == tuple(sorted((*eight, 1, 2, 3, 9, 10, 11, 17, 18, 19, 25, 26, 27)))
    # Those on which they hung.
    earlier = PartitionPlanner(h200(), 2)
    for level in (8, 20):
        with pytest.raises(AssertionError):
            check_clusters(h200(), earlier.split(level).decode)


def test_the_h200_reads_from_another_gpc_with_every_four_tpcs() -> None:
    planner = PartitionPlanner(h200())
    for level in (8, 12, 16, 20, 24, 32):
        assert [count for count in counts(planner, planner.split(level).decode) if count] == [4] * (level // 4)


def test_every_count_can_be_planned_on_the_h200_but_those_that_leave_a_side_without_a_cluster() -> None:
    planner = PartitionPlanner(h200())
    assert [tpcs for tpcs in range(67) if planner.plan(tpcs) is None] == [0, 1, 2, 3, 63, 64, 65, 66]
    for tpcs in range(4, 63):
        split = planner.plan(tpcs)
        assert split is not None
        check(planner, tpcs, split)


@given(topologies())
def test_every_cluster_that_the_device_can_run_has_room_on_both_sides_of_every_level(device: Topology) -> None:
    planner = PartitionPlanner(device)
    for tpcs in (*planner.levels, *range(device.tpcs)):
        split = planner.plan(tpcs)
        if split is not None:
            check_clusters(device, split.decode)
            check_clusters(device, split.prefill)


@given(topologies(), st.integers(1, 4), st.integers(1, 14))
def test_levels_are_safe_few_and_ascending(device: Topology, min_per_gpc: int, max_levels: int) -> None:
    planner = PartitionPlanner(device, min_per_gpc, max_levels)
    levels = planner.levels
    assert len(levels) <= max_levels
    assert list(levels) == sorted(set(levels))
    assert all(level <= device.tpcs * MOST_SHARE for level in levels)
    assert all(after >= before * RATIO for before, after in itertools.pairwise(levels))
    for level in levels:
        split = planner.split(level)
        check(planner, level, split)
        assert planner.keep_off(level) == split.prefill


@given(topologies(), st.integers(1, 4))
def test_every_plan_is_safe_and_the_same_again(device: Topology, min_per_gpc: int) -> None:
    planner, again = (PartitionPlanner(device, min_per_gpc) for _ in range(2))
    assert planner.levels == again.levels
    for tpcs in range(device.tpcs + 1):
        split = planner.plan(tpcs)
        assert split == again.plan(tpcs)
        if split is not None:
            check(planner, tpcs, split)


@given(topologies(most_gpcs=4, largest=6), st.integers(1, 3), st.data())
def test_a_plan_is_found_where_there_is_one_and_none_is_more_even(
    device: Topology, min_per_gpc: int, data: st.DataObject
) -> None:
    planner = PartitionPlanner(device, min_per_gpc)
    tpcs = data.draw(st.integers(0, device.tpcs))
    possible, split = ways(planner, tpcs), planner.plan(tpcs)
    assert (split is None) == (not possible)
    if split is None:
        return
    shares = tuple(counts(planner, split.decode))
    assert shares in possible
    assert sum(shares) == max(sum(way) for way in possible)  # no more loose ones than needed
    fullest = [way for way in possible if sum(way) == sum(shares)]
    assert sum(share**2 for share in shares) == min(sum(share**2 for share in way) for way in fullest)


@given(st.integers(4, 12), st.integers(2, 10), st.integers(2, 4))
def test_equal_gpcs_differ_by_one_at_most_where_nothing_forces_more(gpcs: int, size: int, min_per_gpc: int) -> None:
    planner = PartitionPlanner(topology([size] * gpcs), min_per_gpc)
    for tpcs in range(planner.topology.tpcs):
        split = planner.plan(tpcs)
        least = planner.min_per_gpc
        if split is not None and gpcs * least <= tpcs <= gpcs * (size - least):
            shares = counts(planner, split.decode)
            assert max(shares) - min(shares) <= 1


def test_a_side_never_lives_on_loose_tpcs_alone() -> None:
    planner = PartitionPlanner(topology([8], loose=20))
    assert planner.plan(4) is not None
    assert planner.plan(3) is None
    split = planner.plan(24)
    assert split is not None
    assert len(set(split.prefill).intersection(planner.gpcs[0])) >= 4
    assert planner.plan(25) is None


def test_a_small_gpc_stays_whole() -> None:
    planner = PartitionPlanner(topology([8, 8, 3]))
    (small,) = planner.loose
    assert len(small) == 3
    assert [tpcs for tpcs in range(20) if planner.plan(tpcs)] == [4, 7, 8, 11, 12, 15]
    split = planner.plan(7)
    assert split is not None
    assert set(small) <= set(split.decode)


def test_a_gpc_of_which_a_tpc_hosted_no_cluster_of_eight_stays_whole() -> None:
    device = topology([8, 8, 8])
    other = device.gpcs[1]
    hosts = {**device.hosts, 8: device.hosts[8].difference(other[:1])}
    planner = PartitionPlanner(Topology(tpcs=24, gpcs=device.gpcs, hosts=hosts))
    assert planner.loose == (other,)
    for tpcs in range(24):
        split = planner.plan(tpcs)
        assert split is None or len(set(split.decode).intersection(other)) in (0, 8)


def test_where_clusters_were_not_measured_nothing_is_offered() -> None:
    assert PartitionPlanner(Topology.striped(66)).levels == ()
    device = h200()
    for missing in (8, 4):
        hosts = {size: tpcs for size, tpcs in device.hosts.items() if size < missing}
        assert PartitionPlanner(Topology(tpcs=66, gpcs=device.gpcs, hosts=hosts)).levels == ()


def test_a_chip_without_clusters_may_be_divided_anyhow() -> None:
    planner = PartitionPlanner(Topology.striped(54, cluster_free=True), 1)
    assert planner.levels == (8, 12, 16, 20, 24, 32, 40)
    assert counts(planner, planner.split(8).decode) == [1] * 8


def test_where_eight_blocks_fit_nowhere_whole_gpcs_change_sides() -> None:
    planner = PartitionPlanner(topology([3] * 6 + [2]))
    # Six blocks fit in three TPCs, so three are needed, and no GPC has enough to share.
    assert planner.min_per_gpc == 3
    assert [tpcs for tpcs in range(21) if planner.plan(tpcs)] == [3, 5, 6, 8, 9, 11, 12, 14, 15, 17]


@pytest.mark.parametrize(
    ("sizes", "loose", "levels"),
    [
        ([1], 0, ()),
        ([2], 0, ()),  # one GPC that is too small to be divided
        ([4], 0, ()),
        ([7], 0, ()),
        ([7], 30, ()),
        ([8], 0, (4,)),
        ([2, 2], 0, (2,)),
        ([4, 4, 4], 0, (4, 8)),
        ([3] * 7, 0, (3, 6, 9, 12, 15)),
        ([7] * 9, 0, (14, 21, 28, 35, 42)),
        ([9, 9, 8, 8, 8, 7, 7], 1, (8, 12, 16, 20, 24, 32, 40)),
        ([9] * 8 + [2], 0, (8, 12, 16, 20, 24, 32, 40, 48)),
    ],
)
def test_small_devices_and_small_gpcs_get_few_levels_or_none(sizes: list[int], loose: int, levels: tuple) -> None:
    assert PartitionPlanner(topology(sizes, loose)).levels == levels


def test_other_counts_than_the_levels_are_refused_by_name() -> None:
    planner = PartitionPlanner(h200())
    with pytest.raises(ValueError, match="13 TPCs here: the levels on offer are 8, 12, 16, 20, 24, 32, 40, 48"):
        planner.split(13)
    with pytest.raises(ValueError, match="the levels on offer are none"):
        PartitionPlanner(topology([2])).split(1)


def test_one_count_can_be_asked_for() -> None:
    planner = PartitionPlanner(h200(), only=22)
    assert planner.levels == (22,)
    check(planner, 22, planner.split(22))
    assert PartitionPlanner(h200(), only=65).levels == (62,)
    assert PartitionPlanner(topology([2]), only=1).levels == ()


def test_nearest() -> None:
    planner = PartitionPlanner(h200())
    assert [planner.nearest(tpcs) for tpcs in (0, 8, 10, 13, 28, 66)] == [8, 8, 12, 12, 32, 48]
    with pytest.raises(ValueError, match="no levels"):
        PartitionPlanner(topology([2])).nearest(4)


@pytest.mark.parametrize(("least", "levels"), [(0, 12), (2, 0)])
def test_nonsense_is_refused(least: int, levels: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        PartitionPlanner(h200(), least, levels)


@given(st.integers(1, 128), st.sampled_from([2, 4, 8]), st.integers(1, 14), st.sets(st.integers(0, 128)))
def test_geometric_levels(total: int, quantum: int, most: int, impossible: set[int]) -> None:
    levels = geometric_levels(total, quantum, most, lambda tpcs: tpcs not in impossible)
    assert len(levels) <= most
    assert impossible.isdisjoint(levels)
    assert all(level % quantum == 0 for level in levels)
    assert all(total * LEAST_SHARE - quantum / 2 <= level <= total * MOST_SHARE for level in levels)
