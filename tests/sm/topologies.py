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
    """GPCs of ``sizes`` and ``loose`` TPCs that host nothing, with ids dealt out in turn, or as ``order`` permutes."""
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
    hosting = frozenset(tpc for gpc in gpcs if len(gpc) > 1 for tpc in gpc)
    hosts = {2: frozenset(range(total)), 4: frozenset(range(total)) if cluster_free else hosting}
    return Topology(tpcs=total, gpcs=tuple(sorted(gpcs)), hosts=hosts)


@st.composite
def topologies(draw: st.DrawFn, most_gpcs: int = 10, largest: int = 10) -> Topology:
    sizes = draw(st.lists(st.integers(1, largest), min_size=1, max_size=most_gpcs))
    loose = draw(st.integers(0, 6))
    order = draw(st.permutations(range(sum(sizes) + loose)))
    return topology(sizes, loose, cluster_free=draw(st.booleans()), order=order)
