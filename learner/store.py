"""What the learner keeps on disk: one file per learnt model, replaced as a whole, never pickled.

Layout of the state directory, for a model whose :func:`model_id` is ``ID``:

- ``learner-ID.state``: msgpack of :class:`SavedState`
- ``learner-ID.lock``: held (``flock``) by the learner that may write the state; it vanishes with its process
- ``learner-ID.corrupt``: the last state file that could not be read, set aside
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from pathlib import Path

import msgspec

from learner.records import Header

logger = logging.getLogger(__name__)

STATE_SCHEMA = 1
MAX_STATE_BYTES = 256 << 20


class SavedState(msgspec.Struct, frozen=True, kw_only=True, tag="conflux-learner-state"):
    """One learnt model at rest.

    ``last_version`` is the highest snapshot version that may have been published: a learner that continues from here
    starts above it. ``estimator`` is the estimator's own encoding and ``digest`` the SHA-256 of it.
    """

    schema: int = STATE_SCHEMA
    key: str
    last_version: int
    saved_unix_s: float
    estimator: bytes
    digest: bytes


_decoder = msgspec.msgpack.Decoder(SavedState)


def default_state_dir() -> Path:
    """Where state is kept unless told otherwise. Raises RuntimeError for a user without a home."""
    return Path.home() / ".cache" / "conflux"


def model_id(header: Header) -> str:
    """Name what a learnt ratio belongs to: the header's key and the very roofline that it is a ratio to.

    Two schedulers with one key but different device curves must not share a model, since a ratio learnt against one
    roofline is wrong against the other. Where the curves came from (``provenance``) makes no difference.
    """
    device = msgspec.structs.replace(header.device, provenance={})
    what = msgspec.msgpack.encode((header.key, header.model, device))
    return hashlib.sha256(what).hexdigest()[:20]


class StateFile:
    """The state of one learnt model. Several learners may read it; the one that holds the lock may write it."""

    def __init__(self, directory: Path, name: str, key: str) -> None:
        self._path = directory / f"learner-{name}.state"
        self._lock_path = self._path.with_suffix(".lock")
        self._key = key
        self._lock: int | None = None
        self._told = False

    @property
    def path(self) -> Path:
        return self._path

    def load(self) -> SavedState | None:
        """Return what was saved, or None if there is nothing or nothing readable (then the file is set aside)."""
        try:
            if self._path.stat().st_size > MAX_STATE_BYTES:
                raise ValueError("too large")
            state = _decoder.decode(self._path.read_bytes())
            if state.schema != STATE_SCHEMA or state.key != self._key or state.last_version < 0:
                raise ValueError(f"schema {state.schema}, key {state.key!r}, version {state.last_version}")
            if hashlib.sha256(state.estimator).digest() != state.digest:
                raise ValueError("its digest differs")
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("cannot read %s: %s", self._path, error)
            return None
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
            self.set_aside(str(error))
            return None
        return state

    def save(self, *, estimator: bytes, last_version: int, saved_unix_s: float) -> bool:
        """Replace the file atomically. False, with a log line, if another learner owns it or the disk refuses."""
        state = SavedState(
            key=self._key,
            last_version=last_version,
            saved_unix_s=saved_unix_s,
            estimator=estimator,
            digest=hashlib.sha256(estimator).digest(),
        )
        if not self._acquire():
            return False
        scratch = self._path.with_suffix(".new")
        try:
            with open(scratch, "wb") as file:
                file.write(msgspec.msgpack.encode(state))
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, self._path)
        except OSError as error:
            logger.warning("cannot save %s: %s", self._path, error)
            with contextlib.suppress(OSError):
                scratch.unlink()
            return False
        return True

    def set_aside(self, why: str) -> None:
        """Rename an unreadable file, so that somebody can look at it and the next save does not meet it."""
        aside = self._path.with_suffix(".corrupt")
        if not self._acquire():
            return
        logger.error("%s cannot be used (%s); set aside as %s, learning starts afresh", self._path, why, aside.name)
        try:
            os.replace(self._path, aside)
        except OSError as error:
            logger.warning("cannot set %s aside: %s", self._path, error)

    def close(self) -> None:
        """Let another learner write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _acquire(self) -> bool:
        if self._lock is not None:
            return True
        try:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            logger.warning("cannot lock %s: %s", self._path, error)
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            if not self._told:
                logger.warning("another learner owns %s; until it ends, what is learnt here is not saved", self._path)
            self._told = True
            return False
        self._lock = lock
        return True


class StateStore:
    """A directory of state files, private to the user. Raises OSError if it cannot be made or written to."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} is not writable")
        self.directory = directory

    def file(self, header: Header) -> StateFile:
        return StateFile(self.directory, model_id(header), header.key)
