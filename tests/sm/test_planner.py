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
    total = planner.topology.tpcs
    assert len(split.decode) == tpcs
    assert set(split.decode).isdisjoint(split.prefill)
    assert sorted(split.decode + split.prefill) == list(range(total))
    for side in (split.decode, split.prefill):
        assert list(side) == sorted(side)
        used = [count for count in counts(planner, side) if count]
        # Clusters of every used GPC fit, and there is one at all.
        assert used
        assert min(used) >= planner.min_per_gpc


def ways(planner: PartitionPlanner, tpcs: int) -> list[tuple[int, ...]]:
    """Every safe way to give decode ``tpcs``, by brute force, as its TPCs in each GPC."""
    least, sizes, loose = planner.min_per_gpc, [len(gpc) for gpc in planner.gpcs], len(planner.loose)
    found = []
    for shares in itertools.product(*(range(size + 1) for size in sizes)):
        rest = [size - share for size, share in zip(sizes, shares, strict=True)]
        safe = all(side == 0 or side >= least for side in (*shares, *rest))
        if safe and any(shares) and any(rest) and 0 <= tpcs - sum(shares) <= loose:
            found.append(shares)
    return found


def test_the_h200_gets_eight_levels_from_an_eighth_to_three_quarters() -> None:
    planner = PartitionPlanner(h200())
    assert planner.levels == (8, 12, 16, 20, 24, 32, 40, 48)
    assert planner.loose == (62, 63, 64, 65)
    for level in planner.levels:
        check(planner, level, planner.split(level))


def test_the_h200_reads_from_all_gpcs_as_soon_as_it_can() -> None:
    planner = PartitionPlanner(h200())
    assert planner.split(16).decode == tuple(range(16))  # the set measured at 3.8 TB/s
    used = {level: [count for count in counts(planner, planner.split(level).decode) if count] for level in (8, 12, 32)}
    assert used == {8: [2] * 4, 12: [2] * 6, 32: [4] * 8}
    for level in planner.levels:
        # Loose TPCs stay with prefill.
        assert set(planner.loose) <= set(planner.split(level).prefill)


def test_every_count_can_be_planned_on_the_h200_but_those_that_leave_a_side_without_a_cluster() -> None:
    planner = PartitionPlanner(h200())
    assert [tpcs for tpcs in range(67) if planner.plan(tpcs) is None] == [0, 1, 65, 66]
    for tpcs in range(2, 65):
        split = planner.plan(tpcs)
        assert split is not None
        check(planner, tpcs, split)


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
        if split is not None and gpcs * min_per_gpc <= tpcs <= gpcs * (size - min_per_gpc):
            shares = counts(planner, split.decode)
            assert max(shares) - min(shares) <= 1


def test_a_side_never_lives_on_loose_tpcs_alone() -> None:
    planner = PartitionPlanner(topology([4], loose=20))
    assert planner.plan(2) is not None
    assert planner.plan(1) is None
    split = planner.plan(20)
    assert split is not None
    assert len(set(split.prefill).intersection(planner.gpcs[0])) >= 2


def test_a_gpc_that_hosted_no_cluster_of_four_counts_as_loose() -> None:
    device = topology([8, 8, 2])
    hosts = {**device.hosts, 4: device.hosts[4].difference(device.gpcs[2])}
    planner = PartitionPlanner(Topology(tpcs=18, gpcs=device.gpcs, hosts=hosts))
    assert planner.loose == device.gpcs[2]


def test_where_clusters_were_not_measured_nothing_is_offered() -> None:
    assert PartitionPlanner(Topology.striped(66)).levels == ()
    assert PartitionPlanner(Topology.striped(64, cluster_free=True)).levels == (8, 12, 16, 20, 24, 32, 40, 48)


@pytest.mark.parametrize(
    ("sizes", "loose", "levels"),
    [
        ([], 8, ()),  # nothing hosts a cluster
        ([1], 0, ()),
        ([2], 0, ()),  # one cluster's worth: it cannot be divided
        ([2, 2], 0, ()),  # either side would have less than a quarter or more than it may
        ([4], 0, ()),
        ([8], 0, (4,)),
        ([4, 4, 4], 0, (4, 8)),
        ([9] * 8 + [2], 0, (8, 12, 16, 20, 24, 32, 40, 48)),
    ],
)
def test_small_devices_get_few_levels_or_none(sizes: list[int], loose: int, levels: tuple[int, ...]) -> None:
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
    assert PartitionPlanner(h200(), only=65).levels == (64,)
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
