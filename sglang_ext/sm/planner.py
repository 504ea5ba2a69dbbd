"""Which TPCs decode and prefill get: two disjoint sets that together are the device, safe for thread-block clusters.

A kernel launched in clusters waits for ever where no cluster fits: on an H200 a decode step on six TPCs, one in each
of six GPCs, never ended. A cluster lives inside one GPC, so each side gets at least ``min_per_gpc`` TPCs of every GPC
that it uses. Within that rule decode's TPCs are spread over the GPCs as evenly as can be, because each GPC has a link
of its own to memory: on an H200 16 TPCs read 3.8 TB/s as two in each of eight GPCs, 3.2 as four in each of four, and
2.3 as two whole GPCs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sglang_ext.sm.levels import geometric_levels, nearest_possible

if TYPE_CHECKING:
    from conflux_native.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Logical TPC ids of each side, ascending; disjoint, together all of the device."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]


class PartitionPlanner:
    """Plans for one device; the same topology always gives the same plans.

    ``min_per_gpc``: TPCs that a side must have of each GPC that it uses. Two have room for a cluster of four blocks, an
    SM each, and everything that was tried ran on two; more make every split safe for larger clusters. ``max_levels``
    bounds the decode TPC counts on offer, each of which costs a set of CUDA graphs. ``only`` offers one count in place
    of the usual ones: that one, or the nearest that can be planned.

    TPCs that were not seen hosting clusters of that size are *loose*: no cluster waits for them, so they may join
    either side once that has a safe GPC. They go to prefill, which is bound by compute, unless decode needs them.
    """

    def __init__(
        self, topology: Topology, min_per_gpc: int = 2, max_levels: int = 12, *, only: int | None = None
    ) -> None:
        """Raise ValueError unless ``min_per_gpc`` and ``max_levels`` are at least 1."""
        if min_per_gpc < 1 or max_levels < 1:
            raise ValueError(f"min_per_gpc and max_levels must be at least 1, not {min_per_gpc} and {max_levels}")
        self.topology = topology
        self.min_per_gpc = min_per_gpc
        self.gpcs, self.loose = _safe_gpcs(topology, min_per_gpc)
        self._spreads = even_spreads(tuple(len(gpc) for gpc in self.gpcs), min_per_gpc)
        self._splits: dict[int, Split | None] = {}
        total, quantum = topology.tpcs, 2 * min_per_gpc
        self.levels: tuple[int, ...]
        if only is None:
            self.levels = geometric_levels(total, quantum, max_levels, self._possible)
        else:
            self.levels = nearest_possible(total, only, self._possible)

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
        totals = [total for total in self._spreads if tpcs - len(self.loose) <= total <= tpcs]
        if not totals:
            return None
        shares = self._spreads[max(totals)]
        decode = [tpc for gpc, share in zip(self.gpcs, shares, strict=True) for tpc in gpc[:share]]
        decode += self.loose[: tpcs - len(decode)]
        chosen = frozenset(decode)
        prefill = tuple(tpc for tpc in range(self.topology.tpcs) if tpc not in chosen)
        return Split(tuple(sorted(chosen)), prefill)


def _safe_gpcs(topology: Topology, min_per_gpc: int) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """GPCs that have room for two sides or one, and the loose TPCs outside of them."""
    measured = [size for size in topology.hosts if size <= 2 * min_per_gpc]
    able = topology.hosts[max(measured)] if measured else frozenset()
    gpcs = [tuple(sorted(able.intersection(gpc))) for gpc in topology.gpcs]
    gpcs = sorted(gpc for gpc in gpcs if len(gpc) >= min_per_gpc)
    used = {tpc for gpc in gpcs for tpc in gpc}
    return gpcs, tuple(tpc for tpc in range(topology.tpcs) if tpc not in used)


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
