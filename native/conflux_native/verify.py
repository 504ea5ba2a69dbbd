"""Does a mask at an offset do exactly what it should? Answered by where blocks really ran (``%smid``).

Used by the search's child process on an offset that may be wrong, and afterwards by a serving process as its start-up
self-test of an offset that a child has already verified. It touches no stream but those that it creates itself.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from conflux_native import Mask
from conflux_native.topology import ranges, sms_of, tpc_count


class ProbeDevice(Protocol):
    """What is asked of a :class:`~conflux_native.Device`."""

    @property
    def sm_count(self) -> int: ...
    def create_stream(self, priority: int = 0) -> int: ...
    def destroy_stream(self, stream: int) -> None: ...
    def smid_histogram(self, stream: int, timeout_s: float = 5.0, blocks_per_sm: int = 4) -> list[int]: ...


class Slot(Protocol):
    """What is asked of a :class:`~conflux_native.MaskSlot`."""

    def apply(self, stream: int, mask: Mask) -> None: ...
    def read(self, stream: int) -> Mask | None: ...
    def clear(self, stream: int) -> None: ...
    def raw(self, stream: int) -> bytes: ...
    def restore(self, stream: int, raw: bytes) -> None: ...


@dataclass(frozen=True)
class Verdict:
    """``checked`` masks passed; ``reason`` says why the next one did not and is empty if ``ok``."""

    ok: bool
    checked: int
    reason: str = ""


def standard_masks(tpcs: int, seed: int = 0) -> list[Mask]:
    """Masks that no wrong offset and no wrong order of bits satisfies.

    Single TPCs, all but one, random halves, and for each binary digit the TPCs whose number has it set: any two TPCs
    differ in one of those, so that two that were mixed up show.
    """
    everything = range(tpcs)
    chance = random.Random(seed)
    some = (0, tpcs // 2, tpcs - 1)
    sets: list[Collection[int]] = [[tpc] for tpc in some]
    sets += [[tpc for tpc in everything if tpc >> digit & 1] for digit in range((tpcs - 1).bit_length())]
    sets += [sorted(chance.sample(everything, max(1, tpcs // 2))) for _ in range(3)]
    sets += [[tpc for tpc in everything if tpc != left_out] for left_out in some]
    return list(dict.fromkeys(Mask(chosen) for chosen in sets if chosen))


def verify(
    device: ProbeDevice,
    slot: Slot,
    masks: Sequence[Mask],
    timeout_s: float = 2.0,
    progress: Callable[[int], None] = lambda checked: None,
) -> Verdict:
    """Check a slot with each of the masks, on fresh streams.

    For a mask on one stream: it reads back; blocks run on all of its TPCs and on no other; a second stream with the
    complement keeps to that, and neither changes the other; a stream made afterwards is not masked; clearing gives
    every SM back. ``timeout_s`` limits each probe (there are six a mask, of about a millisecond each); ``progress`` is
    told the number of masks that passed. Driver errors and time-outs are a verdict, not an exception; after a time-out
    the device is of no more use to this process. Raises ValueError for no mask or one beyond the device's TPCs.
    """
    tpcs = tpc_count(device.sm_count)
    if not masks:
        raise ValueError("verify needs at least one mask")
    for mask in masks:
        if max(mask.tpcs) >= tpcs:
            raise ValueError(f"a mask names TPC {max(mask.tpcs)}, but the device has {tpcs} TPCs")
    checked = 0
    try:
        with _fresh(device, slot) as stream:
            _expect(device, stream, range(tpcs), "a stream without a mask", timeout_s)
        for mask in masks:
            _check(device, slot, mask, timeout_s)
            checked += 1
            progress(checked)
    except _WrongError as error:
        return Verdict(False, checked, str(error))
    except RuntimeError as error:
        return Verdict(False, checked, f"the driver reported {error}")
    return Verdict(True, checked)


def observed(
    device: ProbeDevice, stream: int, expected: Collection[int], timeout_s: float, tries: Iterable[int] = (4, 16, 64)
) -> frozenset[int]:
    """The SMs on which blocks of this stream ran.

    SMs of ``expected`` that got no block may have been overlooked, so the probe is repeated with more blocks per SM
    (``tries``); one block outside is proof and ends it. Raises TimeoutError and CudaError as the device does.
    """
    wanted = frozenset(expected)
    seen: frozenset[int] = frozenset()
    for blocks_per_sm in tries:
        histogram = device.smid_histogram(stream, timeout_s, blocks_per_sm)
        seen |= {sm for sm, blocks in enumerate(histogram) if blocks}
        if not seen < wanted:
            break
    return seen


class _WrongError(Exception):
    """What was seen is not what the mask says."""


def _check(device: ProbeDevice, slot: Slot, mask: Mask, timeout_s: float) -> None:
    everything = range(tpc_count(device.sm_count))
    rest = sorted(set(everything) - set(mask.tpcs))
    name = f"a stream masked to the TPCs {ranges(mask.tpcs)}"
    with _fresh(device, slot) as stream, _fresh(device, slot) as other:
        slot.apply(stream, mask)
        _reads(slot, stream, mask, name)
        _reads(slot, other, None, "a stream beside a masked one")
        _expect(device, stream, mask.tpcs, name, timeout_s)
        if rest:
            slot.apply(other, Mask(rest))
        _expect(device, other, rest or everything, f"a stream beside {name}", timeout_s)
        _expect(device, stream, mask.tpcs, f"{name}, beside another with a mask of its own,", timeout_s)
        with _fresh(device, slot) as later:
            _reads(slot, later, None, "a stream made after a masked one")
            _expect(device, later, everything, f"a stream made after {name}", timeout_s)
        slot.clear(stream)
        _reads(slot, stream, None, f"{name} and cleared")
        _expect(device, stream, everything, f"{name} and cleared", timeout_s)
        _expect(device, other, rest or everything, f"a stream beside {name} that was cleared", timeout_s)


@contextlib.contextmanager
def _fresh(device: ProbeDevice, slot: Slot) -> Iterator[int]:
    """A stream that is left as it was made before it is destroyed: the driver may use its memory again."""
    stream = device.create_stream()
    before = slot.raw(stream)
    try:
        yield stream
    finally:
        slot.restore(stream, before)
        # After a time-out or a sticky error nothing can be destroyed; the first failure is the one to report.
        with contextlib.suppress(RuntimeError):
            device.destroy_stream(stream)


def _reads(slot: Slot, stream: int, expected: Mask | None, name: str) -> None:
    try:
        found = slot.read(stream)
    except ValueError as error:
        raise _WrongError(f"{name}: {error}") from error
    if found != expected:
        raise _WrongError(f"{name} reads back as {'unmasked' if found is None else ranges(found.tpcs)}")


def _expect(device: ProbeDevice, stream: int, tpcs: Iterable[int], name: str, timeout_s: float) -> None:
    wanted = {sm for sm in sms_of(tpcs) if sm < device.sm_count}
    try:
        seen = observed(device, stream, wanted, timeout_s)
    except TimeoutError as error:
        raise _WrongError(f"{name} hung: {error}") from error
    if seen - wanted:
        raise _WrongError(f"{name} also ran on the SMs {ranges(seen - wanted)}")
    if wanted - seen:
        raise _WrongError(f"{name} did not run on the SMs {ranges(wanted - seen)}")
