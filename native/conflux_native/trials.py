"""Try offsets in child processes, one after another, until one works: what each came to, and who is to blame."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from conflux_native import child
from conflux_native.child_process import ChildProcess, SilentError

logger = logging.getLogger(__name__)

START_PATIENCE_S: Final = 30.0
"""A child may take this long to start the driver: on a machine of many GPUs it takes seconds."""
MAX_FAILED_STARTS: Final = 2
HUNG: Final = "hung"


@dataclass(frozen=True)
class Attempt:
    """One offset that was tried: what came of it, and the 20 bytes (hex) that lay there on a fresh stream."""

    offset: int
    outcome: str
    before: str = ""


@dataclass
class _Run:
    """What one child did; ``error`` says why it made no attempt, if it made none."""

    attempts: list[Attempt] = field(default_factory=list)
    error: str = ""
    scanning: bool = False


class Trials:
    """Trials on one GPU until a deadline (``time.monotonic()``, seconds).

    ``tried`` lists what has been tried, ``stopped`` says why nothing more can be (empty: nothing is in the way).
    """

    def __init__(self, driver_path: str, ordinal: int, uuid: str, deadline: float, probe_timeout_s: float) -> None:
        self._driver_path, self._ordinal, self._uuid = driver_path, ordinal, uuid
        self._deadline, self._probe_timeout_s = deadline, probe_timeout_s
        self.tried: list[Attempt] = []
        self.stopped = ""

    def verified(self, offset: int) -> bool:
        """Whether one offset passes everything, in a child of its own."""
        run = self._child([offset], verify=True)
        self._note(run.attempts)
        if run.error:
            self._stop(_no_start(run.error))
        return any(attempt.outcome == child.VERIFIED for attempt in run.attempts)

    def search(self, offsets: Sequence[int], scan: bool = True) -> int | None:
        """The first of the offsets that works and is then verified; None once all were tried or it had to stop.

        With ``scan``, those where a fresh stream holds what an unset mask looks like come first.
        """
        pending = list(dict.fromkeys(offsets))
        suspects: dict[int, Attempt] = {}
        failed_starts = 0
        while (pending or suspects) and not self.stopped:
            run = self._child(pending or list(suspects)[:1], scan=scan)
            if not run.attempts:
                failed_starts += 1
                # Reading beyond the end of a stream's structure may be what killed it.
                scan = scan and not run.scanning
                if failed_starts > MAX_FAILED_STARTS:
                    self._stop(_no_start(run.error))
                continue
            failed_starts = 0
            attempts, last = run.attempts, run.attempts[-1]
            done = {attempt.offset for attempt in attempts}
            pending = [offset for offset in pending if offset not in done]
            suspects = {offset: attempt for offset, attempt in suspects.items() if offset not in done}
            if last.outcome == child.HIT:
                self._note(attempts[:-1])
                if self.verified(last.offset):
                    self.tried[-1:-1] = suspects.values()
                    return last.offset
            elif last.outcome not in child.HARMLESS and len(attempts) > 1:
                # An earlier one may have broken what this one fell over: it is tried again, the first of a child.
                self._note(attempts[:-1])
                suspects[last.offset] = last
            else:
                self._note(attempts)
        return None

    def _note(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            logger.debug("offset %#x: %s (was %s)", attempt.offset, attempt.outcome, attempt.before)
        self.tried.extend(attempts)

    def _stop(self, why: str) -> None:
        # The first reason is the cause of the others.
        self.stopped = self.stopped or why

    def _child(self, offsets: Sequence[int], *, scan: bool = False, verify: bool = False) -> _Run:
        run = _Run()
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            self._stop("the time limit was reached")
            return run
        arguments = child.arguments(
            driver=self._driver_path,
            ordinal=self._ordinal,
            uuid=self._uuid,
            offsets=offsets,
            probe_timeout_s=self._probe_timeout_s,
            limit_s=left_s + 1,
            scan=scan and len(offsets) > 1,
            verify=verify,
        )
        try:
            with ChildProcess(arguments) as process:
                self._listen(process, run)
                if not process.end():
                    self._stop("a child process could not be killed; the GPU may need a reset")
        except OSError as error:
            self._stop(_no_start(str(error)))
        return run

    def _listen(self, process: ChildProcess, run: _Run) -> None:
        """Follow a child until it ends, has nothing more to say, or has been silent for too long."""
        patience_s = START_PATIENCE_S
        under_way: int | None = None

        def ended(why: str) -> None:
            if under_way is not None:
                run.attempts.append(Attempt(under_way, why))
            elif not run.attempts:
                run.error = why

        while True:
            left_s = self._deadline - time.monotonic()
            try:
                message = process.read(max(0.0, min(patience_s, left_s)))
            except SilentError:
                if left_s < patience_s:
                    self._stop("the time limit was reached")
                else:
                    ended(HUNG)
                return
            # Two probes that all but time out, and some time for a busy machine.
            patience_s = 2 * self._probe_timeout_s + 2
            match message:
                case None:
                    ended(process.cause())
                    return
                case {"event": "scan"}:
                    run.scanning = True
                case {"event": "try", "offset": int(offset)}:
                    run.scanning, under_way = False, offset
                case {"event": "done", "offset": int(offset), "outcome": str(outcome), "before": str(before)}:
                    run.attempts.append(Attempt(offset, outcome, before))
                    under_way = None
                case {"event": "error", "reason": str(reason)}:
                    ended(reason)
                    return
                case {"event": "end"}:
                    return


def _no_start(error: str) -> str:
    advice = ""
    if "DEVICE_UNAVAILABLE" in error:
        advice = (
            " (a GPU in exclusive-process mode admits one process only: run `python -m conflux_native` while no other "
            "uses it, and what it finds is remembered)"
        )
    return f"a child process could not start: {error}{advice}"
