from __future__ import annotations

import errno
import gzip
import math
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner import record_file
from learner.checks import InvalidRecordError
from learner.record_file import RecordFileError, RecordReader, RecordWriter
from learner.records import Header, Iteration
from tests.learner.generated import header, headers, iteration, iterations, stream


def some(count: int) -> list[Iteration]:
    return [iteration(n, stream("decode", [1], [n], [0.01])) for n in range(count)]


def write(path: Path, records: list[Iteration]) -> None:
    with RecordWriter(path, header()) as writer:
        assert all(writer.write(record) for record in records)


def read(path: Path) -> tuple[Header, list[Iteration], bool]:
    with RecordReader(path) as reader:
        records = list(reader)
        return reader.header, records, reader.truncated


@pytest.mark.parametrize("name", ["record.jsonl", "record.jsonl.gz"])
@given(first=headers(), records=st.lists(iterations(), max_size=3))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reader_inverts_writer(tmp_path: Path, name: str, first: Header, records: list[Iteration]) -> None:
    path = tmp_path / name
    with RecordWriter(path, first) as writer:
        for record in records:
            assert writer.write(record)
    assert writer.written == len(records)
    assert read(path) == (first, records, False)


def test_gz_is_really_compressed_and_plain_is_lines(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", some(100))
    write(tmp_path / "a.jsonl.gz", some(100))
    plain = (tmp_path / "a.jsonl").read_bytes()
    assert gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()) == plain
    lines = plain.splitlines()
    assert len(lines) == 101
    assert msgspec.json.decode(lines[0])["type"] == "header"
    assert {msgspec.json.decode(line)["type"] for line in lines[1:]} == {"iteration"}


@pytest.mark.parametrize("name", ["record.jsonl", "record.jsonl.gz"])
def test_every_truncation_keeps_what_was_whole(tmp_path: Path, name: str) -> None:
    """A writer killed at any byte: the reader gives a prefix of the records, or says that there is no header."""
    path = tmp_path / name
    write(path, some(5))
    data = path.read_bytes()
    most = 0
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        try:
            first, records, _ = read(path)
        except RecordFileError:
            assert length < len(data) / 2 or name.endswith(".gz")
            continue
        assert first == header()
        assert records == some(5)[: len(records)]
        most = max(most, len(records))
    assert most >= 4 or name.endswith(".gz")
    path.write_bytes(data)
    assert read(path) == (header(), some(5), False)


def test_a_cut_last_line_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, some(3))
    path.write_bytes(path.read_bytes()[:-20])
    assert read(path) == (header(), some(2), True)


def test_a_killed_gz_writer_leaves_what_it_flushed(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.gz"
    writer = RecordWriter(path, header(), flush_interval_s=0.0)
    for record in some(4):
        writer.write(record)
    writer.flush()
    copy = tmp_path / "copy.jsonl.gz"  # as it is on disk now, without the end that close() writes
    copy.write_bytes(path.read_bytes())
    writer.close()
    assert read(copy) == (header(), some(4), True)


def test_errors_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, some(3))
    lines = path.read_bytes().splitlines(keepends=True)
    for spoilt, why in (
        (lines[2][:-10] + b"\n", "line 3: "),
        (b"[1, 2]\n", "line 3: "),
        (lines[2].replace(b'"time_s":0.1', b'"time_s":-1.0'), "line 3: time_s is -1.0"),
        (lines[2].replace(b'"time_s":0.1', b'"time_s":null'), "line 3: "),
        (lines[0], "line 3: a second header"),
    ):
        path.write_bytes(lines[0] + lines[1] + spoilt + lines[3])
        with pytest.raises(RecordFileError, match=why):
            read(path)


def test_files_that_are_no_record(tmp_path: Path) -> None:
    for name, data, why in (
        ("empty.jsonl", b"", "is empty"),
        ("html.jsonl", b"<html>", "line 1"),
        ("headless.jsonl", msgspec.json.encode(some(1)[0]) + b"\n", "does not start with a header"),
        ("plain.jsonl.gz", b"not gzip at all, but long enough", "not readable as gzip"),
        ("noise.jsonl", bytes(range(256)) * 10, "line 1"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(RecordFileError, match=why):
            read(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "absent.jsonl")


def test_an_impossible_measurement_is_skipped_not_written(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    bad = iteration(1, stream("decode", [1], [1], [math.nan]))
    with RecordWriter(path, header()) as writer:
        assert writer.write(some(1)[0])
        assert not writer.write(bad)
        assert (writer.written, writer.skipped, writer.failed) == (1, 1, False)
    assert read(path) == (header(), some(1), False)
    with pytest.raises(InvalidRecordError):
        RecordWriter(path, header(tp=0))


def test_lines_are_buffered_until_the_interval(tmp_path: Path) -> None:
    now = 0.0
    path = tmp_path / "r.jsonl"
    with RecordWriter(path, header(), flush_interval_s=1.0, clock=lambda: now) as writer:
        writer.write(some(1)[0])
        assert len(path.read_bytes().splitlines()) == 1
        now = 1.5
        writer.write(some(2)[1])
        deadline = time.monotonic() + 20
        while len(path.read_bytes().splitlines()) < 3:  # written in the background
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_full_disk_ends_the_recording_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self) -> None: ...

        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record_file, "_open", lambda path, mode: Full())
    writer = RecordWriter(tmp_path / "r.jsonl", header())
    assert writer.failed
    assert not writer.write(some(1)[0])
    writer.close()


def test_a_missing_directory_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RecordWriter(tmp_path / "absent" / "r.jsonl", header())


def test_position_reaches_size(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.gz"
    write(path, some(50))
    with RecordReader(path) as reader:
        assert 0 < reader.size == path.stat().st_size
        for _ in reader:
            assert reader.position <= reader.size
        assert reader.position == reader.size
