"""A child that may hang or crash: started apart, its JSON lines read with patience, killed when it falls silent."""

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
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

logger = logging.getLogger(__name__)

# -P: no module of the working directory's.
COMMAND = (sys.executable, "-P", "-m", "conflux_native.child")
EXIT_PATIENCE_S: Final = 30.0
# A faulting kernel must not leave a dump of gigabytes, whatever the server's own debugging settings are.
_DUMPS: Final = ("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION")


class SilentError(TimeoutError):
    """The child said nothing for as long as it was given."""


class JsonChild:
    """``command`` in a process group of its own; every JSON object that it prints, one to a line, is a message.

    A context manager: at the end the whole group is killed and the child is reaped. Its standard error goes to a
    temporary file, of which :meth:`ended` gives the last line; nothing reaches the parent's terminal. Raises OSError if
    the command cannot be started.
    """

    exit_patience_s = EXIT_PATIENCE_S

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, stdin: int = subprocess.DEVNULL
    ) -> None:
        self._said = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        given = os.environ if environment is None else environment
        try:
            # Not a fork: the parent may have threads and a CUDA context.
            self._process = subprocess.Popen(
                list(command),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={name: value for name, value in given.items() if name not in _DUMPS},
                start_new_session=True,
            )
        except OSError:
            self._errors.close()
            raise
        self.pid = self._process.pid
        self.killed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._errors.close()

    def feed(self, text: str) -> None:
        """Give the child its whole input, if it wants it; needs ``stdin=subprocess.PIPE``."""
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.write(text.encode())
            pipe.close()

    def read(self, patience_s: float) -> dict[str, Any] | None:
        """The child's next message, or None once it has ended. Other output is ignored: libraries print.

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
                message = self._parsed(line)
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
            process.wait(self.exit_patience_s)
        except subprocess.TimeoutExpired:
            logger.error("process %d cannot be killed: the GPU's driver does not let go of it", process.pid)
            return False
        return True

    def ended(self) -> tuple[int, str]:
        """Its exit status, negative for a signal, and the last line of its standard error.

        Raises subprocess.TimeoutExpired if it does not end, though it has nothing more to say.
        """
        status = self._process.wait(self.exit_patience_s)
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4096))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return status, lines[-1].strip() if lines else ""

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        try:
            message = json.loads(line)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None


class ChildProcess(JsonChild):
    """``python -m conflux_native.child``, which tries offsets; every message of its has an ``event``."""

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__([*COMMAND, *arguments])

    def cause(self) -> str:
        """Why it ended, in words: a signal's name or its exit status, and the last line of its standard error."""
        try:
            status, last = self.ended()
        except subprocess.TimeoutExpired:
            return "it did not end"
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}" + (f": {last}" if last else "")

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        message = super()._parsed(line)
        return message if message is not None and "event" in message else None
