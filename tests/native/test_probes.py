"""What the probes see, and what happens when they do not end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conflux_native import CudaError, Device, DeviceStuck, Driver, Mask, MaskSlot

from .standin import StandIn

OFFSET = 0x51C
TPCS = 66


def enabled(histogram: list[int]) -> set[int]:
    return {tpc for tpc in range(len(histogram) // 2) if histogram[2 * tpc] and histogram[2 * tpc + 1]}


@settings(max_examples=30)
@given(st.sets(st.integers(0, TPCS - 1), min_size=1))
def test_a_histogram_shows_the_mask(stand_in_580: StandIn, tpcs: set[int]) -> None:
    stand_in_580.reset()
    device = Device(Driver(stand_in_580.path))
    stream, slot = device.create_stream(), MaskSlot(OFFSET)
    slot.apply(stream, Mask(tpcs))
    histogram = device.smid_histogram(stream)
    assert enabled(histogram) == tpcs
    assert sum(histogram) == 4 * 132
    slot.clear(stream)
    assert device.smid_histogram(stream) == [4] * 132


def test_a_mask_elsewhere_does_nothing(stand_in: StandIn, device: Device) -> None:
    stream = device.create_stream()
    MaskSlot(0x520).apply(stream, Mask([3]))
    assert len(enabled(device.smid_histogram(stream))) != 1


def test_a_histogram_grows_with_the_ids(stand_in: StandIn) -> None:
    device = Device(Driver(stand_in.path))
    stand_in.set(TPCS=80)  # ids beyond what the device said of itself
    assert device.smid_histogram(device.create_stream(), blocks_per_sm=10) == [9] * 40 + [8] * 120


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_clusters_stay_within_a_gpc(device: Device, size: int) -> None:
    samples = device.cluster_samples(device.create_stream(), size, 50)
    assert len(samples) == 50
    assert all(len(set(sample)) == size and max(sample) < 132 for sample in samples)
    assert device.max_active_clusters(size) > 0


def test_how_many_clusters_fit(device: Device) -> None:
    assert [device.max_active_clusters(size) for size in (2, 4, 8, 16)] == [66, 30, 15, 7]


def test_a_cluster_size_that_the_gpu_does_not_know_fits_nowhere(stand_in: StandIn, device: Device) -> None:
    stand_in.set(FAIL="cuOccupancyMaxActiveClusters=912")
    assert device.max_active_clusters(16) == 0


def test_clusters_need_hopper(stand_in: StandIn) -> None:
    stand_in.set(CAPABILITY=89)
    device = Device(Driver(stand_in.path))
    with pytest.raises(ValueError, match=r"9\.0"):
        device.cluster_samples(device.create_stream(), 2, 2)
    with pytest.raises(ValueError, match=r"9\.0"):
        device.max_active_clusters(2)


def test_events_time_what_is_launched(device: Device) -> None:
    stream = device.create_stream()
    assert device.elapsed_ms(stream, lambda: device.hold(stream, 20.0, 1), 60.0) >= 20.0
    assert device.elapsed_ms(stream, lambda: None, 60.0) >= 0
    with pytest.raises(ZeroDivisionError):
        device.elapsed_ms(stream, lambda: 1 // 0, 60.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda device, stream: device.synchronize(stream, -1.0),
        lambda device, stream: device.synchronize(stream, float("nan")),
        lambda device, stream: device.smid_histogram(stream, timeout_s=-1.0),
        lambda device, stream: device.smid_histogram(stream, blocks_per_sm=0),
        lambda device, stream: device.cluster_samples(stream, 0, 1),
        lambda device, stream: device.cluster_samples(stream, 17, 1),
        lambda device, stream: device.cluster_samples(stream, 2, 0),
        lambda device, stream: device.launch_spin(stream, 1, 0),
        lambda device, stream: device.launch_spin(stream, 1, 1, 1025),
        lambda device, stream: device.launch_read(stream, 17, 1, 1),
        lambda device, stream: device.launch_read(stream, 0, 1, 1),
        lambda device, stream: device.hold(stream, -1.0, 1),
    ],
)
def test_impossible_requests_are_refused(device: Device, call: Callable[[Device, int], object]) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        call(device, device.create_stream())


def test_a_buffer_larger_than_the_gpu(stand_in: StandIn, device: Device) -> None:
    stand_in.set(MEMORY_GIB=1)
    with pytest.raises(CudaError, match=r"CUDA_ERROR_OUT_OF_MEMORY.*memory is full"):
        device.launch_read(device.create_stream(), 2 << 30, 1, 1)


def test_waiting_ends_at_the_deadline_and_may_go_on_later(device: Device) -> None:
    stream, other = device.create_stream(), device.create_stream()
    device.hold(stream, 3.6e6, 1)
    assert device.synchronize(stream, 0.05) is False
    assert not device.stuck
    device.hold(other, 10.0, 1)
    assert device.synchronize(other, 600.0) is True


def a_probe_that_hangs(device: Device, stream: int) -> None:
    device.smid_histogram(stream, timeout_s=0.2)


def clusters_without_room(device: Device, stream: int) -> None:
    MaskSlot(OFFSET).apply(stream, Mask([62]))
    device.cluster_samples(stream, 4, 10, timeout_s=0.2)


def a_launch_that_never_ends(device: Device, stream: int) -> None:
    device.elapsed_ms(stream, lambda: device.hold(stream, 3.6e6, 1), 0.2)


@pytest.mark.parametrize("hang", [a_probe_that_hangs, clusters_without_room, a_launch_that_never_ends])
def test_what_hangs_leaves_the_device_stuck(stand_in: StandIn, hang: Callable[[Device, int], None]) -> None:
    stand_in.set(HANG_KERNELS="conflux_smid")
    held = hang_and_look(stand_in, hang)
    assert held["contexts"] == held["streams"] == 1
    assert {kind: stand_in.live(kind) for kind in held} == held  # the GPU may still write there


def hang_and_look(stand_in: StandIn, hang: Callable[[Device, int], None]) -> dict[str, int]:
    device = Device(Driver(stand_in.path))
    stream = device.create_stream()
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not finish within 0.2 s"):
        hang(device, stream)
    assert 0.2 <= time.monotonic() - started < 60
    assert device.stuck
    for call in (device.create_stream, device.stream_priorities, lambda: device.smid_histogram(stream)):
        with pytest.raises(DeviceStuck, match="end the process"):
            call()
    assert device.synchronize(stream, 0.0) is False
    device.destroy_stream(stream)  # so that cleaning up hides no TimeoutError
    return {kind: stand_in.live(kind) for kind in ("memory", "host", "contexts", "streams", "events")}


def test_a_mask_that_leaves_nothing_of_this_gpu_hangs(device: Device) -> None:
    stream = device.create_stream()
    MaskSlot(OFFSET).apply(stream, Mask([100]))
    with pytest.raises(TimeoutError):
        device.smid_histogram(stream, timeout_s=0.1)


@pytest.mark.parametrize("wait", ["synchronize", "smid_histogram", "elapsed_ms"])
def test_other_threads_run_while_one_waits(stand_in: StandIn, device: Device, wait: str) -> None:
    stand_in.set(HANG_KERNELS="all")
    stream = device.create_stream()
    device.hold(stream, 1.0, 1)
    ended = threading.Event()
    calls: dict[str, Callable[[], object]] = {
        "synchronize": lambda: device.synchronize(stream, 600.0),
        "smid_histogram": lambda: device.smid_histogram(stream, 600.0),
        "elapsed_ms": lambda: device.elapsed_ms(stream, lambda: None, 600.0),
    }

    def waiting() -> None:
        calls[wait]()
        ended.set()

    thread = threading.Thread(target=waiting)
    thread.start()
    while stand_in.calls("cuStreamQuery") < 10:
        time.sleep(0.001)
    assert not ended.is_set()  # so this thread ran while the other was waiting
    stand_in.set(RELEASE=1)
    thread.join()
    assert ended.is_set()


def test_probes_of_several_threads_take_turns(device: Device) -> None:
    slot, results = MaskSlot(OFFSET), {}

    def probe(tpc: int) -> None:
        stream = device.create_stream()
        slot.apply(stream, Mask([tpc]))
        results[tpc] = [enabled(device.smid_histogram(stream, timeout_s=600.0)) for _ in range(20)]

    threads = [threading.Thread(target=probe, args=(tpc,)) for tpc in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {tpc: [{tpc}] * 20 for tpc in range(4)}
