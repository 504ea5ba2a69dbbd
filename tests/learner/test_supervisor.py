"""A real learner process under its supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from learner.address import AddressError
from learner.client import LearnerClient
from learner.supervisor import LearnerProcess
from tests.learner.generated import header
from tests.learner.waiting import eventually

ROOT = Path(__file__).parents[2]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def answers(address: str) -> bool:
    with LearnerClient(address, header()) as client:
        return bool(eventually(lambda: (client.poll(), client.stats.learner_id)[1]))


def test_starts_restarts_and_ends(tmp_path: Path) -> None:
    with LearnerProcess(state_dir=tmp_path / "state") as learner:
        socket = Path(learner.address.removeprefix("ipc://"))
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        assert answers(learner.address)
        assert socket.stat().st_mode & 0o077 == 0
        first = learner.pid
        assert first is not None
        assert os.getpgid(first) != os.getpgid(0)
        assert os.getpriority(os.PRIO_PROCESS, first) >= min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: learner.restarts == 1)
        assert answers(learner.address)
        second = learner.pid
        assert second not in (None, first)
        assert not learner.failed
    assert second is not None
    assert not alive(second)
    assert not socket.parent.exists()
    learner.stop()
    assert learner.pid is None


def test_refused_options_are_not_tried_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with LearnerProcess(state_dir=tmp_path / "file" / "state") as learner:
        eventually(lambda: learner.failed)
        assert learner.restarts == 0
        assert learner.pid is None
    error = capfd.readouterr().err
    assert "conflux learner: error:" in error
    assert "Traceback" not in error


def test_an_unusable_address_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(AddressError):
        LearnerProcess("tcp://nowhere", tmp_path)


@pytest.mark.parametrize("how", ["kill", "exit", "exception", "collected"])
def test_the_learner_ends_with_its_server(tmp_path: Path, how: str) -> None:
    """Whatever ends the server, no process, socket or directory stays."""
    program = textwrap.dedent(
        """
        import os, signal, sys, time
        from learner.client import LearnerClient
        from learner.supervisor import LearnerProcess
        from tests.learner.generated import header
        learner = LearnerProcess(state_dir=sys.argv[1])
        with LearnerClient(learner.address, header()) as client:
            while not client.stats.learner_id:
                client.poll()
                time.sleep(0.01)
        pid = learner.pid
        print(pid, learner.address, flush=True)
        how = sys.argv[2]
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exception":
            raise RuntimeError("the server crashed")
        elif how == "collected":
            del learner
            while os.path.exists(f"/proc/{pid}"):
                time.sleep(0.01)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), how],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    assert done.returncode == {"kill": -signal.SIGKILL, "exception": 1}.get(how, 0)
    pid, address = done.stdout.split()
    eventually(lambda: not alive(int(pid)))
    eventually(lambda: not Path(address.removeprefix("ipc://")).parent.exists())


def test_a_crash_loop_backs_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.supervisor._command", lambda *_: [sys.executable, "-c", "raise SystemExit(9)"])
    started_s = time.monotonic()
    with LearnerProcess(state_dir=tmp_path) as learner:
        eventually(lambda: learner.restarts == 3)
        # 0.2 + 0.4 + 0.8 s of waiting at the least, however fast the machine is.
        assert time.monotonic() - started_s >= 1.4
        assert not learner.failed
