"""What was found out about a machine once, so that it need not be found out at every start.

One small JSON file per fact, named by its kind and a digest of its key. The key is stored with the value: another
driver, GPU or release has another key, hence another file, and nothing has to be invalidated. Files are replaced as a
whole, so processes that start at the same time never read half of one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

SCHEMA: Final = 1
MAX_BYTES: Final = 1 << 20

Key = Mapping[str, str | int]


def default_dir() -> Path:
    """``$XDG_CACHE_HOME/conflux``, else ``~/.cache/conflux``. Raises RuntimeError for a user without a home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return base / "conflux"


def recall(directory: Path, kind: str, key: Key) -> dict[str, Any] | None:
    """The value remembered under this kind and key, or None: never remembered, unreadable, damaged or not ours.

    A file that another user owns or may write is not believed, since what it says may be written to memory.
    """
    path = path_of(directory, kind, key)
    try:
        # Not blocking, should somebody have put a pipe there.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not _trusted(os.fstat(file.fileno())):
                logger.warning("ignored %s: it is no plain file of this user's that only he may write", path)
                return None
            read = json.loads(file.read(MAX_BYTES))
        if read["schema"] == SCHEMA and read["key"] == dict(key) and isinstance(read["value"], dict):
            return dict(read["value"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.info("ignored the damaged %s: %r", path, error)
    return None


def remember(directory: Path, kind: str, key: Key, value: Mapping[str, Any]) -> bool:
    """Keep a value (JSON's types) under a kind and key, in place of an earlier one.

    False, with a log line, where the directory cannot be written: a machine that forgets is slower, not broken.
    """
    path = path_of(directory, kind, key)
    text = json.dumps({"schema": SCHEMA, "kind": kind, "key": dict(key), "value": dict(value)}, indent=1)
    temporary = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # mkstemp makes the file readable and writable for its owner alone.
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=directory)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(temporary, path)
    except OSError as error:
        logger.info("could not remember %s in %s: %s", kind, directory, error)
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        return False
    return True


def forget(directory: Path, kind: str, key: Key) -> None:
    """Drop what is remembered under this kind and key, if anything."""
    with contextlib.suppress(OSError):
        path_of(directory, kind, key).unlink()


def path_of(directory: Path, kind: str, key: Key) -> Path:
    """The file in which a value of this kind and key lies."""
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return directory / f"{kind}-{digest[:16]}.json"


def _trusted(status: os.stat_result) -> bool:
    ours = status.st_uid in (0, os.geteuid())
    return ours and stat.S_ISREG(status.st_mode) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
