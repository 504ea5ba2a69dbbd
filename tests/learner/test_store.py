from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.logs import RateLimit
from learner.store import StateFile, StateStore, model_id
from tests.learner.generated import CPU, header


@pytest.fixture
def file(tmp_path: Path) -> StateFile:
    return StateStore(tmp_path / "state").file(header())


def save(file: StateFile, estimator: bytes = b"learnt", last_version: int = 7) -> bool:
    return file.save(estimator=estimator, last_version=last_version, saved_unix_s=1.0)


def test_what_was_saved_is_loaded(file: StateFile) -> None:
    assert file.load() is None
    for version in (7, 8):
        assert save(file, b"learnt %d" % version, version)
        state = file.load()
        assert state is not None
        assert (state.estimator, state.last_version, state.key) == (b"learnt %d" % version, version, header().key)


def test_the_directory_and_its_files_are_private(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "state"
    previous = os.umask(0o077)
    try:
        save(StateStore(directory).file(header()))
    finally:
        os.umask(previous)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in directory.iterdir()} == {0}


def test_nothing_but_state_and_lock_is_left(file: StateFile) -> None:
    save(file)
    assert sorted(path.suffix for path in file.path.parent.iterdir()) == [".lock", ".state"]


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_set_aside(tmp_path: Path, data: st.DataObject) -> None:
    """Any change of the bytes is found, and the next save works."""
    file = StateStore(tmp_path).file(header())
    save(file, bytes(range(256)))
    whole = file.path.read_bytes()
    damaged = bytearray(whole)
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(whole) - 1)) :]
    else:
        # Not the date, which nothing depends on, nor the version, of which any is possible.
        body = whole.index(bytes(range(256)))
        damaged[data.draw(st.integers(body, body + 255))] ^= data.draw(st.integers(1, 255))
    file.path.write_bytes(damaged)
    assert file.load() is None
    assert not file.path.exists()
    assert file.path.with_suffix(".corrupt").read_bytes() == damaged
    assert save(file)
    assert file.load() is not None
    file.close()


def test_setting_aside_is_logged_in_one_line(file: StateFile, caplog: pytest.LogCaptureFixture) -> None:
    file.path.write_bytes(b"\x00garbage")
    assert file.load() is None
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "\n" not in record.getMessage()
    assert str(file.path) in record.getMessage()


def test_a_state_of_another_model_is_not_used(tmp_path: Path, file: StateFile) -> None:
    other = StateFile(tmp_path, "x", "another|key")
    save(other)
    os.replace(other.path, file.path)
    assert file.load() is None


def test_only_one_learner_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = (StateStore(tmp_path).file(header()) for _ in range(2))
    assert save(first, b"first")
    assert not save(second, b"second")
    assert not save(second, b"second")
    assert sum("another learner owns" in record.getMessage() for record in caplog.records) == 1
    state = second.load()
    assert state is not None
    assert state.estimator == b"first"
    first.close()
    assert save(second, b"second")


def test_an_unwritable_place_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        StateStore(tmp_path / "file" / "state")


def test_a_failing_disk_is_no_exception(file: StateFile, caplog: pytest.LogCaptureFixture) -> None:
    save(file)
    file.path.with_suffix(".new").mkdir()  # writing there fails
    assert not save(file, b"newer")
    state = file.load()
    assert state is not None
    assert state.estimator == b"learnt"
    assert "cannot save" in caplog.text


def test_models_are_told_apart_by_key_and_roofline() -> None:
    plain = header()
    faster = msgspec.structs.replace(CPU, flops=((1.0, 9e12),))
    measured_again = msgspec.structs.replace(CPU, provenance={"date": "today"})
    assert model_id(plain) == model_id(header(created_unix_s=1.0, mode="spatial", tbt_slo_s=0.5))
    assert model_id(plain) == model_id(header(device=measured_again))
    different = [header(name="other"), header(dtype="float16"), header(tp=2), header(xp=2), header(device=faster)]
    assert len({model_id(each) for each in [plain, *different]}) == 6


def test_logs_are_limited_by_kind() -> None:
    now = 0.0
    limit = RateLimit(5.0, clock=lambda: now)

    def log(message: str, *arguments: object) -> str | None:
        record = logging.LogRecord("learner", logging.WARNING, "", 0, message, arguments, None)
        return record.getMessage() if limit.filter(record) else None

    assert log("rejected: %s", "a") == "rejected: a"
    assert log("rejected: %s", "b") is None
    assert log("other") == "other"
    assert log("rejected: %s", "c") is None
    now = 6.0
    assert log("rejected: %s", "100 %") == "rejected: 100 % (and 2 more like it)"
    assert log("rejected: %s", "d") is None
    now = 12.0
    assert log("rejected: %s", "e") == "rejected: e (and 1 more like it)"
    for number in range(5_000):
        log(f"kind {number}")
    assert len(limit._last_s) <= 256
