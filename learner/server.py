"""The learner's loop: take timings from schedulers, learn, publish snapshots. One thread, one ROUTER socket."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import zmq

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
from learner.pool import EstimatorPool
from learner.records import Header, Iteration

logger = logging.getLogger(__name__)

MAX_PEERS = 256
HEARTBEAT_S = 1.0
SAVE_S = 10.0
MESSAGES_PER_TURN = 256

# A peer may have this many messages waiting, in either direction, before more of them are dropped.
QUEUE_FROM_PEER = 256
QUEUE_TO_PEER = 16


@dataclass(slots=True)
class Peer:
    """A scheduler that said Hello: what it runs, the model that learns it, and the newest version it was sent."""

    header: Header
    model: str
    sent_version: int = 0


@dataclass(slots=True)
class Counts:
    """Messages since the start of the process, over all peers: iterations taken, refused, and from unknown peers."""

    received: int = 0
    rejected: int = 0
    unknown: int = 0


def bound_socket(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """Return a ROUTER socket bound at ``address``, with small queues and a limit on message sizes."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, QUEUE_FROM_PEER)
    socket.setsockopt(zmq.SNDHWM, QUEUE_TO_PEER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # Report a vanished peer instead of dropping what is sent to it, so that it can be forgotten.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # NOTE: not ZMQ's own heartbeats: libzmq 4.3 aborts the process when one is due on a connection whose peer has gone
    # while its queue was full (stream_engine_base.cpp: !_io_error). TCP can find out by itself.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


class LearnerServer:
    """Dispatches messages to an :class:`~learner.pool.EstimatorPool` and what was learnt back to the peers."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        pool: EstimatorPool,
        learner_id: str,
        *,
        save_interval_s: float = SAVE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = socket
        self._pool = pool
        self._learner_id = learner_id
        self._save_interval_s = save_interval_s
        self._clock = clock
        self._peers: OrderedDict[bytes, Peer] = OrderedDict()
        self._asked: set[bytes] = set()
        self.counts = Counts()

    def run(self, stop: Callable[[], bool], watch_fd: int | None = None) -> str:
        """Serve until ``stop()`` is true or ``watch_fd`` reaches its end; return which. Saves before it returns."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if watch_fd is not None:
            poller.register(watch_fd, zmq.POLLIN)
        beat_s = save_s = self._clock()
        try:
            while not stop():
                ready = dict(poller.poll(int(1e3 * HEARTBEAT_S / 4)))
                if watch_fd is not None and watch_fd in ready and _at_end(watch_fd):
                    return "the parent is gone"
                if self._socket in ready:
                    self.take(MESSAGES_PER_TURN)
                self._refit()
                now = self._clock()
                if now - beat_s >= HEARTBEAT_S:
                    beat_s = now
                    self._beat()
                if now - save_s >= self._save_interval_s:
                    save_s = now
                    self._pool.save()
            return "told to stop"
        finally:
            self._pool.close()

    def take(self, limit: int) -> None:
        """Handle up to ``limit`` messages that are waiting."""
        for _ in range(limit):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"a message of {len(frames)} parts; one is expected")
                self._handle(identity, decode(frames[0]))
            except ProtocolError as error:
                self.counts.rejected += 1
                logger.warning("rejected: %s", error)
            except Exception as error:  # a message that passed every check must still not be able to stop the learner
                self.counts.rejected += 1
                logger.error("a message could not be handled: %s: %s", type(error).__name__, error)

    def _handle(self, identity: bytes, message: Message) -> None:
        if isinstance(message, Hello):
            self._welcome(identity, message.header)
        elif isinstance(message, Iteration):
            peer = self._peers.get(identity)
            if peer is None:
                self.counts.unknown += 1
                self._ask(identity)
                return
            self._peers.move_to_end(identity)
            model = self._pool.get(peer.model) or self._pool.open(peer.header)
            self._pool.observe(model, message)
            self.counts.received += 1
        else:
            raise ProtocolError(f"{type(message).__name__} is not for a learner")

    def _welcome(self, identity: bytes, header: Header) -> None:
        self._asked.discard(identity)
        model = self._pool.open(header)
        if identity not in self._peers:
            logger.info("a scheduler says hello: %s", header.key)
        self._peers[identity] = Peer(header, model.name)
        self._peers.move_to_end(identity)
        while len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)
        self._publish(identity)
        self._send_heartbeat(identity)

    def _ask(self, identity: bytes) -> None:
        # Once per heartbeat and peer: it may have a queue full of iterations on the way.
        if identity in self._asked:
            return
        if len(self._asked) >= MAX_PEERS:
            self._asked.clear()
        self._asked.add(identity)
        self._send(identity, WhoAreYou(learner_id=self._learner_id))

    def _refit(self) -> None:
        model = self._pool.refit()
        if model is not None:
            for identity in [identity for identity, peer in self._peers.items() if peer.model == model.name]:
                self._publish(identity)

    def _beat(self) -> None:
        self._asked.clear()
        for identity in list(self._peers):
            # A snapshot that did not fit into the peer's queue when it was new is sent again here.
            self._publish(identity)
            self._send_heartbeat(identity)

    def _publish(self, identity: bytes) -> None:
        peer = self._peers.get(identity)
        if peer is None:
            return
        model = self._pool.get(peer.model)
        snapshot = model.snapshot if model is not None else None
        if snapshot is None or snapshot.version <= peer.sent_version:
            return
        if self._send(identity, SnapshotMessage(snapshot=snapshot)):
            peer.sent_version = snapshot.version

    def _send_heartbeat(self, identity: bytes) -> None:
        peer = self._peers.get(identity)
        if peer is not None:
            model = self._pool.get(peer.model)
            beat = Heartbeat(
                learner_id=self._learner_id,
                received=self.counts.received,
                rejected=self.rejected,
                samples=model.samples if model is not None else 0,
            )
            self._send(identity, beat)

    def _send(self, identity: bytes, message: Message) -> bool:
        try:
            self._socket.send_multipart((identity, encode(message)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                logger.warning("cannot send: %s", error)
            if self._peers.pop(identity, None) is not None:
                logger.info("a scheduler has gone; %d left", len(self._peers))
            return False
        except ProtocolError as error:
            logger.error("cannot send: %s", error)
            return False
        return True

    @property
    def rejected(self) -> int:
        """Messages that were refused and steps with absurd timings."""
        return self.counts.rejected + self._pool.rejected_steps


def _at_end(fd: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, 4096) == b""
    return False
