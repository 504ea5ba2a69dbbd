"""Real learner processes on real sockets: learning, dying, lying peers and garbage."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from learner.client import LearnerClient
from learner.latency import LatencyModel
from learner.messages import Hello, WhoAreYou, encode
from learner.process import main
from learner.snapshot import Snapshot
from learner.supervisor import LearnerProcess
from tests.learner.generated import CPU, SHAPE, header, iteration, stream
from tests.learner.waiting import eventually
from tests.learner.workload import true_s, workload

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


class Scheduler:
    """A client and the iterations that it sends, over and over."""

    def __init__(self, address: str) -> None:
        self.client = LearnerClient(address, header())
        self.snapshot: Snapshot | None = None
        self._number = 0

    def turn(self, count: int = 8) -> None:
        """Send some iterations, take what comes."""
        for one in workload(count, seed=self._number, first=self._number):
            self.client.send(one)
        self._number += count
        self.take()

    def take(self) -> None:
        while (snapshot := self.client.poll()) is not None:
            if self.snapshot is not None and snapshot.learner_id == self.snapshot.learner_id:
                assert snapshot.version > self.snapshot.version
            self.snapshot = snapshot

    def until(self, done: Callable[[], bool]) -> None:
        """Go on serving until something has happened."""

        def served() -> bool:
            self.turn()
            return done()

        eventually(served, every_s=0.02)

    @property
    def version(self) -> int:
        return self.snapshot.version if self.snapshot is not None else 0


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[LearnerProcess]:
    with LearnerProcess(state_dir=tmp_path, save_interval_s=0.2) as learner:
        yield learner


@pytest.fixture
def scheduler(learner: LearnerProcess) -> Iterator[Scheduler]:
    scheduler = Scheduler(learner.address)
    with scheduler.client:
        yield scheduler


def mape(snapshot: Snapshot | None) -> float:
    """Of a snapshot on batches that it has not seen, against the made-up machine's noiseless times."""
    model = LatencyModel(SHAPE, CPU, snapshot)
    errors = []
    for one in workload(80, seed=999, noise=0.0):
        batch = one.streams[0]
        predicted = model.predict(model.terms(batch.q, batch.c, batch.logits_rows, 1))
        measured = true_s(float(predicted.roofline_s[0]), batch.phase)
        errors.append(abs(float(predicted.mean_s[0]) - measured) / measured)
    return float(np.mean(errors))


def test_learns_and_publishes_and_survives_a_kill(
    learner: LearnerProcess, scheduler: Scheduler, tmp_path: Path
) -> None:
    roofline = mape(None)
    scheduler.until(lambda: scheduler.version > 0 and mape(scheduler.snapshot) < roofline / 3)
    before = scheduler.snapshot
    assert before is not None
    assert before.key == header().key
    saved = scheduler.version
    scheduler.until(lambda: scheduler.version > saved and any(tmp_path.glob("*.state")))
    state = next(tmp_path.glob("*.state"))
    written = state.stat().st_mtime_ns
    scheduler.until(lambda: state.stat().st_mtime_ns != written)

    latest, samples = scheduler.version, scheduler.client.stats.learner_samples
    pid = learner.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    scheduler.until(lambda: scheduler.client.stats.restarts == 1 and scheduler.snapshot.learner_id != before.learner_id)
    after = scheduler.snapshot
    assert after is not None
    assert after.version > latest
    assert after.samples > 0
    assert mape(after) < roofline / 3
    assert samples > 0
    assert scheduler.client.stats.rejected == 0


def test_an_idle_scheduler_gets_the_restored_model(tmp_path: Path) -> None:
    """One that only polls: it must be greeted, and what was saved must come by itself."""
    with LearnerProcess(state_dir=tmp_path) as first:
        one = Scheduler(first.address)
        with one.client:
            one.until(lambda: one.version > 0)
    assert any(tmp_path.glob("*.state"))
    with LearnerProcess(state_dir=tmp_path) as second:
        idle = Scheduler(second.address)
        with idle.client:
            eventually(lambda: (idle.take(), idle.version > one.version)[1])
            assert idle.client.stats.sent == 0


def test_a_damaged_state_is_set_aside_and_learning_starts_afresh(tmp_path: Path) -> None:
    with LearnerProcess(state_dir=tmp_path) as first:
        one = Scheduler(first.address)
        with one.client:
            one.until(lambda: one.version > 0)
    [state] = tmp_path.glob("*.state")
    damaged = bytearray(state.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    state.write_bytes(damaged)
    with LearnerProcess(state_dir=tmp_path) as second:
        other = Scheduler(second.address)
        with other.client:
            other.until(lambda: other.version > 0)
    assert state.with_suffix(".corrupt").read_bytes() == damaged
    assert state.exists()


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no VmRSS")


def mutants(rng: random.Random) -> Iterator[list[bytes]]:
    """Random bytes, mutated messages of every kind, too many parts, sound but absurd records, made-up models."""
    sound = [encode(Hello(header=header())), encode(WhoAreYou(learner_id="x"))]
    sound += [encode(one) for one in workload(8, seed=3)]
    absurd = [
        encode(iteration(1, stream("decode", [1], [5], [took])))
        for took in (math.nan, math.inf, -1.0, 0.0, 1e-12, 9e5, 1e300)
    ]
    while True:
        kind = rng.random()
        if kind < 0.3:
            yield [rng.randbytes(rng.randint(0, 300))]
        elif kind < 0.9:
            mutant = bytearray(rng.choice(sound))
            for _ in range(rng.randint(1, 6)):
                mutant[rng.randrange(len(mutant))] = rng.randrange(256)
            yield [bytes(mutant)]
        elif kind < 0.95:
            yield [rng.choice(absurd)]
        elif kind < 0.97:
            yield [b""] * rng.randint(2, 5)
        elif kind < 0.98:
            yield [encode(Hello(header=header(f"made up {rng.randrange(1000)}")))]
        else:
            yield [rng.choice(sound)]


def flood(address: str, count: int, seed: int) -> None:
    """Send ``count`` messages that a learner should not have to see, from a few peers that come and go."""
    rng = random.Random(seed)
    source = mutants(rng)
    with zmq.Context() as context:
        for _ in range(20):
            with context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, -1)
                socket.setsockopt(zmq.SNDTIMEO, 60_000)
                socket.connect(address)
                for _ in range(count // 20):
                    socket.send_multipart(next(source))
                while socket.poll(0):
                    socket.recv_multipart()


@pytest.mark.timeout(300)
def test_a_hundred_thousand_bad_messages(learner: LearnerProcess, scheduler: Scheduler) -> None:
    """It lives, goes on learning, counts them, and its memory stays flat."""
    scheduler.until(lambda: scheduler.version > 0)
    pid = learner.pid
    assert pid is not None
    flood(learner.address, 20_000, seed=1)  # allocator arenas, code paths, the made-up models
    scheduler.turn()
    before = rss_bytes(pid)
    flood(learner.address, 80_000, seed=2)
    # The last of the flood may still be queued: what is sent now comes after it or is taken in turns with it.
    received, version = scheduler.client.stats.learner_received, scheduler.version
    scheduler.until(lambda: scheduler.client.stats.learner_received > received and scheduler.version > version)
    scheduler.until(lambda: scheduler.client.stats.learner_rejected > 70_000)
    growth = rss_bytes(pid) - before
    assert growth < 24 * MIB
    assert (learner.pid, learner.restarts) == (pid, 0)
    assert mape(scheduler.snapshot) < mape(None) / 2


def test_absurd_timings_do_not_move_the_model(learner: LearnerProcess, scheduler: Scheduler) -> None:
    scheduler.until(lambda: scheduler.version > 0 and mape(scheduler.snapshot) < 0.15)
    rejected = scheduler.client.stats.learner_rejected
    for number in range(200):
        took = (math.nan, -1.0, math.inf, 0.0)[number % 4]
        scheduler.client.send(iteration(number, stream("decode", [1], [100], [took], [0.01])))
        scheduler.turn(1)
    version = scheduler.version
    scheduler.until(lambda: scheduler.version > version and scheduler.client.stats.learner_rejected > rejected)
    assert mape(scheduler.snapshot) < 0.2


def test_schedulers_that_vanish_are_forgotten(learner: LearnerProcess, scheduler: Scheduler) -> None:
    """Killed in mid-conversation, many times; the one that stays is served."""
    program = (
        "import os, signal, sys, time\n"
        "from learner.client import LearnerClient\n"
        "from tests.learner.generated import header\n"
        "from tests.learner.workload import workload\n"
        "clients = [LearnerClient(sys.argv[1], header()) for _ in range(40)]\n"
        "while not all(client.stats.learner_id for client in clients):\n"
        "    for client in clients: client.poll()\n"
        "    time.sleep(0.01)\n"
        "for client in clients:\n"
        "    for one in workload(5): client.send(one)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    scheduler.until(lambda: scheduler.version > 0)
    pid = learner.pid
    assert pid is not None
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program, learner.address],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=120,
        )
        assert done.returncode == -signal.SIGKILL
    version = scheduler.version
    scheduler.until(lambda: scheduler.version > version)
    eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= descriptors + 4)
    assert learner.restarts == 0


def test_two_schedulers_of_one_key_share_what_is_learnt(learner: LearnerProcess, scheduler: Scheduler) -> None:
    """As the ranks of XP do: one sends, both get the snapshots. One of another model gets none of them."""
    with LearnerClient(learner.address, header()) as idle, LearnerClient(learner.address, header("other")) as other:
        got: list[Snapshot] = []

        def both() -> bool:
            if (snapshot := idle.poll()) is not None:
                got.append(snapshot)
            assert other.poll() is None
            return bool(got) and bool(other.stats.learner_id)

        scheduler.until(both)
        assert got[-1].key == header().key
        assert other.stats.rejected == 0


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


def test_no_tcp_unless_asked(learner: LearnerProcess, scheduler: Scheduler) -> None:
    eventually(lambda: (scheduler.take(), scheduler.client.stats.learner_id)[1])
    inodes = {os.readlink(path) for path in Path(f"/proc/{learner.pid}/fd").iterdir() if path.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{learner.pid}/net/{table}").read_text().splitlines()[1:]:
            assert f"socket:[{line.split()[9]}]" not in inodes


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
