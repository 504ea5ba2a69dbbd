"""Find where this driver keeps a stream's SM mask, without risking the process that asks.

Every offset, a known one too, is first tried in a child process. A wrong one may corrupt the child, crash it or hang
it; the parent reads what the child says, kills it when it falls silent, and starts another behind the offset that it
died on. What works is verified in full in a fresh child, and only then handed out, and remembered.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from conflux_native import Device, Driver
from conflux_native.offsets import LAST_OFFSET, OLDEST_VERSION, candidates, known_offset
from conflux_native.remembered import default_dir, recall, remember
from conflux_native.topology import tpc_count
from conflux_native.trials import Attempt, Trials

logger = logging.getLogger(__name__)

KIND: Final = "stream-mask"
MOST_TPCS: Final = 128


@dataclass(frozen=True)
class Found:
    """An offset (bytes) that is verified for this driver and GPU, and how it was come by.

    ``tried`` lists every attempt, the last being the one that worked; it is empty for a remembered offset.
    """

    offset: int
    how: Literal["known", "searched", "remembered"]
    tried: tuple[Attempt, ...]
    seconds: float


class NotFound(RuntimeError):  # noqa: N818 - an answer to the question, not a fault
    """No offset works here. ``reason`` says what was tried and what to do, ``tried`` lists every attempt."""

    def __init__(self, reason: str, tried: Sequence[Attempt] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.tried = tuple(tried)


def find_slot(
    ordinal: int = 0,
    *,
    driver_path: str = "libcuda.so.1",
    offsets: Sequence[int] | None = None,
    skip_known: bool = False,
    timeout_s: float = 120.0,
    probe_timeout_s: float = 2.0,
    remembered_dir: Path | None = None,
    use_memory: bool = True,
) -> Found:
    """The verified offset of the stream mask for a GPU, as CUDA counts its devices in this process.

    In turn: what ``remembered_dir`` (default: :func:`~conflux_native.remembered.default_dir`) remembers for this driver
    and GPU; the offset known for the driver (a child process of about a second); every possible offset. ``offsets``
    forces a list, tried in its order; ``skip_known`` searches as if nothing were known of any driver; neither believes
    the memory. ``use_memory=False`` neither reads nor writes it. ``timeout_s`` limits the whole, ``probe_timeout_s``
    each probe's launch.

    This process needs the driver too, to name it and the GPU: it retains the GPU's primary context for a moment, and
    nothing is written to any stream of it. Raises NotFound, also where there is no driver or no such GPU.
    """
    started = time.monotonic()
    here = _identify(driver_path, ordinal)
    directory = _directory(remembered_dir) if use_memory else None
    if directory is not None and offsets is None and not skip_known:
        offset = (recall(directory, KIND, here.key) or {}).get("offset")
        if type(offset) is int and offset % 4 == 0 and 0 < offset <= LAST_OFFSET:
            return Found(offset, "remembered", (), time.monotonic() - started)

    trials = Trials(here.driver_path, ordinal, here.uuid, started + timeout_s, probe_timeout_s)
    how: Literal["known", "searched"] = "searched"
    known = None if skip_known else known_offset(here.version)
    if offsets is not None:
        found = trials.search(offsets, scan=False)
    elif skip_known:
        found = trials.search(range(4, LAST_OFFSET + 1, 4))
    elif known is not None and trials.verified(known):
        found, how = known, "known"
    elif _mps_runs():
        found = None
        trials.stopped = trials.stopped or (
            "others may use this GPU through MPS, whom a wrong offset could harm, so no more are tried: stop MPS once, "
            "run `python -m conflux_native`, and what it finds is remembered"
        )
    else:
        found = trials.search([offset for offset in candidates(here.version) if offset != known])
    if found is None:
        raise NotFound(_summary(here, trials), trials.tried)
    if directory is not None:
        remember(directory, KIND, here.key, {"offset": found, "how": how})
    seconds = time.monotonic() - started
    logger.info("stream mask at offset %#x, %s in %.1f s (%d tried)", found, how, seconds, len(trials.tried))
    return Found(found, how, tuple(trials.tried), seconds)


def key_of(driver: Driver, device: Device) -> dict[str, str | int]:
    """What a remembered offset belongs to (:mod:`~conflux_native.remembered`, kind :data:`KIND`).

    Another driver, GPU or release of conflux has another key.
    """
    path = Path(driver.path)
    try:
        release = metadata.version("sglang-conflux")
    except metadata.PackageNotFoundError:
        release = "unknown"
    return {
        "driver_file": path.name,
        "driver_bytes": path.stat().st_size if path.exists() else 0,
        "cuda_version": driver.version,
        "gpu": device.name,
        "conflux": release,
    }


def cuda_name(version: int) -> str:
    """13000 → ``13.0``."""
    return f"{version // 1000}.{version % 1000 // 10}"


@dataclass(frozen=True)
class _Here:
    driver_path: str
    version: int
    gpu: str
    uuid: str
    key: dict[str, str | int]


def _identify(driver_path: str, ordinal: int) -> _Here:
    """Name the driver and the GPU, and let go of both: no traceback shall keep the GPU's context.

    Raises NotFound where a search is pointless.
    """
    try:
        driver = Driver(driver_path)
        device = Device(driver, ordinal)
    except (RuntimeError, ValueError) as error:
        raise NotFound(f"GPU {ordinal} cannot be used: {error}") from error
    version, name, sms = driver.version, device.name, device.sm_count
    here = _Here(driver.path, version, name, device.uuid, key_of(driver, device))
    del driver, device
    if version < OLDEST_VERSION:
        raise NotFound(f"the driver is for CUDA {cuda_name(version)}; stream masks need one for 12.0 or newer")
    if not 2 <= tpc_count(sms) <= MOST_TPCS:
        raise NotFound(f"{name} has {sms} SMs; stream masks are for 4 to {2 * MOST_TPCS}")
    return here


def _summary(here: _Here, trials: Trials) -> str:
    outcomes = Counter(attempt.outcome for attempt in trials.tried).most_common(6)
    match trials.tried:
        case []:
            tried = "no offset"
        case [attempt]:
            tried = f"offset {attempt.offset:#x} ({attempt.outcome})"
        case _:
            tried = f"{len(trials.tried)} offsets (" + "; ".join(f"{count} × {what}" for what, count in outcomes) + ")"
    where = f"{here.gpu}, driver {Path(here.driver_path).name} (CUDA {cuda_name(here.version)})"
    return f"no stream mask found on {where}: tried {tried}" + (f"; {trials.stopped}" if trials.stopped else "")


def _directory(given: Path | None) -> Path | None:
    try:
        return given or default_dir()
    except RuntimeError:
        return None


def _mps_runs() -> bool:
    """Whether a CUDA Multi-Process Service seems to serve this user: its clients can bring each other down."""
    return os.path.exists(os.path.join(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control"))
