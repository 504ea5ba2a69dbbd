"""Real learner processes: learning, dying, restoring, and how they are started and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from learner.pool import EstimatorPool
from learner.process import main
from learner.store import StateStore
from learner.supervisor import LearnerProcess
from tests.learner.generated import header
from tests.learner.serving import Scheduler, mape
from tests.learner.waiting import eventually
from tests.learner.workload import workload

ROOT = Path(__file__).parents[2]


def learnt_before(directory: Path) -> int:
    """Leave the state of a learner that has ended; return the last version it published."""
    pool = EstimatorPool(StateStore(directory), "before")
    for one in workload(100):
        pool.observe(pool.open(header()), one)
    model = pool.refit()
    assert model is not None
    pool.close()
    return model.version


def test_learns_and_publishes_and_survives_a_kill(tmp_path: Path) -> None:
    with LearnerProcess(state_dir=tmp_path, save_interval_s=0.2) as learner:
        scheduler = Scheduler(learner.address)
        with scheduler.client:
            learn_kill_and_go_on(learner, scheduler, tmp_path)


def learn_kill_and_go_on(learner: LearnerProcess, scheduler: Scheduler, state_dir: Path) -> None:
    roofline = mape(None)
    scheduler.until(lambda: scheduler.version > 0 and mape(scheduler.snapshot) < roofline / 3)
    before = scheduler.snapshot
    assert before is not None
    assert before.key == header().key
    scheduler.until(lambda: any(state_dir.glob("*.state")))
    [state] = state_dir.glob("*.state")
    written = state.stat().st_mtime_ns
    scheduler.until(lambda: state.stat().st_mtime_ns != written)

    latest, pid = scheduler.version, learner.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    scheduler.until(lambda: scheduler.snapshot is not None and scheduler.snapshot.learner_id != before.learner_id)
    after = scheduler.snapshot
    assert after is not None
    assert after.version > latest
    assert after.samples > 0
    assert mape(after) < roofline / 3
    assert (scheduler.client.stats.restarts, scheduler.client.stats.rejected) == (1, 0)
    resumed = scheduler.version
    scheduler.until(lambda: scheduler.version > resumed)


def test_an_idle_scheduler_gets_the_restored_model(tmp_path: Path) -> None:
    """One that only polls: it must be greeted, and what was saved must come by itself."""
    version = learnt_before(tmp_path)
    with LearnerProcess(state_dir=tmp_path) as learner:
        idle = Scheduler(learner.address)
        with idle.client:
            eventually(lambda: (idle.take(), idle.version > version)[1])
            assert idle.client.stats.sent == 0
            assert mape(idle.snapshot) < mape(None) / 3


def test_a_damaged_state_is_set_aside_and_learning_starts_afresh(tmp_path: Path) -> None:
    learnt_before(tmp_path)
    [state] = tmp_path.glob("*.state")
    damaged = bytearray(state.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    state.write_bytes(damaged)
    with LearnerProcess(state_dir=tmp_path) as learner:
        scheduler = Scheduler(learner.address)
        with scheduler.client:
            scheduler.until(lambda: scheduler.version > 0)
    assert state.with_suffix(".corrupt").read_bytes() == damaged
    assert state.exists()


def start(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "learner.process", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_alone_on_tcp_until_sigterm(tmp_path: Path) -> None:
    """``conflux learner --bind tcp://…``: serves over TCP, saves on SIGTERM, ends with status 0 and plain log lines."""
    with zmq.Context() as context, context.socket(zmq.REP) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    process = start("--bind", f"tcp://127.0.0.1:{port}", "--state-dir", str(tmp_path))
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address == f"tcp://127.0.0.1:{port}"
        scheduler = Scheduler(address)
        with scheduler.client:
            scheduler.until(lambda: scheduler.version > 0)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert any(tmp_path.glob("*.state"))
    lines = errors.splitlines()
    assert all(line.startswith("[") and "conflux-learner" in line for line in lines)
    assert any("listening on tcp://" in line for line in lines)
    assert "ending: told to stop" in lines[-1]


def test_alone_without_an_address_makes_a_private_socket(tmp_path: Path) -> None:
    process = start("--no-save", "--state-dir", str(tmp_path / "unused"))
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        directory = Path(address.removeprefix("ipc://")).parent
        assert directory.stat().st_mode & 0o777 == 0o700
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert not directory.exists()
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--bind", "udp://x:1"], "udp://x:1"),
        (["--bind", "ipc:///nonexistent/directory/socket"], "cannot listen on ipc:///nonexistent"),
        (["--bind", "ipc:///" + "x" * 200], "107 bytes"),
        (["--save-interval", "nan"], "--save-interval nan"),
        (["--state-dir", "/dev/null/state"], "/dev/null"),
        (["--unknown"], "--unknown"),
    ],
)
def test_wrong_options_end_in_one_line(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    previous = os.umask(0o022)
    try:
        status = main(options)
    except SystemExit as stopped:
        status = stopped.code
    finally:
        os.umask(previous)
    error = capsys.readouterr().err
    assert status == 2
    assert named in error.splitlines()[-1]
    assert "Traceback" not in error
