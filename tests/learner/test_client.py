"""The client against a learner that this test plays: honest, absent, slow, restarted and lying."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from learner.address import AddressError, check_address, is_private
from learner.client import LearnerClient
from learner.messages import Heartbeat, Hello, Message, SnapshotMessage, WhoAreYou, decode, encode
from learner.private import PrivateDirectory
from learner.records import Candidates, Iteration
from learner.snapshot import Snapshot
from tests.learner.generated import header, iteration, stream
from tests.learner.waiting import eventually

HEADER = header()


class Played:
    """A ROUTER socket where the learner would be."""

    def __init__(self, context: zmq.Context, address: str, **options: int) -> None:
        self.socket = context.socket(zmq.ROUTER)
        for name, value in {"LINGER": 0, "ROUTER_MANDATORY": 1, **options}.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.bind(address)
        self.peer = b""

    def receive(self) -> Message | None:
        try:
            self.peer, data = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return decode(data)

    def send(self, message: Message | bytes) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        self.socket.send_multipart((self.peer, data))

    def greeted(self, client: LearnerClient) -> None:
        """Let the client say Hello."""

        def hello() -> bool:
            client.poll()
            return self.receive() == Hello(header=HEADER)  # iterations may still be queued before it

        eventually(hello)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


@pytest.fixture
def address() -> Iterator[str]:
    directory = PrivateDirectory()
    yield directory.address
    directory.remove()


@pytest.fixture
def client(address: str) -> Iterator[LearnerClient]:
    with LearnerClient(address, HEADER) as client:
        yield client


@pytest.fixture
def learner(context: zmq.Context, address: str, client: LearnerClient) -> Played:
    learner = Played(context, address)
    learner.greeted(client)
    learner.send(beat())
    eventually(lambda: (client.poll(), client.stats.learner_id)[1])
    return learner


def beat(learner_id: str = "one", **counts: int) -> Heartbeat:
    return Heartbeat(learner_id=learner_id, **{"received": 0, "rejected": 0, "samples": 0, **counts})


def snapshot(version: int, learner_id: str = "one", **changes: object) -> SnapshotMessage:
    plain = Snapshot.roofline()
    return SnapshotMessage(
        snapshot=msgspec.structs.replace(
            plain, **{"version": version, "learner_id": learner_id, "key": HEADER.key, **changes}
        )
    )


def one(number: int = 1) -> Iteration:
    return iteration(number, stream("decode", [1], [10], [0.01]))


def test_takes_the_newest_snapshot(client: LearnerClient, learner: Played) -> None:
    for version in (1, 2, 3):
        learner.send(snapshot(version))
    seen: list[int] = []

    def newest() -> bool:
        got = client.poll()
        if got is not None:
            seen.append(got.version)
        return seen[-1:] == [3]

    eventually(newest)
    assert seen == sorted(seen)
    assert client.poll() is None
    assert client.stats.snapshot_version == 3
    assert client.stats.rejected == 0


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(snapshot(9, key="another|model"), id="another key"),
        pytest.param(snapshot(4), id="an older version"),
        pytest.param(snapshot(9, margin=[math.nan] * len(Snapshot.roofline().margin)), id="nan"),
        pytest.param(snapshot(9, coefficients=[1e30] * len(Snapshot.roofline().coefficients)), id="absurd"),
        pytest.param(snapshot(9, correction=[]), id="wrong shape"),
        pytest.param(Hello(header=HEADER), id="a message for learners"),
        pytest.param(one(), id="an iteration"),
        pytest.param(b"", id="nothing"),
        pytest.param(bytes(range(256)), id="noise"),
    ],
)
def test_a_lie_is_rejected_and_counted(client: LearnerClient, learner: Played, lie: Message | bytes) -> None:
    learner.send(snapshot(5))
    assert eventually(client.poll).version == 5
    learner.send(lie)
    learner.send(beat(samples=77))
    eventually(lambda: (client.poll(), client.stats.learner_samples == 77)[1])
    assert client.stats.rejected == 1
    assert client.stats.snapshot_version == 5
    learner.send(snapshot(6))
    assert eventually(client.poll).version == 6


def test_a_repeated_snapshot_is_neither_new_nor_a_lie(client: LearnerClient, learner: Played) -> None:
    learner.send(snapshot(5))
    assert eventually(client.poll).version == 5
    learner.send(snapshot(5))
    learner.send(snapshot(6))
    assert eventually(client.poll).version == 6
    assert client.stats.rejected == 0


def test_iterations_arrive_without_their_candidates(client: LearnerClient, learner: Played) -> None:
    columns = {name: [] for name in Candidates.__struct_fields__}
    full = msgspec.structs.replace(one(), candidates=Candidates(**columns))
    assert client.send(full)
    assert eventually(learner.receive) == one()
    assert (client.stats.sent, client.stats.dropped) == (1, 0)


def test_says_hello_again_when_asked(client: LearnerClient, learner: Played) -> None:
    learner.send(WhoAreYou(learner_id="one"))
    learner.greeted(client)
    assert client.stats.restarts == 0


def test_a_silent_learner_is_greeted_again(context: zmq.Context, address: str) -> None:
    now = 0.0
    learner = Played(context, address)
    with LearnerClient(address, HEADER, clock=lambda: now) as client:
        learner.greeted(client)
        learner.send(beat())
        eventually(lambda: (client.poll(), client.stats.learner_id)[1])
        assert client.stats.last_heartbeat_age_s == 0.0
        client.poll()
        time.sleep(0.05)
        assert learner.receive() is None
        now = 60.0
        learner.greeted(client)
        assert client.stats.last_heartbeat_age_s == 60.0


def test_a_new_learner_is_noticed_greeted_and_believed(
    context: zmq.Context, address: str, client: LearnerClient, learner: Played
) -> None:
    learner.send(snapshot(1000))
    assert eventually(client.poll).version == 1000
    learner.socket.close()
    second = Played(context, address)

    def asked() -> bool:
        client.poll()
        client.send(one())
        return second.receive() is not None

    eventually(asked)
    second.send(WhoAreYou(learner_id="two"))
    second.greeted(client)
    second.send(snapshot(3, "two"))
    assert eventually(client.poll).version == 3
    assert client.stats.restarts == 1
    assert client.stats.learner_id == "two"


def test_an_absent_learner_costs_nothing_but_the_samples(client: LearnerClient) -> None:
    for number in range(2_000):
        assert client.poll() is None
        assert not client.send(one(number))
    assert (client.stats.sent, client.stats.dropped) == (0, 2_000)
    assert client.stats.last_heartbeat_age_s is None


def test_a_learner_that_does_not_read_never_blocks_us(context: zmq.Context, address: str) -> None:
    """The queues fill up, then iterations are dropped. A client that blocked would hang here."""
    learner = Played(context, address, RCVHWM=1)
    with LearnerClient(address, HEADER) as client:
        learner.greeted(client)
        big = iteration(1, stream("decode", [1] * 60_000, [50_000] * 60_000, [0.01]))
        while client.stats.dropped < 50:
            client.send(big)
            client.poll()
        assert client.stats.sent < 1_000


def test_what_cannot_be_encoded_is_dropped(client: LearnerClient, learner: Played) -> None:
    assert not client.send(iteration(2**70, stream("decode", [1], [1], [0.01])))
    assert client.stats.dropped == 1


def test_addresses() -> None:
    for good in ("tcp://127.0.0.1:5555", "tcp://[::1]:5555", "tcp://learner.example:1", "ipc:///tmp/x"):
        assert check_address(good) == good
    for bad in (
        "",
        "tcp://",
        "tcp://*",
        "tcp://host:0",
        "tcp://host:70000",
        "tcp://host:port",
        "udp://host:1",
        "inproc://x",
        "ipc://relative",
        "ipc://@abstract",
        "ipc:///" + "x" * 200,
        "on",
    ):
        with pytest.raises(AddressError):
            LearnerClient(bad, HEADER)
    assert is_private("ipc:///tmp/x")
    assert is_private("tcp://127.0.0.1:1")
    assert not is_private("tcp://*:1")
    assert not is_private("tcp://10.0.0.1:1")
