"""Keep one learner process running beside a server, and end it with the server."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import learner
from learner.address import check_address
from learner.private import PrivateDirectory
from learner.store import default_state_dir

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 30.0
HEALTHY_S = 30.0  # a process that lived this long starts the delays anew
STOP_S = 5.0

_USAGE_ERROR = 2  # the status that argparse and learner.process end with


class LearnerProcess:
    """A running learner process. It starts with the object, and is started again whenever it dies.

    ``address=None`` makes a private unix socket (a directory with mode 0700). The process ends when :meth:`stop` is
    called, when the object is collected, and when this process dies in whatever way. Raises OSError if the process
    cannot be started at all and :class:`~learner.address.AddressError` for an unusable address.
    """

    def __init__(
        self,
        address: str | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        *,
        save: bool = True,
        save_interval_s: float | None = None,
    ) -> None:
        directory: PrivateDirectory | None = None
        if address is None:
            directory = PrivateDirectory()
            address = directory.address
        self._address = check_address(address)
        self._keeper = _Keeper(
            _command(self._address, Path(state_dir or default_state_dir()), save, save_interval_s), directory
        )
        self._finalizer = weakref.finalize(self, self._keeper.stop)
        self._keeper.start()

    @property
    def address(self) -> str:
        """Where schedulers reach the learner; the same after a restart."""
        return self._address

    @property
    def pid(self) -> int | None:
        """The process id, or None while the process is not running."""
        return self._keeper.pid

    @property
    def restarts(self) -> int:
        """How often the process was started again after it died."""
        return self._keeper.restarts

    @property
    def failed(self) -> bool:
        """Whether the process refused its options, so that starting it again would be of no use."""
        return self._keeper.failed

    def stop(self) -> None:
        """End the process, which saves its state first, and remove the private directory. May be called twice."""
        self._finalizer()

    def __enter__(self) -> LearnerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Keeper:
    """What the watching thread needs; it must not hold the LearnerProcess, or that would never be collected."""

    def __init__(self, command: list[str], directory: PrivateDirectory | None) -> None:
        self._command = command
        self._directory = directory
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="conflux-learner-supervisor", daemon=True)
        self._owner = os.getpid()
        self.restarts = 0
        self.failed = False

    def start(self) -> None:
        self._process = self._launch()
        self._thread.start()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def stop(self) -> None:
        if os.getpid() != self._owner:
            return  # a forked copy
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        if self._process is not None:
            _end(self._process)
        if self._directory is not None:
            self._directory.remove()

    def _launch(self) -> subprocess.Popen[bytes]:
        # A process group of its own: Ctrl-C in the server's terminal is the server's to handle.
        return subprocess.Popen(
            self._command,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )

    def _watch(self) -> None:
        delay_s = FIRST_DELAY_S
        started_s = time.monotonic()
        while not self._stopping.wait(0.1):
            assert self._process is not None
            status = self._process.poll()
            if status is None:
                continue
            if self._process.stdin is not None:
                self._process.stdin.close()
            if status == _USAGE_ERROR:
                self.failed = True
                logger.error("the learner refused its options; predictions stay as they are")
                return
            if time.monotonic() - started_s >= HEALTHY_S:
                delay_s = FIRST_DELAY_S
            logger.warning("the learner ended with status %d; starting it again in %.1f s", status, delay_s)
            if self._stopping.wait(delay_s):
                return
            delay_s = min(2.0 * delay_s, LONGEST_DELAY_S)
            started_s = time.monotonic()
            try:
                self._process = self._launch()
                self.restarts += 1
            except OSError as error:
                logger.error("cannot start the learner: %s", error)


def _command(address: str, state_dir: Path, save: bool, save_interval_s: float | None) -> list[str]:
    # -P: a folder named "learner" where the server was started is not ours.
    command = [sys.executable, "-P", "-m", "learner.process", "--watch-stdin"]
    command += ["--address", address, "--state-dir", str(state_dir)]
    if not save:
        command.append("--no-save")
    if save_interval_s is not None:
        command += ["--save-interval", str(save_interval_s)]
    return command


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    root = Path(learner.__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):  # a checkout; an installed package is found anyway
        paths = [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end, then insist."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    for insist in (process.terminate, process.kill):
        try:
            process.wait(STOP_S)
            return
        except subprocess.TimeoutExpired:
            insist()
    process.wait()
