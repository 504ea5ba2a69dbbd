"""One learner process that lives through garbage, lies, absurd timings and schedulers that vanish."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from learner.client import LearnerClient
from learner.messages import Hello, WhoAreYou, encode
from learner.snapshot import Snapshot
from learner.supervisor import LearnerProcess
from tests.learner.generated import header, iteration, stream
from tests.learner.serving import Scheduler, mape
from tests.learner.waiting import eventually
from tests.learner.workload import workload

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LearnerProcess]:
    """One learner for the tests that it must survive."""
    with LearnerProcess(state_dir=tmp_path_factory.mktemp("state")) as learner:
        yield learner
        assert learner.restarts == 0


@pytest.fixture
def scheduler(learner: LearnerProcess) -> Iterator[Scheduler]:
    scheduler = Scheduler(learner.address)
    with scheduler.client:
        yield scheduler


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no VmRSS")


def mutants(rng: random.Random) -> Iterator[list[bytes]]:
    """Random bytes, mutated messages of every kind, too many parts, sound but absurd records, made-up models."""
    sound = [encode(Hello(header=header())), encode(WhoAreYou(learner_id="x"))]
    sound += [encode(one) for one in workload(24, seed=3)]
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
        elif kind < 0.972:
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


def test_a_hundred_thousand_bad_messages(learner: LearnerProcess, scheduler: Scheduler) -> None:
    """It lives, goes on learning, counts them, and its memory stays flat."""
    scheduler.until(lambda: scheduler.version > 0)
    pid = learner.pid
    assert pid is not None
    rejected = scheduler.client.stats.learner_rejected
    flood(learner.address, 20_000, seed=1)  # allocator arenas, code paths, the made-up models
    scheduler.turn()
    before = rss_bytes(pid)
    flood(learner.address, 80_000, seed=2)
    # The last of the flood may still be queued: what is sent now comes after it or is taken in turns with it.
    received, version = scheduler.client.stats.learner_received, scheduler.version
    scheduler.until(lambda: scheduler.client.stats.learner_received > received and scheduler.version > version)
    scheduler.until(lambda: scheduler.client.stats.learner_rejected > rejected + 70_000)
    growth = rss_bytes(pid) - before
    assert growth < 24 * MIB
    assert learner.pid == pid
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
    assert learner.pid == pid


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


def test_no_tcp_unless_asked(learner: LearnerProcess, scheduler: Scheduler) -> None:
    eventually(lambda: (scheduler.take(), scheduler.client.stats.learner_id)[1])
    inodes = {os.readlink(path) for path in Path(f"/proc/{learner.pid}/fd").iterdir() if path.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{learner.pid}/net/{table}").read_text().splitlines()[1:]:
            assert f"socket:[{line.split()[9]}]" not in inodes
