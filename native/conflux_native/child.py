"""Internal: the process in which offsets are tried, so that a wrong one harms nothing else.

``python -m conflux_native.child`` is started by :mod:`conflux_native.search`. It says one JSON object a line on its
standard output, before and after everything that may hang or crash it:

- ``hello``: the device that it works on, once that has run a probe
- ``scan``: it is about to read (never write) what a fresh stream holds at every offset
- ``try`` with ``offset``, then ``done`` with ``offset``, ``outcome`` and ``before`` (the 20 bytes found there, hex)
- ``checked`` with ``masks``: how far a verification has come
- ``error`` with ``reason``: it cannot work at all
- ``end``: it has nothing left to try

It stops after the first offset that works, and after one that may have left it damaged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

from conflux_native.topology import sms_of, tpc_count

if TYPE_CHECKING:
    from conflux_native import Device, MaskSlot

HIT = "hit"
VERIFIED = "verified"
NO_EFFECT = "no effect"
OTHER_SMS = "other SMs"
TIMEOUT = "time-out"
HARMLESS = frozenset({NO_EFFECT, OTHER_SMS})
"""Outcomes after which the child has shown itself to be unharmed, and goes on."""


def arguments(
    *,
    driver: str,
    ordinal: int,
    uuid: str,
    offsets: Iterable[int],
    probe_timeout_s: float,
    limit_s: float,
    scan: bool = False,
    verify: bool = False,
) -> list[str]:
    """The command line of a child; see ``--help``."""
    line = [f"--driver={driver}", f"--ordinal={ordinal}", f"--uuid={uuid}"]
    line += [f"--probe-timeout={probe_timeout_s}", f"--limit={limit_s}"]
    line += ["--scan"] * scan + ["--verify"] * verify
    return [*line, ",".join(str(offset) for offset in offsets)]


def _parse(line: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conflux_native.child",
        description="Internal to conflux: tries offsets of a stream's SM mask. It writes to the GPU driver's memory at "
        "offsets that may be wrong, so it may crash or hang. Use `python -m conflux_native`, which keeps it in check.",
    )
    parser.add_argument("offsets", type=lambda text: [int(part) for part in text.split(",")], help="in this order")
    parser.add_argument("--driver", required=True, help="path of libcuda")
    parser.add_argument("--ordinal", type=int, default=0)
    parser.add_argument("--uuid", default="", help="refuse another GPU than this one")
    parser.add_argument("--probe-timeout", type=float, default=2.0, help="seconds for one probe")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which the kernel ends this process")
    parser.add_argument("--scan", action="store_true", help="try first what looks like an unset mask on a fresh stream")
    parser.add_argument("--verify", action="store_true", help="what works is verified in full")
    return parser.parse_args(line)


def main(line: Sequence[str] | None = None) -> NoReturn:
    """Run the child; never returns."""
    options = _parse(line)
    # Should the parent be killed, this ends even while a call into the driver hangs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, max(options.limit, 1.0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    say = _Voice()
    status = 0
    try:
        _work(options, say)
        say(event="end")
    except BrokenPipeError:
        status = 1
    except BaseException as error:
        status = 1
        with contextlib.suppress(OSError):
            say(event="error", reason=f"{type(error).__name__}: {error}")
    # Without the driver's own clearing up, which may hang or crash on what a wrong offset has left behind.
    os._exit(status)


class _Voice:
    """Says JSON lines on what was the standard output; whatever else is printed goes to standard error."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.dup(1)
        os.dup2(2, 1)

    def __call__(self, **message: object) -> None:
        os.write(self._out, json.dumps(message).encode() + b"\n")


def _work(options: argparse.Namespace, say: _Voice) -> None:
    # Here, so that a missing extension is said, too.
    from conflux_native import Device, Driver, MaskSlot
    from conflux_native.verify import observed

    driver = Driver(options.driver)
    device = Device(driver, options.ordinal)
    if options.uuid and device.uuid != options.uuid:
        raise RuntimeError(
            f"device {options.ordinal} is {device.uuid} in a new process but {options.uuid} in the one that asks: "
            "set CUDA_VISIBLE_DEVICES before a process first uses CUDA, and not again"
        )
    # Loads the probe, too, so that nothing but launches follows on a wrong mask.
    with_nothing_set = device.create_stream()
    seen = observed(device, with_nothing_set, range(device.sm_count), options.probe_timeout)
    device.destroy_stream(with_nothing_set)
    if len(seen) != device.sm_count:
        raise RuntimeError(f"a stream without a mask reaches {len(seen)} of {device.sm_count} SMs: what limits it?")
    say(
        event="hello", driver=driver.path, version=driver.version, gpu=device.name, sms=device.sm_count, pid=os.getpid()
    )
    offsets: list[int] = options.offsets
    if options.scan:
        say(event="scan")
        stream = device.create_stream()
        ranks = {offset: _rank(MaskSlot(offset).raw(stream), tpc_count(device.sm_count)) for offset in offsets}
        device.destroy_stream(stream)
        offsets = sorted(offsets, key=ranks.__getitem__)
    for offset in offsets:
        say(event="try", offset=offset)
        outcome, before = _try(device, MaskSlot(offset), options.probe_timeout)
        if outcome == HIT and options.verify:
            outcome = _verify(device, MaskSlot(offset), options.probe_timeout, say)
        say(event="done", offset=offset, outcome=outcome, before=before.hex())
        if outcome not in HARMLESS:
            return


def _rank(raw: bytes, tpcs: int) -> int:
    """How much 20 bytes of a fresh stream look like a mask that was never set, the most first.

    0 for nothing but zeros; 1 for a flag (0 or 1) and words that disable no TPC; 2 for what is something else, maybe a
    pointer. It only orders the trials, as what a driver to come leaves there is not known.
    """
    enabled, *words = struct.unpack("<5I", raw)
    disabled = sum(word << 32 * index for index, word in enumerate(words))
    if not any(raw):
        return 0
    return 1 if enabled in (0, 1) and not disabled & ((1 << tpcs) - 1) else 2


def _try(device: Device, slot: MaskSlot, timeout_s: float) -> tuple[str, bytes]:
    """Write one mask at an offset, look where blocks run, put back what was there, and look again."""
    from conflux_native import Mask
    from conflux_native.verify import observed

    tpcs = tpc_count(device.sm_count)
    # Some of every 32: were the mask to land one word off, a kernel would still find a TPC to run on.
    chosen = range(0, tpcs, 4)
    everything = frozenset(range(device.sm_count))
    before = b""
    try:
        stream = device.create_stream()
        before = slot.raw(stream)
        slot.apply(stream, Mask(chosen))
        seen = observed(device, stream, sms_of(chosen) & everything, timeout_s)
        slot.restore(stream, before)
        after = observed(device, stream, everything, timeout_s)
        device.destroy_stream(stream)
    except TimeoutError:
        return TIMEOUT, before
    except RuntimeError as error:
        return f"error: {getattr(error, 'name', error)}", before
    if after != everything:
        return "not undone by restoring it", before
    if seen == everything:
        return NO_EFFECT, before
    return (HIT if seen == sms_of(chosen) & everything else OTHER_SMS), before


def _verify(device: Device, slot: MaskSlot, timeout_s: float, say: _Voice) -> str:
    from conflux_native.verify import standard_masks, verify

    masks = standard_masks(tpc_count(device.sm_count))
    verdict = verify(device, slot, masks, timeout_s, lambda checked: say(event="checked", masks=checked))
    return VERIFIED if verdict.ok else f"not verified: {verdict.reason}"


if __name__ == "__main__":
    main()
