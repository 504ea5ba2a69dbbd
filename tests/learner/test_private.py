from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from learner.address import check_address
from learner.private import PREFIX, PrivateDirectory, remove_socket_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    return base


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize("runtime", ["", "/nonexistent/directory", "relative", "LONG", "GOOD"])
def test_private_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str) -> None:
    good = Path(tempfile.mkdtemp(dir="/tmp", prefix="run-"))  # short, however deep tmp_path is
    base = {"LONG": tmp_path / ("x" * 120), "GOOD": good}.get(runtime)
    if base is not None:
        base.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base or runtime))
    directory = PrivateDirectory()
    try:
        assert directory.path.stat().st_mode & 0o777 == 0o700
        assert directory.path.parent == (good if runtime == "GOOD" else Path("/tmp"))
        assert check_address(directory.address) == f"ipc://{directory.path}/learner"
    finally:
        directory.remove()
        good.rmdir()


def test_removed_with_its_socket_and_only_once(base: Path) -> None:
    directory = PrivateDirectory()
    bind(directory.path / "learner")
    directory.remove()
    assert list(base.iterdir()) == []
    directory.path.mkdir()
    directory.remove()
    assert directory.path.exists()


def test_a_killed_owner_is_cleaned_up_after_and_a_living_one_is_not(base: Path) -> None:
    program = (
        "import os, signal, socket; from learner.private import PrivateDirectory\n"
        "one = PrivateDirectory(); socket.socket(socket.AF_UNIX).bind(str(one.path / 'learner'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    living = PrivateDirectory()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert len(list(base.iterdir())) == 2
    other = PrivateDirectory()
    assert sorted(base.iterdir()) == sorted([living.path, other.path])
    living.remove()
    other.remove()


def test_what_is_not_ours_stays(base: Path) -> None:
    for name in ("conflux-demo-1", f"{PREFIX}full"):
        (base / name).mkdir()
    (base / f"{PREFIX}full" / "learner").write_text("no socket")
    (base / f"{PREFIX}file").write_text("")
    (base / f"{PREFIX}link").symlink_to(base / "conflux-demo-1")
    before = sorted(base.iterdir())
    PrivateDirectory().remove()
    assert sorted(base.iterdir()) == before


def test_only_private_sockets_are_removed_by_address(base: Path) -> None:
    mine, own = base / f"{PREFIX}x" / "learner", base / "own" / "learner"
    for path in (mine, own):
        path.parent.mkdir()
        bind(path)
    for address in (f"ipc://{mine}", f"ipc://{own}", "tcp://127.0.0.1:1", f"tcp://{mine}"):
        remove_socket_of(address)
    assert not mine.parent.exists()
    assert own.exists()
    assert os.path.isdir(base)
