"""Which TPCs decode and prefill get: two disjoint sets that together are the device, safe for thread-block clusters.

A kernel launched in clusters waits for ever where no cluster fits. A cluster lives inside one GPC, a block may fill an
SM, and eight blocks are the most that a kernel may launch without asking for more: four TPCs of one GPC. Measured on an
H200 (CUDA 13.0): on 8 TPCs, two in each of four GPCs, a bf16 GEMM of M = 32, K = 1024, N = 2048 never ended, and a
server of that hidden size hung on 20, two or three in each of eight GPCs. Clusters of four run on both sets, so cuBLAS
launches larger ones. On 8 and 20 TPCs, four in each GPC in use, those GEMMs ended. (The GEMMs of a model with K from
4096 had passed on the sets with two in each: which clusters cuBLAS launches depends on the shape.)

So a GPC is divided only if both sides get at least four TPCs of it (:data:`MIN_PER_GPC`), and goes to one side whole
otherwise. Within that rule decode's TPCs are spread over the GPCs as evenly as can be, because each GPC has a link of
its own to memory: on an H200 16 TPCs read 3.2 TB/s as four in each of four GPCs and 2.3 as two whole GPCs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sglang_ext.sm.levels import geometric_levels, nearest_possible

if TYPE_CHECKING:
    from conflux_native.topology import Topology

MIN_PER_GPC = 4
"""TPCs of a GPC, two SMs each, that have room for a cluster of eight blocks: the largest that is launched unasked."""

_QUANTUM = 4
"""Levels are multiples of this many TPCs: each adds one GPC, with its link to memory, to decode's side."""


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Logical TPC ids of each side, ascending; disjoint, together all of the device."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]


class PartitionPlanner:
    """Plans for one device; the same topology always gives the same plans.

    ``min_per_gpc``: TPCs that a side must have of each GPC that it shares with the other; twice as many blocks are the
    largest cluster that has room. The attribute of that name is smaller where clusters of that size were launched and
    fit nowhere: no cluster is larger than the largest GPC, so both sides need at most that many, and only whole GPCs
    change sides. Chips without clusters (compute capability below 9.0) may be planned with 1. ``max_levels`` bounds the
    decode TPC counts on offer, each of which costs a set of CUDA graphs. ``only`` offers one count in place of the
    usual ones: that one, or the nearest that can be planned.

    GPCs that are too small for such a cluster, or of which some TPC was not seen hosting one, are *loose*: no cluster
    of that size waits for them, but smaller ones may, so each stays whole, on either side, once that has a safe GPC.
    They go to prefill, which is bound by compute, unless decode needs them. Where such clusters were not measured
    nothing is known to be safe and nothing is offered.
    """

    def __init__(
        self, topology: Topology, min_per_gpc: int = MIN_PER_GPC, max_levels: int = 12, *, only: int | None = None
    ) -> None:
        """Raise ValueError unless ``min_per_gpc`` and ``max_levels`` are at least 1."""
        if min_per_gpc < 1 or max_levels < 1:
            raise ValueError(f"min_per_gpc and max_levels must be at least 1, not {min_per_gpc} and {max_levels}")
        self.topology = topology
        self.min_per_gpc, hosting = _room(topology, min_per_gpc)
        safe = [gpc for gpc in topology.gpcs if len(gpc) >= self.min_per_gpc and hosting.issuperset(gpc)]
        self.gpcs = tuple(sorted(safe))
        self.loose = tuple(sorted(set(topology.gpcs).difference(safe), key=lambda gpc: (len(gpc), gpc)))
        self._spreads = even_spreads(tuple(len(gpc) for gpc in self.gpcs), self.min_per_gpc)
        self._loose_ways = _unions(self.loose)
        self._splits: dict[int, Split | None] = {}
        self.levels: tuple[int, ...]
        if only is None:
            divided = any(len(gpc) >= 2 * self.min_per_gpc for gpc in self.gpcs)
            # Where GPCs change sides whole, their sizes are the steps.
            quantum = _QUANTUM if divided else 1
            self.levels = geometric_levels(topology.tpcs, quantum, max_levels, self._possible)
        else:
            self.levels = nearest_possible(topology.tpcs, only, self._possible)

    def split(self, tpcs: int) -> Split:
        """The sets for a level on offer. Raises ValueError, naming the levels, for any other count."""
        split = self.plan(tpcs) if tpcs in self.levels else None
        if split is None:
            offered = ", ".join(map(str, self.levels)) or "none"
            raise ValueError(f"decode cannot be given {tpcs} TPCs here: the levels on offer are {offered}")
        return split

    def keep_off(self, tpcs: int) -> tuple[int, ...]:
        """TPCs that prefill may use while ``tpcs`` (a level) are reserved for decode: that split's prefill side."""
        return self.split(tpcs).prefill

    def nearest(self, tpcs: int) -> int:
        """The level nearest to ``tpcs``, of two as near the larger. Raises ValueError if there is none."""
        if not self.levels:
            raise ValueError("this device offers no levels: it has no two sides that are safe for clusters")
        return min(self.levels, key=lambda level: (abs(level - tpcs), -level))

    def plan(self, tpcs: int) -> Split | None:
        """Sets for any count, on offer or not; None where no safe ones exist."""
        if tpcs not in self._splits:
            self._splits[tpcs] = self._plan(tpcs)
        return self._splits[tpcs]

    def _possible(self, tpcs: int) -> bool:
        return self.plan(tpcs) is not None

    def _plan(self, tpcs: int) -> Split | None:
        totals = [total for total in self._spreads if tpcs - total in self._loose_ways]
        if not totals:
            return None
        shares = self._spreads[max(totals)]
        decode = {tpc for gpc, share in zip(self.gpcs, shares, strict=True) for tpc in gpc[:share]}
        decode.update(self._loose_ways[tpcs - max(totals)])
        prefill = tuple(tpc for tpc in range(self.topology.tpcs) if tpc not in decode)
        return Split(tuple(sorted(decode)), prefill)


def _room(topology: Topology, min_per_gpc: int) -> tuple[int, frozenset[int]]:
    """TPCs that a side needs of a GPC, and the TPCs that were seen hosting the largest clusters that then have room."""
    size = 1 << (2 * min_per_gpc).bit_length() - 1  # clusters of 2, 4, 8 and 16 blocks are measured
    if topology.hosts.get(size) == frozenset():
        smaller = [other for other, hosting in topology.hosts.items() if other < size and hosting]
        # What lies between, such as six blocks where four fit and eight do not, was not measured: the GPCs bound it.
        return min(min_per_gpc, max(map(len, topology.gpcs))), topology.hosting(max(smaller, default=size))
    return min_per_gpc, topology.hosting(size)


def _unions(gpcs: tuple[tuple[int, ...], ...]) -> dict[int, tuple[int, ...]]:
    """Number of TPCs → whole GPCs, the first that have so many together, for every number that can be had."""
    ways: dict[int, tuple[int, ...]] = {0: ()}
    for gpc in gpcs:
        for count, taken in list(ways.items()):
            ways.setdefault(count + len(gpc), taken + gpc)
    return ways


def shares_of(size: int, least: int) -> tuple[int, ...]:
    """How many TPCs of a GPC of ``size`` decode may have: none, all, or so many that both sides have ``least``."""
    return tuple(dict.fromkeys((0, *range(least, size - least + 1), size)))


def even_spreads(sizes: tuple[int, ...], least: int) -> dict[int, tuple[int, ...]]:
    """Number of TPCs → how many decode has in each GPC of ``sizes``, for every number that leaves each side a GPC.

    Of all ways the one with the least Σ d_i², which is the most even, then the least Σ (size_i − d_i)², the same for
    prefill, then the one that gives more to the first GPCs; found by dynamic programming over the GPCs.
    """
    # (decode's TPCs so far, decode has a GPC, prefill has one) → (cost, shares negated, so that min prefers the first)
    best: dict[tuple[int, bool, bool], tuple[int, int, tuple[int, ...]]] = {(0, False, False): (0, 0, ())}
    for size in sizes:
        grown: dict[tuple[int, bool, bool], tuple[int, int, tuple[int, ...]]] = {}
        for (total, decode, prefill), (decode_cost, prefill_cost, shares) in best.items():
            for share in shares_of(size, least):
                rest = size - share
                state = (total + share, decode or share > 0, prefill or rest > 0)
                way = (decode_cost + share**2, prefill_cost + rest**2, (*shares, -share))
                if state not in grown or way < grown[state]:
                    grown[state] = way
        best = grown
    return {state[0]: tuple(-share for share in way[2]) for state, way in best.items() if state[1] and state[2]}
