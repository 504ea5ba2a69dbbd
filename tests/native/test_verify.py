from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conflux_native.topology import sms_of

pytest.importorskip("conflux_native._core", reason="the extension is not built")

from conflux_native import Mask
from conflux_native.verify import Verdict, observed, standard_masks, verify

OFFSET = 0x51C


class FakeDevice:
    """A GPU whose streams are bytes, with a mask at OFFSET; ``order`` says which TPC each of its bits means."""

    def __init__(self, tpcs: int = 66, order: list[int] | None = None) -> None:
        self.sm_count = 2 * tpcs
        self.order = order or list(range(tpcs))
        self.memory: dict[int, bytearray] = {}
        self.made = 0
        self.probes = 0

    def create_stream(self, priority: int = 0) -> int:
        self.made += 1
        self.memory[4096 * self.made] = bytearray(4096)
        return 4096 * self.made

    def destroy_stream(self, stream: int) -> None:
        assert self.memory.pop(stream) == bytes(4096), "a stream's memory must be left as it was"

    def smid_histogram(self, stream: int, timeout_s: float = 5.0, blocks_per_sm: int = 4) -> list[int]:
        self.probes += 1
        sms = sms_of(self.order[bit] for bit in self.enabled(stream))
        return [blocks_per_sm if sm in sms else 0 for sm in range(self.sm_count)]

    def enabled(self, stream: int) -> list[int]:
        enabled, *words = struct.unpack_from("<5I", self.memory[stream], OFFSET)
        bits = range(self.sm_count // 2)
        return [bit for bit in bits if not (enabled and words[bit // 32] >> bit % 32 & 1)]


class FakeSlot:
    """Writes a mask into a fake stream, as MaskSlot does into a real one."""

    def __init__(self, device: FakeDevice, offset: int = OFFSET) -> None:
        self.device, self.offset = device, offset

    def apply(self, stream: int, mask: Mask) -> None:
        self.restore(stream, struct.pack("<5I", 1, *mask.words))

    def read(self, stream: int) -> Mask | None:
        enabled, *words = struct.unpack("<5I", self.raw(stream))
        return Mask([tpc for tpc in range(128) if not words[tpc // 32] >> tpc % 32 & 1]) if enabled else None

    def clear(self, stream: int) -> None:
        self.restore(stream, bytes(20))

    def raw(self, stream: int) -> bytes:
        return bytes(self.device.memory[stream][self.offset : self.offset + 20])

    def restore(self, stream: int, raw: bytes) -> None:
        self.device.memory[stream][self.offset : self.offset + 20] = raw


def judged(device: FakeDevice, offset: int = OFFSET) -> Verdict:
    verdict = verify(device, FakeSlot(device, offset), standard_masks(device.sm_count // 2))
    assert not device.memory, "every stream must be destroyed"
    return verdict


@settings(max_examples=30)
@given(st.integers(2, 128), st.data())
def test_any_masks_pass_on_the_right_offset(tpcs: int, data: st.DataObject) -> None:
    device = FakeDevice(tpcs)
    masks = [Mask(chosen) for chosen in data.draw(st.lists(st.sets(st.integers(0, tpcs - 1), min_size=1), min_size=1))]
    assert verify(device, FakeSlot(device), masks) == Verdict(True, len(masks))
    assert not device.memory


@pytest.mark.parametrize("tpcs", [1, 2, 3, 57, 66, 74, 128])
def test_the_standard_masks_pass_on_the_right_offset(tpcs: int) -> None:
    verdict = judged(FakeDevice(tpcs))
    assert verdict.ok
    assert verdict.checked == len(standard_masks(tpcs))


@settings(max_examples=30)
@given(st.integers(2, 128), st.integers(0, 1 << 32))
def test_the_standard_masks_refute_any_other_order_of_tpcs(tpcs: int, seed: int) -> None:
    chance = random.Random(seed)
    order = list(range(tpcs))
    one, other = chance.sample(order, 2)
    order[one], order[other] = order[other], order[one]
    assert not judged(FakeDevice(tpcs, order)).ok


@settings(max_examples=60)
@given(st.integers(1, (4096 - 20) // 4).map(lambda word: 4 * word).filter(lambda offset: offset != OFFSET))
def test_the_standard_masks_refute_any_other_offset(offset: int) -> None:
    assert not judged(FakeDevice(), offset).ok


def test_progress_is_told_after_each_mask() -> None:
    device, told = FakeDevice(8), list[int]()
    verify(device, FakeSlot(device), standard_masks(8), progress=told.append)
    assert told == list(range(1, len(standard_masks(8)) + 1))


class OneForAll(FakeDevice):
    """A mask on any stream masks them all."""

    def enabled(self, stream: int) -> list[int]:
        return sorted(set.intersection(*(set(super(OneForAll, self).enabled(each)) for each in self.memory)))


class Inherited(FakeDevice):
    """A stream made while another is masked gets its mask for good, out of the slot's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.birth: dict[int, list[int]] = {}

    def create_stream(self, priority: int = 0) -> int:
        masked = [bits for each in self.memory if len(bits := FakeDevice.enabled(self, each)) < self.sm_count // 2]
        stream = super().create_stream()
        if masked:
            self.birth[stream] = masked[0]
        return stream

    def enabled(self, stream: int) -> list[int]:
        return self.birth.get(stream) or super().enabled(stream)


class Latched(FakeDevice):
    """A stream keeps its first mask whatever is written later."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[int, list[int]] = {}

    def enabled(self, stream: int) -> list[int]:
        bits = super().enabled(stream)
        if stream in self.first or len(bits) < self.sm_count // 2:
            return self.first.setdefault(stream, bits)
        return bits


class Halved(FakeDevice):
    """Somebody else has limited this process to half of the SMs."""

    def enabled(self, stream: int) -> list[int]:
        return super().enabled(stream)[: self.sm_count // 4]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (OneForAll, "beside a stream masked"),
        (Inherited, "made after a stream masked"),
        (Latched, "and cleared did not run on"),
        (Halved, "a stream without a mask did not run on the SMs 66-131"),
    ],
)
def test_masks_that_do_too_much_or_too_long_are_refuted(make: Callable[[], FakeDevice], reason: str) -> None:
    verdict = judged(make())
    assert not verdict.ok
    assert reason in verdict.reason


def test_a_slot_that_reads_back_wrong_is_refuted() -> None:
    class Forgetful(FakeSlot):
        def read(self, stream: int) -> Mask | None:
            return None

    device = FakeDevice()
    verdict = verify(device, Forgetful(device), [Mask([0, 1])])
    assert verdict == Verdict(False, 0, "a stream masked to the TPCs 0-1 reads back as unmasked")


@pytest.mark.parametrize(
    ("error", "reason"), [(TimeoutError("66 of 132"), "hung: 66 of 132"), (RuntimeError("E_X"), "E_X")]
)
def test_a_failing_device_is_a_verdict(error: Exception, reason: str) -> None:
    class Failing(FakeDevice):
        def smid_histogram(self, stream: int, timeout_s: float = 5.0, blocks_per_sm: int = 4) -> list[int]:
            if self.probes == 9:
                raise error
            return super().smid_histogram(stream, timeout_s, blocks_per_sm)

        def destroy_stream(self, stream: int) -> None:
            if self.probes == 9:
                raise RuntimeError("the device is stuck")
            super().destroy_stream(stream)

    device = Failing()
    verdict = verify(device, FakeSlot(device), standard_masks(66), timeout_s=1.5)
    assert (verdict.ok, verdict.checked) == (False, 1)
    assert reason in verdict.reason
    # What is left of the streams that could not be destroyed carries no mask.
    assert all(memory == bytes(4096) for memory in device.memory.values())


def test_overlooked_sms_are_looked_for_again() -> None:
    class Sparse(FakeDevice):
        def smid_histogram(self, stream: int, timeout_s: float = 5.0, blocks_per_sm: int = 4) -> list[int]:
            histogram = super().smid_histogram(stream, timeout_s, blocks_per_sm)
            return [blocks if blocks_per_sm > 4 or sm % 5 else 0 for sm, blocks in enumerate(histogram)]

    assert judged(Sparse()).ok


def test_a_block_outside_ends_the_looking() -> None:
    device = FakeDevice(4)
    assert observed(device, device.create_stream(), {0}, 1.0) == frozenset(range(8))
    assert device.probes == 1


def test_masks_must_fit_the_device() -> None:
    device = FakeDevice(4)
    with pytest.raises(ValueError, match="TPC 4, but the device has 4 TPCs"):
        verify(device, FakeSlot(device), [Mask([4])])
    with pytest.raises(ValueError, match="at least one mask"):
        verify(device, FakeSlot(device), [])
