"""Green contexts against stand-ins of a driver with and without the structured split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conflux_native import CudaError, Device, DeviceStuck, Driver, DriverMissing, GreenPartition, green_granularity

from .standin import StandIn


def used(device: Device, stream: int) -> set[int]:
    return {sm for sm, blocks in enumerate(device.smid_histogram(stream)) if blocks}


def live(stand_in: StandIn) -> dict[str, int]:
    return {kind: stand_in.live(kind) for kind in ("green", "streams")}


def test_granularity_is_what_splits_come_out_as(stand_in: StandIn, device: Device) -> None:
    assert green_granularity(device) == (8, 8)
    stand_in.set(GREEN_LEAST=4, GREEN_STEP=2)
    assert green_granularity(device) == (4, 2)


def test_where_there_are_no_green_contexts(old: StandIn) -> None:
    device = Device(Driver(old.path))
    assert green_granularity(device) is None
    with pytest.raises(DriverMissing, match=r"lacks cuDeviceGetDevResource"):
        GreenPartition(device, 16)


@settings(max_examples=30)
@given(sms=st.integers(1, 120), ignore=st.booleans(), structured=st.booleans())
def test_two_parts_make_a_gpu(stand_in_newest: StandIn, sms: int, ignore: bool, structured: bool) -> None:
    stand_in_newest.reset()
    device = Device(Driver(stand_in_newest.path))
    step = 2 if ignore else 8
    partition = GreenPartition(device, sms, ignore_coscheduling=ignore, structured=structured)
    assert partition.structured is structured
    first = -(-sms // step) * step
    assert partition.sm_counts == (first, 132 - first)
    parts = [used(device, partition.create_stream(part)) for part in (0, 1)]
    assert [len(part) for part in parts] == [first, 132 - first]
    assert parts[0] | parts[1] == set(range(132))
    partition.destroy()
    assert live(stand_in_newest) == {"green": 0, "streams": 0}


def test_the_structured_split_is_used_where_it_is(stand_in: StandIn, newest: StandIn) -> None:
    for library, structured in ((stand_in, False), (newest, True)):
        partition = GreenPartition(Device(Driver(library.path)), 20)
        assert partition.structured is structured
        assert (library.calls("cuDevSmResourceSplit") > 0) is structured
        assert partition.sm_counts == (24, 108)


def test_the_structured_split_where_it_is_not(device: Device) -> None:
    with pytest.raises(DriverMissing, match="cuDevSmResourceSplit"):
        GreenPartition(device, 16, structured=True)


@pytest.mark.parametrize("sms", [0, 129, 132, 1000])
def test_sizes_that_leave_nothing_for_one_part(device: Device, sms: int) -> None:
    with pytest.raises(ValueError, match=r"132, parts begin at 8 and grow by 8"):
        GreenPartition(device, sms)


def test_streams_have_their_priority_and_end_with_the_partition(stand_in: StandIn, device: Device) -> None:
    partition = GreenPartition(device, 16)
    stream = partition.create_stream(0, priority=-5)
    assert stand_in.priority(stream) == -5
    assert device.elapsed_ms(stream, lambda: device.hold(stream, 1.0, 1), 60.0) >= 1.0
    assert live(stand_in) == {"green": 2, "streams": 1}
    with pytest.raises(ValueError, match="0 or 1"):
        partition.create_stream(2)
    partition.destroy()
    partition.destroy()
    assert live(stand_in) == {"green": 0, "streams": 0}
    with pytest.raises(RuntimeError, match="destroyed"):
        partition.create_stream(0)


def test_a_forgotten_partition_is_destroyed(stand_in: StandIn, device: Device) -> None:
    GreenPartition(device, 16).create_stream(1)
    assert live(stand_in) == {"green": 0, "streams": 0}


@pytest.mark.parametrize(
    "symbol", ["cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc", "cuGreenCtxCreate"]
)
def test_a_failure_leaves_nothing_behind(stand_in: StandIn, device: Device, symbol: str) -> None:
    last = 2 if symbol in ("cuGreenCtxCreate", "cuDevResourceGenerateDesc") else 1
    stand_in.set(FAIL=f"{symbol}=801@{last}")
    with pytest.raises(CudaError, match=f"{symbol} failed: CUDA_ERROR_NOT_SUPPORTED.*does not offer it"):
        GreenPartition(device, 16)
    assert live(stand_in) == {"green": 0, "streams": 0}
    assert stand_in.context_depth() == 0


def test_a_stuck_device_keeps_its_green_contexts(stand_in: StandIn, device: Device) -> None:
    partition = GreenPartition(device, 16)
    stream = partition.create_stream(0)
    stand_in.set(HANG_KERNELS="all")
    with pytest.raises(TimeoutError):
        device.smid_histogram(stream, timeout_s=0.1)
    with pytest.raises(DeviceStuck):
        partition.create_stream(0)
    partition.destroy()
    assert live(stand_in) == {"green": 2, "streams": 1}
