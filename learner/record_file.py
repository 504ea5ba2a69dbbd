"""Record files: JSON lines, first a :class:`~learner.records.Header`, then :class:`~learner.records.Iteration` objects.

A name that ends in ``.gz`` is compressed. A file whose writer was killed ends in the middle of a line; the reader
takes everything before it.
"""

from __future__ import annotations

import gzip
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec

from learner.checks import InvalidRecordError, check_header, check_iteration
from learner.records import Header, Iteration

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 1.0
FLUSH_BYTES = 1 << 20
MAX_LINE_BYTES = 16 << 20

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Header | Iteration] = msgspec.json.Decoder(Header | Iteration)


class RecordFileError(ValueError):
    """A record file cannot be read; the message says which line and why."""


class RecordWriter:
    """Writes a record file; replaces one that exists.

    The constructor raises OSError if the file cannot be made, and :class:`~learner.checks.InvalidRecordError` for an
    impossible header. After that a full disk ends the recording with a log line, not the caller: see ``failed``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Header,
        *,
        flush_interval_s: float = FLUSH_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_header(header)
        self._path = Path(path)
        self._file: IO[bytes] | None = _open(self._path, "wb")
        self._clock = clock
        self._flush_interval_s = flush_interval_s
        self._flush_s = clock()
        self._pending = bytearray()
        self.failed = False
        # Compressing a second's iterations takes as long as one of them: not in the caller's time.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="conflux-record")
        self.written = 0
        self.skipped = 0
        self._append(header)
        self.flush()

    def write(self, iteration: Iteration) -> bool:
        """Add one iteration. False, and counted in ``skipped``, if it holds an impossible value (JSON has no NaN)."""
        if self._file is None:
            return False
        try:
            check_iteration(iteration)
        except InvalidRecordError as error:
            self.skipped += 1
            if self.skipped == 1:
                logger.warning("iteration %d is not recorded: %s", iteration.iteration, error)
            return False
        self._append(iteration)
        self.written += 1
        if len(self._pending) >= FLUSH_BYTES or self._clock() - self._flush_s >= self._flush_interval_s:
            self.flush_soon()
        return not self.failed

    def flush(self) -> None:
        """Hand what is pending to the operating system; returns when it is."""
        self.flush_soon().result()

    def flush_soon(self) -> Future[None]:
        """The same in the background."""
        self._flush_s = self._clock()
        pending, self._pending = self._pending, bytearray()
        return self._disk.submit(self._put, pending)

    def _put(self, pending: bytearray) -> None:
        if self._file is None:
            return
        try:
            self._file.write(pending)
            self._file.flush()
        except Exception as error:  # nobody looks at what a background write raises
            logger.error("recording to %s ends: %s", self._path, error)
            self.failed = True
            self._release()

    def close(self) -> None:
        """Write what is pending and close. May be called twice."""
        self.flush()
        self._release()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, record: Header | Iteration) -> None:
        self._pending += _encoder.encode(record)
        self._pending += b"\n"

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self.failed = True
                logger.error("closing %s: %s", self._path, error)


class RecordReader:
    """Reads a record file, one pass: ``header``, then the iterations by iterating.

    Raises :class:`RecordFileError`, with the line, for anything that is not a record, and OSError if the file cannot
    be opened. ``truncated`` is true after the last iteration if the file ended inside a line.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._raw = open(self._path, "rb")  # noqa: SIM115
        self._lines: IO[bytes] | gzip.GzipFile = self._raw
        self._line = 0
        self.truncated = False
        if self._path.suffix == ".gz":
            self._lines = gzip.GzipFile(fileobj=self._raw, mode="rb")
        try:
            first = self._next()
            if not isinstance(first, Header):
                what = "is empty" if first is None else "does not start with a header line"
                raise RecordFileError(f"{self._path} {what}")
        except Exception:
            self.close()
            raise
        self.header: Header = first

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return os.fstat(self._raw.fileno()).st_size

    @property
    def position(self) -> int:
        """Bytes read from disk so far."""
        return self._raw.tell()

    def __iter__(self) -> Iterator[Iteration]:
        while (record := self._next()) is not None:
            if isinstance(record, Header):
                raise self._error("a second header")
            yield record

    def close(self) -> None:
        self._lines.close()
        self._raw.close()

    def __enter__(self) -> RecordReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> Header | Iteration | None:
        """The next record, or None at the end of the file."""
        while True:
            self._line += 1
            try:
                line = self._lines.readline(MAX_LINE_BYTES + 1)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                if isinstance(error, EOFError) and self._line > 1:
                    self.truncated = True
                    return None
                raise self._error(f"not readable as gzip: {error}") from None
            if not line:
                return None
            if len(line) > MAX_LINE_BYTES:
                raise self._error(f"longer than {MAX_LINE_BYTES} bytes")
            if line.strip():
                break
        try:
            record = _decoder.decode(line)
            if isinstance(record, Header):
                check_header(record)
            else:
                check_iteration(record)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            if not line.endswith(b"\n") and self._line > 1:
                self.truncated = True
                return None
            raise self._error(str(error)) from None
        return record

    def _error(self, why: str) -> RecordFileError:
        return RecordFileError(f"{self._path}, line {self._line}: {why}")


def _open(path: Path, mode: str) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, mode, compresslevel=4)  # type: ignore[return-value]
    return open(path, mode)
