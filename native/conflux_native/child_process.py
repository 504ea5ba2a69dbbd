"""One child that tries offsets: started apart, read with patience, killed when it falls silent."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

logger = logging.getLogger(__name__)

# -P: no module of the working directory's.
COMMAND = (sys.executable, "-P", "-m", "conflux_native.child")
EXIT_PATIENCE_S: Final = 30.0
# A faulting kernel must not leave a dump of gigabytes, whatever the server's own debugging settings are.
_DUMPS: Final = ("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION")


class SilentError(TimeoutError):
    """The child said nothing for as long as it was given."""


class ChildProcess:
    """``python -m conflux_native.child``, with the parent's environment, in a process group of its own.

    A context manager: at the end the whole group is killed and the child is reaped. Its standard error goes to a
    temporary file, of which :meth:`cause` quotes the end; nothing reaches the parent's terminal.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._said = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        environment = {name: value for name, value in os.environ.items() if name not in _DUMPS}
        try:
            # Not a fork: the parent may have threads and a CUDA context.
            self._process = subprocess.Popen(
                [*COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
                start_new_session=True,
            )
        except OSError:
            self._errors.close()
            raise
        self.pid = self._process.pid
        self.killed = False

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._errors.close()

    def read(self, patience_s: float) -> dict[str, Any] | None:
        """The next line that the child said, or None once it has ended.

        Raises SilentError after ``patience_s`` seconds without a whole line.
        """
        pipe = self._process.stdout
        assert pipe is not None
        deadline = time.monotonic() + patience_s
        poll = select.poll()
        poll.register(pipe.fileno(), select.POLLIN)
        while True:
            line, newline, rest = self._said.partition(b"\n")
            if newline:
                self._said = rest
                message = _parsed(line)
                if message is not None:
                    return message
                continue
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise SilentError
            more = os.read(pipe.fileno(), 65536)
            if not more:
                return None
            self._said += more

    def end(self) -> bool:
        """Kill what is left of the child and reap it; False if not even that works (the driver holds it)."""
        process = self._process
        if process.stdout is not None:
            process.stdout.close()
        if process.poll() is None:
            self.killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(EXIT_PATIENCE_S)
        except subprocess.TimeoutExpired:
            logger.error("process %d cannot be killed: the GPU's driver does not let go of it", process.pid)
            return False
        return True

    def cause(self) -> str:
        """Why it ended, in words: a signal's name or its exit status, and the last line of its standard error."""
        try:
            status = self._process.wait(EXIT_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return "it did not end"
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-status).name}"
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4096))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"exit status {status}" + (f": {lines[-1].strip()}" if lines else "")


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line of the child's as it was meant, or None for noise of a library's."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and "event" in message else None
