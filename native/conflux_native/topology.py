"""Which TPCs of a GPU share a GPC, and which of them can host thread-block clusters.

A TPC is named by its logical index: TPC i holds the SMs 2i and 2i + 1, as ``%smid`` counts them. A cluster runs inside
one GPC, so SMs that ever shared a cluster share a GPC.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final

SMS_PER_TPC: Final = 2
CLUSTER_SIZES: Final = (2, 4, 8, 16)
"""Blocks per cluster that are looked at; 16 is Hopper's largest (non-portable) size."""


def tpc_count(sm_count: int) -> int:
    """How many TPCs hold that many SMs. Raises ValueError for none."""
    if sm_count < 1:
        raise ValueError(f"a GPU of {sm_count} SMs")
    return -(-sm_count // SMS_PER_TPC)


def tpcs_of(sms: Iterable[int]) -> frozenset[int]:
    """The TPCs that hold these SMs."""
    return frozenset(sm // SMS_PER_TPC for sm in sms)


def sms_of(tpcs: Iterable[int]) -> frozenset[int]:
    """The SMs of these TPCs."""
    return frozenset(sm for tpc in tpcs for sm in range(tpc * SMS_PER_TPC, (tpc + 1) * SMS_PER_TPC))


def ranges(numbers: Iterable[int]) -> str:
    """Numbers for a person to read: ``0-3, 8``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"


def gpc_map(samples: Iterable[Sequence[int]], sm_count: int) -> list[list[int]]:
    """Group the TPCs of a GPU with ``sm_count`` SMs by GPC.

    ``samples`` are clusters, each given by the SMs that its blocks ran on. TPCs that were seen together are joined; a
    TPC that was never seen with another is a group of its own. Groups and their members ascend. Raises ValueError for
    an SM that the GPU does not have.
    """
    tpcs = tpc_count(sm_count)
    parent = list(range(tpcs))

    def root(tpc: int) -> int:
        while parent[tpc] != tpc:
            parent[tpc] = parent[parent[tpc]]
            tpc = parent[tpc]
        return tpc

    for sample in samples:
        outside = [sm for sm in sample if not 0 <= sm < sm_count]
        if outside:
            raise ValueError(f"a cluster ran on SM {outside[0]}, but this GPU's SMs are 0 to {sm_count - 1}")
        roots = sorted({root(tpc) for tpc in tpcs_of(sample)})
        for other in roots[1:]:
            parent[other] = roots[0]
    groups: dict[int, list[int]] = {}
    for tpc in range(tpcs):
        groups.setdefault(root(tpc), []).append(tpc)
    return list(groups.values())


@dataclass(frozen=True)
class Topology:
    """The TPCs of a GPU by GPC.

    - ``tpcs``: how many there are; they are numbered from 0
    - ``gpcs``: the TPCs of each GPC, ascending. A TPC that shares a cluster with no other (floor-sweeping leaves such)
      is a group of its own. Every TPC is in exactly one group
    - ``hosts``: cluster size → TPCs that were seen hosting a cluster of that size. A size that is absent was not
      measured or never ran: take it that no TPC hosts it

    Raises ValueError if these contradict each other.
    """

    tpcs: int
    gpcs: tuple[tuple[int, ...], ...]
    hosts: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        members = sorted(tpc for gpc in self.gpcs for tpc in gpc)
        if self.tpcs < 1 or members != list(range(self.tpcs)):
            raise ValueError(f"the GPCs must hold each of the {self.tpcs} TPCs once, but hold {members}")
        if any(not gpc or list(gpc) != sorted(gpc) for gpc in self.gpcs):
            raise ValueError("a GPC must name its TPCs in ascending order and have at least one")
        for size, tpcs in self.hosts.items():
            outside = [tpc for tpc in tpcs if not 0 <= tpc < self.tpcs]
            if size < 1 or outside:
                raise ValueError(f"clusters of {size} blocks on the TPCs {outside}: there are {self.tpcs} TPCs")

    @classmethod
    def from_samples(cls, samples: Mapping[int, Iterable[Sequence[int]]], sm_count: int) -> Topology:
        """Build it from clusters that were seen: cluster size → the SMs of each cluster. See :func:`gpc_map`."""
        kept = {size: [tuple(cluster) for cluster in clusters] for size, clusters in samples.items()}
        groups = gpc_map((cluster for clusters in kept.values() for cluster in clusters), sm_count)
        return cls(
            tpcs=tpc_count(sm_count),
            gpcs=tuple(map(tuple, groups)),
            hosts={size: tpcs_of(sm for cluster in kept[size] for sm in cluster) for size in sorted(kept)},
        )

    @classmethod
    def striped(cls, tpcs: int, gpcs: int = 8, *, cluster_free: bool = False) -> Topology:
        """What to assume where clusters cannot be measured: TPC i lies in GPC i mod ``gpcs``.

        The striping is how an H200 numbers its first TPCs. It is a guess about *bandwidth* (consecutive TPCs lie apart)
        and no evidence that a set of TPCs has room for a cluster: ``hosts`` is empty, so that a planner that asks for
        TPCs with room for clusters gets none. ``cluster_free=True`` is for chips that have no clusters at all (compute
        capability below 9.0): every set is safe there, a wrong guess costs only speed, and ``hosts`` names every TPC
        for every size. Raises ValueError for fewer than one TPC or GPC.
        """
        if tpcs < 1 or gpcs < 1:
            raise ValueError(f"{tpcs} TPCs in {gpcs} GPCs: both must be at least 1")
        return cls(
            tpcs=tpcs,
            gpcs=tuple(tuple(range(gpc, tpcs, gpcs)) for gpc in range(min(gpcs, tpcs))),
            hosts={size: frozenset(range(tpcs)) for size in CLUSTER_SIZES} if cluster_free else {},
        )

    @classmethod
    def recorded(cls, name: str = "h200") -> Topology:
        """A topology that was measured once and ships with the package. Chips of one name may differ: measure."""
        return cls.from_json(resources.files("conflux_native").joinpath(f"{name}.json").read_text(encoding="utf-8"))

    def gpc_of(self, tpc: int) -> int:
        """The index in ``gpcs`` of the GPC that holds this TPC. Raises ValueError if there is no such TPC."""
        for index, gpc in enumerate(self.gpcs):
            if tpc in gpc:
                return index
        raise ValueError(f"no TPC {tpc}: this GPU has {self.tpcs}")

    def hosting(self, cluster_size: int) -> frozenset[int]:
        """The TPCs that were seen hosting clusters of that many blocks."""
        return self.hosts.get(cluster_size, frozenset())

    def to_dict(self) -> dict[str, Any]:
        """It in JSON's types."""
        return {
            "tpcs": self.tpcs,
            "gpcs": [list(gpc) for gpc in self.gpcs],
            "hosts": {str(size): sorted(tpcs) for size, tpcs in sorted(self.hosts.items())},
        }

    def to_json(self) -> str:
        """It as JSON; :meth:`from_json` reads it back."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Read what :meth:`to_json` wrote; further fields are ignored. Raises ValueError for anything else."""
        try:
            raw = json.loads(text)
            return cls(
                tpcs=int(raw["tpcs"]),
                gpcs=tuple(tuple(int(tpc) for tpc in gpc) for gpc in raw["gpcs"]),
                hosts={int(size): frozenset(int(tpc) for tpc in tpcs) for size, tpcs in raw["hosts"].items()},
            )
        except (TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"not a topology: {error!r}") from error
