"""What schedulers and the learner say to each other: tagged msgspec structs in msgpack, one a message.

A scheduler sends a :class:`~learner.records.Header` inside :class:`Hello`, then one
:class:`~learner.records.Iteration` per iteration. The learner answers with :class:`SnapshotMessage`,
:class:`Heartbeat` and, to a peer that it does not know, :class:`WhoAreYou`.

Everything that arrives is checked here before anybody uses it. :func:`decode` raises :class:`ProtocolError` and
nothing else, whatever the bytes are.
"""

from __future__ import annotations

import msgspec

from learner.checks import InvalidRecordError, check_header, check_iteration
from learner.records import Header, Iteration
from learner.snapshot import Snapshot

MAX_MESSAGE_BYTES = 4 << 20


class ProtocolError(ValueError):
    """A message is malformed, too large, or says something that cannot be."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A scheduler introduces itself: what all its iterations have in common."""

    header: Header


class WhoAreYou(msgspec.Struct, frozen=True, kw_only=True, tag="who_are_you"):
    """The learner does not know the peer, usually because it has just been restarted; the answer is a Hello."""

    learner_id: str


class SnapshotMessage(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """A newly learnt model."""

    snapshot: Snapshot


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent once a second to every peer.

    ``received`` counts the iterations that this learner took, ``rejected`` the messages that it refused and the steps
    with absurd timings, both over all peers; ``samples`` is what the peer's own model has learnt from.
    """

    learner_id: str
    received: int
    rejected: int
    samples: int


Message = Hello | Iteration | WhoAreYou | SnapshotMessage | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

_MAX_NAME_CHARACTERS = 128
_MAX_COUNT = 2**62


def encode(message: Message) -> bytes:
    """Return the bytes of ``message``. Raises :class:`ProtocolError` if they exceed the size limit.

    Values are not checked: the receiver checks them, and the sender is in a hurry.
    """
    try:
        data = _encoder.encode(message)
    except (OverflowError, TypeError, ValueError) as error:
        raise ProtocolError(f"cannot be encoded: {error}") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """Return the checked message in ``data``. Raises :class:`ProtocolError`, and nothing else, if there is none."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        message = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise ProtocolError(f"not a message: {error}") from None
    _check(message)
    return message


def _check(message: Message) -> None:
    try:
        if isinstance(message, Iteration):
            check_iteration(message)
        elif isinstance(message, Hello):
            check_header(message.header)
        elif isinstance(message, SnapshotMessage):
            _check_name("learner_id", message.snapshot.learner_id)
            message.snapshot.validate()
        else:
            _check_name("learner_id", message.learner_id)
            if isinstance(message, Heartbeat):
                _check_counts(message)
    except InvalidRecordError as error:
        raise ProtocolError(str(error)) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"{type(message).__name__}: {error}") from None


def _check_name(what: str, name: str) -> None:
    if not 0 < len(name) <= _MAX_NAME_CHARACTERS:
        raise ProtocolError(f"{what} has {len(name)} characters; 1 to {_MAX_NAME_CHARACTERS} are allowed")


def _check_counts(message: Heartbeat) -> None:
    for what in ("received", "rejected", "samples"):
        if not 0 <= getattr(message, what) <= _MAX_COUNT:
            raise ProtocolError(f"{what} is {getattr(message, what)}")
