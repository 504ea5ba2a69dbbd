"""Topologies to plan on: the recorded H200's and random ones."""

from __future__ import annotations

import functools

from hypothesis import strategies as st

from conflux_native.topology import Topology


@functools.cache
def h200() -> Topology:
    return Topology.recorded("h200")


def topology(
    sizes: list[int], loose: int = 0, *, cluster_free: bool = False, order: list[int] | None = None
) -> Topology:
    """GPCs of ``sizes`` and ``loose`` TPCs alone, with ids dealt out in turn, or as ``order`` permutes.

    Clusters of 2, 4, 8 and 16 blocks were seen wherever they fit, or, where the chip has none, everywhere.
    """
    groups: list[list[int]] = [[] for _ in sizes]
    given = 0
    while given < sum(sizes):
        for group, size in zip(groups, sizes, strict=True):
            if len(group) < size:
                group.append(given)
                given += 1
    total = given + loose
    name = order or list(range(total))
    gpcs = [tuple(sorted(name[tpc] for tpc in group)) for group in groups]
    gpcs += [(name[tpc],) for tpc in range(given, total)]
    hosts = {
        size: frozenset(tpc for gpc in gpcs for tpc in gpc if cluster_free or 2 * len(gpc) >= size)
        for size in (2, 4, 8, 16)
    }
    return Topology(tpcs=total, gpcs=tuple(sorted(gpcs)), hosts=hosts)


@st.composite
def topologies(draw: st.DrawFn, most_gpcs: int = 10, largest: int = 10) -> Topology:
    """Any device; clusters of some sizes may not have been measured."""
    sizes = draw(st.lists(st.integers(1, largest), min_size=1, max_size=most_gpcs))
    loose = draw(st.integers(0, 6))
    order = draw(st.permutations(range(sum(sizes) + loose)))
    device = topology(sizes, loose, order=order)
    # Rarely, since little can be planned then.
    missing = draw(st.sampled_from([(), (), (), (16,), (8, 16), (4,), (2, 4, 8, 16)]))
    hosts = {size: tpcs for size, tpcs in device.hosts.items() if size not in missing}
    return Topology(tpcs=device.tpcs, gpcs=device.gpcs, hosts=hosts)
