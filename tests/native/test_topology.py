from __future__ import annotations

import json
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conflux_native.measure import measure_topology
from conflux_native.topology import Topology, gpc_map, ranges, sms_of, tpc_count, tpcs_of

SEEDS = st.integers(0, 1 << 32)
H200 = Topology.recorded("h200")


@dataclass(frozen=True)
class Chip:
    """A made-up GPU: TPC ids dealt out to GPCs, and a launcher that puts a cluster's blocks on SMs of one GPC."""

    gpcs: tuple[tuple[int, ...], ...]

    @property
    def sm_count(self) -> int:
        return 2 * sum(map(len, self.gpcs))

    def fit(self, size: int) -> list[tuple[int, ...]]:
        """The GPCs with room for a cluster of that many blocks, one on each SM."""
        return [gpc for gpc in self.gpcs if 2 * len(gpc) >= size]

    def launch(self, size: int, seed: int) -> list[list[int]]:
        """Clusters that between them cover every GPC, each on SMs next to each other or anywhere in the GPC."""
        clusters, chance = [], random.Random(seed)
        for gpc in self.fit(size):
            sms = sorted(sms_of(gpc))
            clusters += [sms[start : start + size] for start in range(len(sms) - size + 1)]
            clusters += [chance.sample(sms, size) for _ in range(4)]
        chance.shuffle(clusters)
        return clusters


@st.composite
def chips(draw: st.DrawFn) -> Chip:
    """GPCs of 1 to 9 TPCs, those of one being left over by floor-sweeping, with ids in any order."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    ids = list(range(sum(sizes)))
    random.Random(draw(SEEDS)).shuffle(ids)
    gpcs, used = [], 0
    for size in sizes:
        gpcs.append(tuple(sorted(ids[used : used + size])))
        used += size
    return Chip(tuple(sorted(gpcs)))


@given(chips(), SEEDS, st.sampled_from([4, 3]))
def test_the_map_is_recovered_from_clusters(chip: Chip, seed: int, size: int) -> None:
    assert gpc_map(chip.launch(size, seed), chip.sm_count) == [list(gpc) for gpc in chip.gpcs]


@given(chips(), SEEDS)
def test_a_topology_says_who_hosts_which_clusters(chip: Chip, seed: int) -> None:
    sizes = [size for size in (2, 4, 8, 16) if chip.fit(size)]
    topology = Topology.from_samples({size: chip.launch(size, seed) for size in sizes}, chip.sm_count)
    assert topology.tpcs == chip.sm_count // 2
    assert topology.gpcs == chip.gpcs
    for size in (2, 4, 8, 16):
        assert topology.hosting(size) == frozenset(tpc for gpc in chip.fit(size) for tpc in gpc)
    assert all(tpc in topology.gpcs[topology.gpc_of(tpc)] for tpc in range(topology.tpcs))


@given(chips(), SEEDS)
def test_json_brings_a_topology_back(chip: Chip, seed: int) -> None:
    topology = Topology.from_samples({2: chip.launch(2, seed), 4: chip.launch(4, seed)}, chip.sm_count)
    assert Topology.from_json(topology.to_json()) == topology


def test_the_recorded_h200_is_recovered_too() -> None:
    chip = Chip(H200.gpcs)
    assert gpc_map(chip.launch(4, 1), 132) == [list(gpc) for gpc in H200.gpcs]


def test_the_recorded_h200() -> None:
    assert H200.tpcs == 66
    assert sorted(map(len, H200.gpcs)) == [1, 1, 1, 1, 4, 8, 8, 8, 8, 8, 9, 9]
    assert sorted(set(range(66)) - H200.hosting(4)) == [62, 63, 64, 65]
    assert {H200.gpc_of(tpc) for tpc in range(8)} == {H200.gpc_of(tpc) for tpc in range(8, 16)}


def test_tpcs_never_seen_together_stand_alone() -> None:
    assert gpc_map([], 6) == [[0], [1], [2]]
    assert gpc_map([[0, 1], [2, 4]], 8) == [[0], [1, 2], [3]]


def test_an_sm_that_the_gpu_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="SM 8, but this GPU's SMs are 0 to 7"):
        gpc_map([[0, 8]], 8)


@given(st.sets(st.integers(0, 127)))
def test_tpcs_and_their_sms(tpcs: set[int]) -> None:
    assert tpcs_of(sms_of(tpcs)) == tpcs
    assert len(sms_of(tpcs)) == 2 * len(tpcs)


def test_an_odd_sm_has_a_tpc_of_its_own() -> None:
    assert tpc_count(7) == 4
    assert gpc_map([[0, 6]], 7) == [[0, 3], [1], [2]]


@given(st.integers(1, 90), st.integers(1, 12))
def test_striped_covers_every_tpc_and_claims_no_room_for_clusters(tpcs: int, gpcs: int) -> None:
    guess = Topology.striped(tpcs, gpcs)
    assert sorted(tpc for gpc in guess.gpcs for tpc in gpc) == list(range(tpcs))
    assert not any(guess.hosting(size) for size in (2, 4, 8, 16))
    free = Topology.striped(tpcs, gpcs, cluster_free=True)
    assert free.gpcs == guess.gpcs
    assert all(free.hosting(size) == frozenset(range(tpcs)) for size in (2, 4, 8, 16))


@pytest.mark.parametrize(
    ("tpcs", "gpcs", "hosts"),
    [
        (0, (), {}),
        (2, ((0,),), {}),
        (2, ((0, 1), (1,)), {}),
        (2, ((1, 0),), {}),
        (2, ((0, 1), ()), {}),
        (2, ((0, 1),), {4: frozenset({2})}),
        (2, ((0, 1),), {0: frozenset({1})}),
    ],
)
def test_contradictions_are_refused(
    tpcs: int, gpcs: tuple[tuple[int, ...], ...], hosts: dict[int, frozenset[int]]
) -> None:
    with pytest.raises(ValueError, match="TPC"):
        Topology(tpcs, gpcs, hosts)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "Infinity",
        '{"tpcs": 1}',
        '{"tpcs": Infinity}',
        '{"tpcs": 1, "gpcs": 3, "hosts": {}}',
        '{"tpcs": 1, "gpcs": [[0]]}',
    ],
)
def test_what_is_no_topology_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Topology.from_json(text)


def test_further_fields_are_ignored() -> None:
    raw = json.loads(H200.to_json()) | {"gpu": "NVIDIA H200"}
    assert Topology.from_json(json.dumps(raw)) == H200


def test_ranges() -> None:
    assert ranges([3, 0, 1, 2, 8, 10, 11]) == "0-3, 8, 10-11"
    assert ranges([]) == "none"


class FakeDevice:
    """Launches clusters on a made-up chip, a few at random each time, as a GPU does."""

    def __init__(self, chip: Chip, capability: tuple[int, int] = (9, 0), broken: frozenset[int] = frozenset()) -> None:
        self.chip, self.compute_capability, self.broken = chip, capability, broken
        self.sm_count = chip.sm_count
        self.chance = random.Random(7)
        self.streams = 0

    def create_stream(self, priority: int = 0) -> int:
        self.streams += 1
        return 4096

    def destroy_stream(self, stream: int) -> None:
        self.streams -= 1

    def max_active_clusters(self, cluster_size: int) -> int:
        return sum(2 * len(gpc) // cluster_size for gpc in self.chip.gpcs)

    def cluster_samples(self, stream: int, cluster_size: int, clusters: int, timeout_s: float = 5.0) -> list[list[int]]:
        if cluster_size in self.broken:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        fit = self.chip.fit(cluster_size)
        return [
            self.chance.sample(sorted(sms_of(self.chance.choice(fit))), cluster_size) for _ in range(min(clusters, 256))
        ]


@settings(max_examples=25)
@given(chips())
def test_measuring_stops_once_the_map_is_whole(chip: Chip) -> None:
    device = FakeDevice(chip)
    topology = measure_topology(device)
    assert topology.gpcs == chip.gpcs
    assert topology.hosting(4) == frozenset(tpc for gpc in chip.fit(4) for tpc in gpc)
    assert device.streams == 0


def test_a_chip_without_clusters_has_room_everywhere() -> None:
    chip = Chip(((0, 1, 2), (3,)))
    assert measure_topology(FakeDevice(chip, (8, 0))) == Topology.striped(4, cluster_free=True)


def test_a_size_that_fails_does_not_spoil_the_others() -> None:
    chip = Chip(((0, 1, 2, 3), (4,)))
    topology = measure_topology(FakeDevice(chip, broken=frozenset({8})))
    assert topology.gpcs == chip.gpcs
    assert topology.hosting(8) == frozenset()


def test_where_clusters_fail_no_tpc_has_room() -> None:
    chip = Chip(((0, 1, 2, 3), (4,)))
    assert measure_topology(FakeDevice(chip, broken=frozenset({2, 4, 8, 16}))) == Topology.striped(5)
