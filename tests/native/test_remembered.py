from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conflux_native.remembered import default_dir, forget, path_of, recall, remember

KEY: dict[str, str | int] = {"driver_file": "libcuda.so.580.159.04", "cuda_version": 13000, "gpu": "NVIDIA H200"}
VALUE = {"offset": 0x51C, "how": "known"}


def test_what_is_remembered_is_recalled(tmp_path: Path) -> None:
    assert recall(tmp_path, "stream-mask", KEY) is None
    assert remember(tmp_path / "new" / "directory", "stream-mask", KEY, VALUE)
    assert recall(tmp_path / "new" / "directory", "stream-mask", KEY) == VALUE


def test_another_key_or_kind_is_another_thing(tmp_path: Path) -> None:
    remember(tmp_path, "stream-mask", KEY, VALUE)
    assert recall(tmp_path, "self-test", KEY) is None
    others: list[dict[str, str | int]] = [{"driver_file": "libcuda.so.590.1"}, {"cuda_version": 13010}, {"gpu": "H100"}]
    for other in others:
        assert recall(tmp_path, "stream-mask", {**KEY, **other}) is None


def test_the_last_value_counts_and_can_be_forgotten(tmp_path: Path) -> None:
    remember(tmp_path, "stream-mask", KEY, VALUE)
    remember(tmp_path, "stream-mask", KEY, {"offset": 4})
    assert recall(tmp_path, "stream-mask", KEY) == {"offset": 4}
    forget(tmp_path, "stream-mask", KEY)
    forget(tmp_path, "stream-mask", KEY)
    assert recall(tmp_path, "stream-mask", KEY) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\0\xff\xfe",
        b"null",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"schema": 1}',
        json.dumps({"schema": 2, "key": KEY, "value": VALUE}).encode(),
        json.dumps({"schema": 1, "key": KEY | {"gpu": "another"}, "value": VALUE}).encode(),
        json.dumps({"schema": 1, "key": KEY, "value": 0x51C}).encode(),
    ],
)
def test_a_damaged_file_is_ignored_and_can_be_replaced(tmp_path: Path, text: bytes) -> None:
    path_of(tmp_path, "stream-mask", KEY).write_bytes(text)
    assert recall(tmp_path, "stream-mask", KEY) is None
    assert remember(tmp_path, "stream-mask", KEY, VALUE)
    assert recall(tmp_path, "stream-mask", KEY) == VALUE


def test_a_file_that_others_may_write_is_not_believed(tmp_path: Path) -> None:
    remember(tmp_path, "stream-mask", KEY, VALUE)
    path_of(tmp_path, "stream-mask", KEY).chmod(0o666)
    assert recall(tmp_path, "stream-mask", KEY) is None


def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(path_of(tmp_path, "stream-mask", KEY), 0o600)
    assert recall(tmp_path, "stream-mask", KEY) is None
    path_of(tmp_path, "self-test", KEY).mkdir()
    assert recall(tmp_path, "self-test", KEY) is None


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert not remember(tmp_path / "file", "stream-mask", KEY, VALUE)
    assert recall(tmp_path / "file", "stream-mask", KEY) is None
    forget(tmp_path / "file", "stream-mask", KEY)


def test_many_writers_leave_one_whole_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda n: remember(tmp_path, "stream-mask", KEY, {"offset": n}), range(64)))
    found = recall(tmp_path, "stream-mask", KEY)
    assert found is not None
    assert found["offset"] in range(64)
    assert [path.name for path in tmp_path.iterdir()] == [path_of(tmp_path, "stream-mask", KEY).name]


def test_the_default_directory_follows_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_dir() == Path("/home/someone/.cache/conflux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_dir() == tmp_path / "conflux"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_dir() == Path("/home/someone/.cache/conflux")
