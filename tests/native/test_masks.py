"""Masks, and the place where a stream keeps one."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_native import Device, Mask, MaskSlot

OFFSET = 0x51C

tpc_sets = st.sets(st.integers(0, 127), min_size=1)


@given(tpc_sets)
def test_a_mask_is_the_set_it_was_made_of(tpcs: set[int]) -> None:
    mask = Mask(tpcs)
    assert mask.tpcs == sorted(tpcs)
    assert len(mask) == len(tpcs)
    assert mask == Mask(sorted(tpcs, reverse=True)) == Mask(iter(tpcs))
    assert hash(mask) == hash(Mask(list(tpcs)))
    assert eval(repr(mask)) == mask
    assert pickle.loads(pickle.dumps(mask)) == mask


@given(tpc_sets)
def test_a_set_bit_disables_its_tpc(tpcs: set[int]) -> None:
    number = sum(word << (32 * i) for i, word in enumerate(Mask(tpcs).words))
    assert number == (1 << 128) - 1 - sum(1 << tpc for tpc in tpcs)


@given(tpc_sets, tpc_sets)
def test_masks_are_equal_only_if_their_sets_are(a: set[int], b: set[int]) -> None:
    assert (Mask(a) == Mask(b)) == (a == b)
    assert Mask(a) != sorted(a)


@pytest.mark.parametrize("tpcs", [[], [-1], [128], [3, 1000], [2**31 - 1], [2**40], [-(2**70)]])
def test_what_is_no_mask_is_refused(tpcs: list[int]) -> None:
    with pytest.raises(ValueError, match="TPC"):
        Mask(tpcs)


@pytest.mark.parametrize("tpcs", [[1.5], ["1"], [None], 7, None])
def test_a_mask_needs_integers(tpcs: object) -> None:
    with pytest.raises(TypeError):
        Mask(tpcs)  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [0, -4, 2, 1307, 4096, 1 << 40])
def test_what_is_no_offset_is_refused(offset: int) -> None:
    with pytest.raises(ValueError, match="offset"):
        MaskSlot(offset)


@pytest.mark.parametrize("stream", [0, 1, 2, 100, 0x7F0000000001])
def test_the_default_streams_are_refused(device: Device, stream: int) -> None:
    slot, mask = MaskSlot(OFFSET), Mask([1])
    calls: list[Callable[[], object]] = [
        lambda: slot.apply(stream, mask),
        lambda: slot.read(stream),
        lambda: slot.clear(stream),
        lambda: slot.raw(stream),
        lambda: slot.restore(stream, bytes(20)),
        lambda: slot.cost_ns(stream, mask, mask, 1),
        lambda: device.synchronize(stream, 1.0),
        lambda: device.smid_histogram(stream),
        lambda: device.cluster_samples(stream, 2, 2),
        lambda: device.launch_spin(stream, 1, 1),
        lambda: device.launch_read(stream, 16, 1, 1),
        lambda: device.hold(stream, 1.0, 1),
        lambda: device.elapsed_ms(stream, lambda: None, 1.0),
        lambda: device.destroy_stream(stream),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="stream"):
            call()


def test_a_mask_is_written_read_and_taken_away(device: Device) -> None:
    stream, other, slot = device.create_stream(), device.create_stream(), MaskSlot(OFFSET)
    assert slot.read(stream) is None
    assert slot.raw(stream) == bytes(20)
    for tpcs in ([0], [65], [0, 31, 32, 63, 64, 95, 96, 127]):
        slot.apply(stream, Mask(tpcs))
        assert slot.read(stream) == Mask(tpcs)
        assert slot.raw(stream) == b"".join(word.to_bytes(4, "little") for word in (1, *Mask(tpcs).words))
    assert slot.read(other) is None
    saved = slot.raw(stream)
    slot.clear(stream)
    assert slot.read(stream) is None
    assert slot.raw(stream) == bytes(20)
    slot.restore(stream, saved)
    assert slot.read(stream) == Mask([0, 31, 32, 63, 64, 95, 96, 127])


def test_only_the_twenty_bytes_are_touched(device: Device) -> None:
    stream = device.create_stream()
    around = [MaskSlot(OFFSET - 20), MaskSlot(OFFSET + 20)]
    before = [slot.raw(stream) for slot in around]
    MaskSlot(OFFSET).apply(stream, Mask([5]))
    assert [slot.raw(stream) for slot in around] == before


def test_words_that_disable_everything_are_no_mask(device: Device) -> None:
    stream, slot = device.create_stream(), MaskSlot(OFFSET)
    slot.restore(stream, b"\x01\0\0\0" + b"\xff" * 16)
    with pytest.raises(ValueError, match="every TPC"):
        slot.read(stream)
    with pytest.raises(ValueError, match="20 bytes"):
        slot.restore(stream, b"short")


def test_the_cost_of_a_change_leaves_the_mask_as_it_was(device: Device) -> None:
    stream, slot = device.create_stream(), MaskSlot(OFFSET)
    slot.apply(stream, Mask([9]))
    assert slot.cost_ns(stream, Mask([1]), Mask([2]), 1000) > 0
    assert slot.read(stream) == Mask([9])
    with pytest.raises(ValueError, match="repeats"):
        slot.cost_ns(stream, Mask([1]), Mask([2]), 0)
