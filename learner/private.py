"""A directory for one learner's unix socket: nobody else may enter it, and it does not outlive its owner for long."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path

from learner.address import MAX_SOCKET_PATH_BYTES, check_address

PREFIX = "conflux-learner-"
SOCKET = "learner"


class PrivateDirectory:
    """A new directory with mode 0700 and a short path, in $XDG_RUNTIME_DIR or /tmp.

    It is locked (``flock``) for as long as its owner lives. An owner that was killed cannot remove it, so whoever makes
    the next one removes those of the same user that nobody holds. Raises OSError if none can be made.
    """

    def __init__(self) -> None:
        base = _base()
        _sweep(base)
        self._lock: int | None = None
        while self._lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            self._lock = _locked(self.path)

    @property
    def address(self) -> str:
        """The address of the socket in it."""
        return check_address(f"ipc://{self.path}/{SOCKET}")

    def remove(self) -> None:
        """Remove it with the socket. May be called twice."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


def remove_socket_of(address: str) -> None:
    """Remove a private socket and its directory, whoever made them; other addresses are left alone."""
    directory = Path(address.removeprefix("ipc://")).parent
    if address.startswith("ipc://") and directory.name.startswith(PREFIX):
        _remove(directory)


def _locked(path: Path) -> int | None:
    """Lock a new directory; None if somebody swept it away before that."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_EX)
    if path.exists():
        return lock
    os.close(lock)
    return None


def _base() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    short = len(os.fsencode(runtime)) + len(PREFIX) + len(SOCKET) + 16 <= MAX_SOCKET_PATH_BYTES
    if runtime.startswith("/") and short and os.access(runtime, os.W_OK | os.X_OK):
        return runtime
    return "/tmp"


def _sweep(base: str) -> None:
    for path in Path(base).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
            finally:
                os.close(lock)


def _remove(directory: Path) -> None:
    """Remove a directory that holds at most the socket; anything else in it is not ours."""
    with contextlib.suppress(OSError):
        socket = directory / SOCKET
        if stat.S_ISSOCK(socket.lstat().st_mode):
            socket.unlink()
    with contextlib.suppress(OSError):
        directory.rmdir()
