"""Which sets of TPCs are measured: only ones on which kernels with clusters end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_native.topology import Topology
from sglang_ext.calibrate.sets import TpcSet, green_sets, masked_sets, thinned
from sglang_ext.sm.planner import PartitionPlanner

H200 = Topology.recorded("h200")


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """GPCs of any size, ids dealt out at random, some of them alone and unable to host clusters."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=9))
    total = sum(sizes)
    ids = draw(st.permutations(range(total)))
    gpcs, at = [], 0
    for size in sizes:
        gpcs.append(tuple(sorted(ids[at : at + size])))
        at += size
    hosts = {size: frozenset(tpc for gpc in gpcs for tpc in gpc if 2 * len(gpc) >= size) for size in (2, 4, 8, 16)}
    return Topology(tpcs=total, gpcs=tuple(sorted(gpcs)), hosts=hosts)


def safe(topology: Topology, tpcs: tuple[int, ...]) -> bool:
    """Every GPC in use has room for clusters of eight, or, where it is smaller, is in the set whole.

    Some GPC in use has room for the largest cluster of up to eight blocks that runs on this device.
    """
    shares = [len(set(tpcs).intersection(gpc)) for gpc in topology.gpcs]
    safe = all(share == 0 or share >= min(4, len(gpc)) for share, gpc in zip(shares, topology.gpcs, strict=True))
    return safe and max(shares) >= min(4, max(map(len, topology.gpcs)))


def check(topology: Topology, sets: list[TpcSet]) -> None:
    whole, *rest = sets
    assert (whole.side, whole.count, whole.tpcs, whole.green_sms) == ("whole device", topology.tpcs, (), 0)
    assert [one.count for one in sets] == sorted((one.count for one in sets), reverse=True)
    assert len({one.tpcs for one in rest}) == len(rest)
    for one in rest:
        assert one.count == len(set(one.tpcs)) < topology.tpcs
        assert set(one.tpcs) <= set(range(topology.tpcs))
        assert safe(topology, one.tpcs)


@given(topologies(), st.booleans())
def test_sets_are_safe_on_any_device(topology: Topology, quick: bool) -> None:
    planner = PartitionPlanner(topology)
    sets = masked_sets(planner, quick=quick)
    check(topology, sets)
    levels = {planner.split(level).decode for level in planner.levels}
    # One level's decode side may be another's prefill side.
    assert levels <= {one.tpcs for one in sets} or quick
    assert {one.tpcs for one in sets if one.side == "planner's decode side"} <= levels


def test_the_h200() -> None:
    sets = masked_sets(PartitionPlanner(H200))
    check(H200, sets)
    sides = {one.side for one in sets}
    assert sides == {"whole device", "planner's decode side", "planner's prefill side", "small"}
    assert min(one.count for one in sets) == 4  # room for one cluster of eight
    quick = masked_sets(PartitionPlanner(H200), quick=True)
    check(H200, quick)
    assert len(quick) < len(sets) / 2


def test_asked_for_counts() -> None:
    sets = masked_sets(PartitionPlanner(H200), (6, 30, 66))
    check(H200, sets)
    assert [one.count for one in sets] == [66, 30, 6]
    for count in (1, 3, 67):
        with pytest.raises(ValueError, match=f"{count} TPCs cannot be measured: this device has 66"):
            masked_sets(PartitionPlanner(H200), (count,))


@given(st.integers(1, 80), st.sampled_from([(8, 8), (2, 2), (4, 2), (8, 2), (16, 8), (1, 1)]), st.booleans())
def test_green_contexts_keep_to_the_driver_s_granularity(total: int, granularity: tuple[int, int], quick: bool) -> None:
    least, multiple = granularity
    whole, *rest = green_sets(total, granularity, quick=quick)
    assert whole == TpcSet("whole device", total)
    assert len(rest) <= 12
    for one in rest:
        assert one.tpcs == ()
        assert one.green_sms == 2 * one.count < 2 * total
        assert one.green_sms >= least
        assert one.green_sms % multiple == 0


def test_counts_asked_of_green_contexts_are_rounded_down() -> None:
    assert [one.green_sms for one in green_sets(66, (8, 8), (10, 66))] == [0, 16]
    with pytest.raises(ValueError, match="at least 4 TPCs and fewer than 66, not 3"):
        green_sets(66, (8, 8), (3,))


@given(st.lists(st.integers(), max_size=50, unique=True), st.integers(1, 12))
def test_thinned_keeps_the_ends(values: list[int], most: int) -> None:
    kept = thinned(values, most)
    assert len(kept) == min(most, len(values))
    assert [value for value in values if value in kept] == kept
    if values and most > 1:
        assert (kept[0], kept[-1]) == (values[0], values[-1])
