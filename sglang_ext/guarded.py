"""Work in a child process that may hang or crash: its JSON lines are read as they come, and silence ends it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

_CHUNK_BYTES = 65536
_END_S = 10.0
# A faulting kernel must not leave a dump of gigabytes, whatever the user's own debugging settings are.
_DUMPS = ("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended. ``detail`` is for people: what it said last, or how long it was waited for."""

    how: Literal["done", "silent", "crashed"]
    detail: str = ""


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
    given = os.environ if environment is None else environment
    environment = {name: value for name, value in given.items() if name not in _DUMPS}
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,  # so that what it starts can be killed with it
        )
        try:
            waited_s = _read(child, on_line, stdin, first_s, silence_s, time.monotonic() + total_s)
            if waited_s is not None:
                return Ended("silent", f"nothing was heard of it for {waited_s:.0f} s")
            status = child.wait(_END_S)
        except subprocess.TimeoutExpired:
            return Ended("silent", "it said all that it had to say, but did not end")
        finally:
            _kill(child)
        if status == 0:
            return Ended("done")
        return Ended("crashed", _how_it_ended(status, errors))


def _read(
    child: subprocess.Popen[bytes],
    on_line: Callable[[dict[str, Any]], None],
    stdin: str,
    first_s: float,
    silence_s: float,
    end: float,
) -> float | None:
    """Feed and read the child until it closes its output (None), or for how long it had been waited for in vain."""
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(stdin.encode())
        child.stdin.close()
    waiting_since, patience_s, pending = time.monotonic(), first_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            left_s = min(waiting_since + patience_s, end) - now
            if left_s <= 0 or not selector.select(left_s):
                return time.monotonic() - waiting_since
            chunk = os.read(child.stdout.fileno(), _CHUNK_BYTES)
            if not chunk:
                return None
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                message = _object(line)
                if message is not None:
                    on_line(message)
                    waiting_since, patience_s = time.monotonic(), silence_s


def _object(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"{"):
        return None
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        # A process that the GPU's driver does not let go of is left behind rather than waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)
    if child.stdout is not None:
        child.stdout.close()


def _how_it_ended(status: int, errors: IO[bytes]) -> str:
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - 4000))
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    last = f": {lines[-1][:300]}" if lines else ""
    if status < 0:
        try:
            return f"ended by {signal.Signals(-status).name}{last}"
        except ValueError:
            return f"ended by signal {-status}{last}"
    return f"exit status {status}{last}"
