"""A scheduler's end of the line to its learner. Nothing here blocks, raises on bad news, or waits for an answer."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from learner.address import check_address
from learner.messages import (
    MAX_MESSAGE_BYTES,
    Heartbeat,
    Hello,
    Message,
    ProtocolError,
    SnapshotMessage,
    WhoAreYou,
    decode,
    encode,
)
from learner.records import Header, Iteration
from learner.snapshot import Snapshot

logger = logging.getLogger(__name__)

QUEUE_TO_LEARNER = 64
QUEUE_FROM_LEARNER = 16
MESSAGES_PER_POLL = 4

# A learner beats once a second; after this long without a word, introduce ourselves again in case it is a new one.
SILENCE_S = 3.0
HELLO_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counts since the client was made, and what the learner last said of itself.

    ``sent`` and ``dropped`` count iterations; ``rejected`` counts messages from the learner that could not be used:
    malformed, out of bounds, for another model, or older than what is in use. ``restarts`` counts changes of the
    learner's id. ``last_heartbeat_age_s`` is None until the first heartbeat. The ``learner_…`` figures are the newest
    heartbeat's: messages taken and refused by the learner over all its peers, and samples behind this peer's model.
    """

    sent: int
    dropped: int
    rejected: int
    restarts: int
    last_heartbeat_age_s: float | None
    learner_id: str
    snapshot_version: int
    learner_received: int
    learner_rejected: int
    learner_samples: int


class LearnerClient:
    """Sends iterations to a learner and takes its newest snapshot.

    Not for use by several threads at once. Raises :class:`~learner.address.AddressError` if ``address`` is unusable;
    a learner that is not there yet, or no longer, is no error.

    >>> client = LearnerClient("ipc:///run/user/1000/conflux-1a2b/learner", header)  # doctest: +SKIP
    >>> if (snapshot := client.poll()) is not None:  # doctest: +SKIP
    ...     model = model.with_snapshot(snapshot)
    >>> client.send(iteration)  # doctest: +SKIP
    True
    """

    def __init__(self, address: str, header: Header, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._key = header.key
        self._hello = encode(Hello(header=header))
        self._clock = clock
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_TO_LEARNER)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_FROM_LEARNER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # Queue only for a learner that is there: what a dead one did not take is stale when the next one comes.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        # NOTE: not ZMQ's own heartbeats, which can abort the process; see learner.server.bound_socket.
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        try:
            self._socket.connect(check_address(address))
        except Exception:
            self.close()
            raise
        self._hello_due = True
        self._hello_s = self._heard_s = -float("inf")
        self._beat_s: float | None = None
        self._beat = Heartbeat(learner_id="", received=0, rejected=0, samples=0)
        self._learner_id = ""
        self._version = 0
        self._sent = self._dropped = self._rejected = self._restarts = 0

    def poll(self) -> Snapshot | None:
        """Take what has arrived; return the newest valid snapshot if there is a new one. Never blocks."""
        newest: Snapshot | None = None
        for _ in range(MESSAGES_PER_POLL):
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            try:
                newest = self._take(decode(data)) or newest
            except ProtocolError as error:
                self._rejected += 1
                logger.debug("rejected a message of the learner: %s", error)
        self._greet()
        return newest

    def send(self, iteration: Iteration) -> bool:
        """Send what an iteration took. False, and counted, if the learner is away or behind. Never blocks.

        The candidates stay here: they belong in the record file, and the learner learns from what was run.
        """
        self._greet()
        try:
            slim = msgspec.structs.replace(iteration, candidates=None, decision=-1)
            self._socket.send(encode(slim), zmq.NOBLOCK)
        except (zmq.ZMQError, ProtocolError):
            self._dropped += 1
            return False
        self._sent += 1
        return True

    @property
    def stats(self) -> ClientStats:
        return ClientStats(
            sent=self._sent,
            dropped=self._dropped,
            rejected=self._rejected,
            restarts=self._restarts,
            last_heartbeat_age_s=None if self._beat_s is None else self._clock() - self._beat_s,
            learner_id=self._learner_id,
            snapshot_version=self._version,
            learner_received=self._beat.received,
            learner_rejected=self._beat.rejected,
            learner_samples=self._beat.samples,
        )

    def close(self) -> None:
        """Drop what is still queued and release the socket. May be called twice."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> LearnerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, message: Message) -> Snapshot | None:
        """Note what a checked message says; return its snapshot if that is to be used from now on."""
        if isinstance(message, SnapshotMessage):
            snapshot = message.snapshot
            if snapshot.key != self._key:
                raise ProtocolError(f"a snapshot for {snapshot.key!r}")
            self._heard_from(snapshot.learner_id)
            if snapshot.version == self._version:
                return None  # sent again after a second Hello
            if snapshot.version < self._version:
                raise ProtocolError(f"version {snapshot.version} after {self._version}")
            self._version = snapshot.version
            return snapshot
        if isinstance(message, Heartbeat):
            self._heard_from(message.learner_id)
            self._beat, self._beat_s = message, self._clock()
        elif isinstance(message, WhoAreYou):
            self._heard_from(message.learner_id)
            self._hello_due = True
        else:
            raise ProtocolError(f"{type(message).__name__} is not for a scheduler")
        return None

    def _heard_from(self, learner_id: str) -> None:
        self._heard_s = self._clock()
        if learner_id == self._learner_id:
            return
        if self._learner_id:
            self._restarts += 1
            self._hello_due = True
        self._learner_id = learner_id
        self._version = 0  # versions are compared within one learner; a restored one continues above its own anyway

    def _greet(self) -> None:
        """Say Hello if the learner may not know us."""
        now = self._clock()
        if now - self._heard_s > SILENCE_S:
            self._hello_due = True
        if self._hello_due and now - self._hello_s >= HELLO_INTERVAL_S:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(self._hello, zmq.NOBLOCK)
                self._hello_due = False
                self._hello_s = now
