"""Work in a child process that may hang or crash: its JSON lines are read as they come, and silence ends it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from conflux_native.child_process import JsonChild, SilentError


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended. ``detail`` is for people: what it said last, or how long it was waited for."""

    how: Literal["done", "silent", "crashed"]
    detail: str = ""


class _Child(JsonChild):
    # A process that the GPU's driver does not let go of is left behind rather than waited for.
    exit_patience_s = 10.0


def run_guarded(
    command: Sequence[str],
    on_line: Callable[[dict[str, Any]], None],
    *,
    stdin: str = "",
    first_s: float = 60.0,
    silence_s: float = 20.0,
    total_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run ``command`` and hand every JSON object that it prints, one to a line, to ``on_line``.

    The child, and all that it started, is killed when its first line takes longer than ``first_s``, a later one
    longer than ``silence_s``, or the whole longer than ``total_s``. Other output is ignored: libraries print.
    Raises OSError if the command cannot be started.
    """
    end, waiting_since, patience_s = time.monotonic() + total_s, time.monotonic(), first_s
    with _Child(command, environment, stdin=subprocess.PIPE) as child:
        child.feed(stdin)
        try:
            while (message := child.read(min(patience_s, end - time.monotonic()))) is not None:
                on_line(message)
                waiting_since, patience_s = time.monotonic(), silence_s
            status, last = child.ended()
        except SilentError:
            return Ended("silent", f"nothing was heard of it for {time.monotonic() - waiting_since:.0f} s")
        except subprocess.TimeoutExpired:
            return Ended("silent", "it said all that it had to say, but did not end")
    return Ended("done") if status == 0 else Ended("crashed", _how_it_ended(status, last[:300]))


def _how_it_ended(status: int, last: str) -> str:
    how = f"exit status {status}"
    if status < 0:
        try:
            how = f"ended by {signal.Signals(-status).name}"
        except ValueError:
            how = f"ended by signal {-status}"
    return how + (f": {last}" if last else "")
