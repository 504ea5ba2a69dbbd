"""An SGLang server as a child process: started, waited for until it answers, and surely ended with all its children."""

from __future__ import annotations

import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

HEALTH_TIMEOUT_S = 20.0  # the health check generates a token, which queues behind what runs


_RANDOM, _PORTS = random.SystemRandom(), (20_000, 31_000)


class ServerError(RuntimeError):
    """The server ended, or did not come up in time. The message is one line; ``log_tail`` is the end of its log."""

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail


def free_port() -> int:
    """A free port below those that systems give to clients: a server binds it only when it has loaded its model."""
    while True:
        port = _RANDOM.randrange(*_PORTS)
        if port_is_free(port):
            return port


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class ServerProcess:
    """``python -m sglang.launch_server`` in a process group of its own, its output in a log file; a context manager.

    ``args`` are the server's flags besides host and port; ``env`` replaces the whole environment.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        cwd: Path | None = None,
        startup_timeout_s: float = 180.0,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.env = dict(os.environ if env is None else env)
        self.cwd = cwd
        self.startup_timeout_s = startup_timeout_s
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        self.command = [sys.executable, "-m", "sglang.launch_server", *address, *args]
        self.process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, on_wait: Callable[[float], None] | None = None) -> ServerProcess:
        """Start and wait until a token can be generated; ``on_wait`` is called with the seconds waited so far.

        Raises :class:`ServerError`, with nothing left running.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.env,
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        # Reads until this process closes the pipe, by whatever death, and then ends the server's group.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; kill -KILL "-$0"', str(self.process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._wait_until_healthy(self.process, on_wait or (lambda _: None))
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, *, gracefully: bool = False) -> None:
        """End the server and all its processes; returns when they are gone. Does nothing if it is not running.

        ``gracefully`` lets it answer running requests first, as an operator's SIGTERM does; otherwise it is killed.
        """
        process, self.process = self.process, None
        if process is None:
            return
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None
        family = _family(process.pid)
        if gracefully:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for member in family:  # whoever left the group
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(10)
        psutil.wait_procs(family, timeout=10)

    def check(self) -> None:
        """Raise :class:`ServerError` if the server is not running any more."""
        code = self.process.poll() if self.process else None
        if code is not None:
            last = self.log_tail(1).strip()[:300] or "it said nothing"
            raise ServerError(f"the server ended with exit code {code}: {last} (log: {self.log})", self.log_tail())

    def wait(self) -> None:
        """Return never: raise :class:`ServerError` when the server has ended."""
        if self.process is not None:
            self.process.wait()
        self.check()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        said = [line for line in self.log_text().splitlines() if line.strip()]
        return "\n".join(said[-lines:])

    def _wait_until_healthy(self, process: subprocess.Popen[bytes], on_wait: Callable[[float], None]) -> None:
        start = time.monotonic()
        while (waited_s := time.monotonic() - start) < self.startup_timeout_s:
            self.check()
            on_wait(waited_s)
            if self._answers():
                return
            time.sleep(0.25)
        message = f"no healthy server after {self.startup_timeout_s:g} s (log: {self.log})"
        raise ServerError(message, self.log_tail())

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health_generate", timeout=HEALTH_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except (OSError, http.client.HTTPException):
            return False


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
