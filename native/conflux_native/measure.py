"""Find a GPU's topology by launching thread-block clusters and noting where their blocks ran."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Final, Protocol

from conflux_native.topology import CLUSTER_SIZES, Topology, gpc_map, tpc_count, tpcs_of

logger = logging.getLogger(__name__)

FIRST_WITH_CLUSTERS: Final = (9, 0)
QUIET_ROUNDS: Final = 6
MAX_ROUNDS: Final = 100


class ClusterDevice(Protocol):
    """What is asked of a :class:`~conflux_native.Device`."""

    @property
    def compute_capability(self) -> tuple[int, int]: ...
    @property
    def sm_count(self) -> int: ...
    def create_stream(self, priority: int = 0) -> int: ...
    def destroy_stream(self, stream: int) -> None: ...
    def max_active_clusters(self, cluster_size: int) -> int: ...
    def cluster_samples(
        self, stream: int, cluster_size: int, clusters: int, timeout_s: float = 5.0
    ) -> list[list[int]]: ...


def measure_topology(device: ClusterDevice, timeout_s: float = 20.0) -> Topology:
    """Measure which TPCs share a GPC and which can host clusters of 2, 4, 8 and 16 blocks.

    Clusters are launched on a stream of its own, without a mask, until :data:`QUIET_ROUNDS` rounds in a row have shown
    nothing new (in all well under a second on an idle GPU; ``timeout_s`` ends it with what has been seen). A chip
    without clusters, and one on which they fail, gets :meth:`Topology.striped`, the second with a warning. Raises
    TimeoutError if a launch never ends: the device is then of no more use to this process.
    """
    tpcs = tpc_count(device.sm_count)
    if device.compute_capability < FIRST_WITH_CLUSTERS:
        return Topology.striped(tpcs, cluster_free=True)
    deadline = time.monotonic() + timeout_s
    samples: dict[int, list[list[int]]] = {}
    try:
        stream = device.create_stream()
        for size in CLUSTER_SIZES:
            samples[size] = list(_clusters(device, stream, size, deadline))
        device.destroy_stream(stream)
    except RuntimeError as error:
        logger.warning("clusters of some sizes could not be measured: %s", error)
    hosted = {size: seen for size, seen in samples.items() if seen}
    if not hosted:
        logger.warning("no cluster could be launched, so no TPC is taken to have room for one")
        return Topology.striped(tpcs)
    return Topology.from_samples(hosted, device.sm_count)


def _clusters(device: ClusterDevice, stream: int, size: int, deadline: float) -> Iterator[list[int]]:
    """Clusters of one size, all distinct, until nothing new is learnt from more of them."""
    fit = device.max_active_clusters(size)
    if fit < 1:
        return
    seen: set[tuple[int, ...]] = set()
    known: object = None
    quiet = 0
    for _ in range(MAX_ROUNDS):
        left_s = deadline - time.monotonic()
        if quiet == QUIET_ROUNDS or left_s <= 0:
            return
        # More than fit at once, so that later ones land where earlier ones have ended.
        for cluster in device.cluster_samples(stream, size, 4 * fit, max(left_s, 1.0)):
            key = tuple(sorted(cluster))
            if key not in seen:
                seen.add(key)
                yield cluster
        now = gpc_map(seen, device.sm_count), tpcs_of(sm for cluster in seen for sm in cluster)
        quiet = quiet + 1 if now == known else 0
        known = now
