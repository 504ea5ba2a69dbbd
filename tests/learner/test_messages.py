from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.checks import MAX_REQUESTS
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
from learner.records import Iteration, StreamRecord
from learner.snapshot import Snapshot
from tests.learner.generated import header, iteration, messages, stream

DECODE = stream("decode", [1, 1], [100, 200], [0.01, 0.01])
GOOD = iteration(1, DECODE)


@given(messages)
def test_decode_inverts_encode(message: Message) -> None:
    assert decode(encode(message)) == message


@given(messages, st.data())
@settings(max_examples=300)
def test_mutated_bytes_raise_nothing_but_protocol_error(message: Message, data: st.DataObject) -> None:
    mutated = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1)) if mutated else 0
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "delete"]))
        if kind == "insert":
            mutated[at:at] = data.draw(st.binary(max_size=9))
        elif kind == "cut":
            del mutated[at:]
        elif mutated and kind == "flip":
            mutated[at] = data.draw(st.integers(0, 255))
        elif mutated:
            del mutated[at]
    assert_decodes_or_refuses(bytes(mutated))


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_protocol_error(data: bytes) -> None:
    assert_decodes_or_refuses(data)


def assert_decodes_or_refuses(data: bytes) -> None:
    try:
        message = decode(data)
    except ProtocolError:
        return
    # Whatever passes is a sound message: it survives a round trip and its numbers are finite.
    assert decode(encode(message)) == message
    if isinstance(message, Iteration):
        assert all(math.isfinite(end) and end >= 0 for one in message.streams for end in one.step_end_s)


def test_many_mutations_of_real_messages() -> None:
    """More of the same, without hypothesis' overhead: 20,000 mutants of each kind of message."""
    rng = random.Random(1)
    refused = 0
    for message in (GOOD, Hello(header=header()), WhoAreYou(learner_id="x")):
        data = encode(message)
        for _ in range(20_000 // 3):
            mutant = bytearray(data)
            for _ in range(rng.randint(1, 8)):
                mutant[rng.randrange(len(mutant))] = rng.randrange(256)
            try:
                decode(bytes(mutant))
            except ProtocolError:
                refused += 1
    assert refused > 5_000


def with_stream(**changes: object) -> Iteration:
    return msgspec.structs.replace(GOOD, streams=[msgspec.structs.replace(DECODE, **changes)])


def with_iteration(**changes: object) -> Iteration:
    return msgspec.structs.replace(GOOD, **changes)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (with_stream(step_end_s=[0.01, math.nan]), "step_end_s is nan"),
        (with_stream(step_start_s=[0.0, math.inf]), "step_start_s is inf"),
        (with_stream(step_start_s=[-0.5, 0.0]), "step_start_s is -0.5"),
        (with_stream(predicted_s=[1e300, 1e300]), "predicted_s"),
        (with_stream(upper_s=[0.1]), "upper_s has 1 entries where 2"),
        (with_stream(roofline_s=[]), "roofline_s has 0 entries"),
        (with_stream(c=[1]), "c has 1 entries where 2"),
        (with_stream(q=[-1, 1]), "q is -1"),
        (with_stream(c=[0, 2**31]), "c is 2147483648"),
        (with_stream(tpcs=0), "tpcs is 0"),
        (with_stream(phase="sideways"), "phase is 'sideways'"),
        (with_stream(logits_rows=-3), "logits_rows is -3"),
        (with_stream(q=[1] * (MAX_REQUESTS + 1), c=[1] * (MAX_REQUESTS + 1)), "requests in a stream"),
        (with_iteration(streams=[DECODE] * 17), "17 streams"),
        (with_iteration(time_s=math.nan), "time_s is nan"),
        (with_iteration(host_overhead_s=-1e-3), "host_overhead_s is -0.001"),
        (with_iteration(tbt_slo_s=math.inf), "tbt_slo_s is inf"),
        (with_iteration(model_version=-1), "model_version is -1"),
        (with_iteration(schema=2), "schema 2 is not supported"),
        (with_iteration(decision=-2), "decision is -2"),
        (with_iteration(reason="x" * 1000), "reason has 1000 characters"),
        (Hello(header=header(tbt_slo_s=-1.0)), "tbt_slo_s is -1.0"),
        (Hello(header=header(name="x" * 300)), "model.name has 300 characters"),
        (Hello(header=header(schema=9)), "schema 9"),
        (Hello(header=header(tp=0)), "tp is 0"),
        (Hello(header=header(versions={str(n): "" for n in range(1000)})), "versions has 1000 entries"),
        (WhoAreYou(learner_id=""), "learner_id has 0 characters"),
        (WhoAreYou(learner_id="x" * 1000), "learner_id has 1000 characters"),
        (Heartbeat(learner_id="x", received=-1, rejected=0, samples=0), "received is -1"),
    ],
)
def test_impossible_values_are_refused_by_name(bad: Message, named: str) -> None:
    with pytest.raises(ProtocolError, match=named.replace("(", r"\(")):
        decode(encode(bad))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: msgspec.structs.replace(s, coefficients=[math.nan] * len(s.coefficients)),
        lambda s: msgspec.structs.replace(s, margin=s.margin[:-1]),
        lambda s: msgspec.structs.replace(s, version=-1),
        lambda s: msgspec.structs.replace(s, learner_id=""),
    ],
)
def test_a_lying_snapshot_is_refused(spoil: Callable[[Snapshot], Snapshot]) -> None:
    good = msgspec.structs.replace(Snapshot.roofline(), version=1, learner_id="x")
    assert decode(encode(SnapshotMessage(snapshot=good))) == SnapshotMessage(snapshot=good)
    with pytest.raises(ProtocolError):
        decode(encode(SnapshotMessage(snapshot=spoil(good))))


def test_a_step_that_ends_before_it_starts_is_the_estimators_business() -> None:
    backwards = with_stream(step_start_s=[0.0, 0.5], step_end_s=[0.1, 0.2])
    assert decode(encode(backwards)) == backwards


def test_size_limit_holds_both_ways() -> None:
    endless = with_stream(q=[2**30] * 600_000, c=[2**30] * 600_000)
    with pytest.raises(ProtocolError, match="the limit is"):
        encode(endless)
    with pytest.raises(ProtocolError, match="the limit is"):
        decode(b"\0" * (MAX_MESSAGE_BYTES + 1))


def test_claimed_lengths_reserve_no_memory() -> None:
    """An array header that promises four billion entries, and a nest that is deeper than any stack."""
    start = b"\x82\xa4type\xa9iteration\xa7streams"
    for bomb in (b"\xdd\xff\xff\xff\xff", b"\x91" * 1_000_000, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            decode(start + bomb)
        with pytest.raises(ProtocolError):
            decode(b"\x82\xa4type\xa9iteration\xa7unknown" + bomb)


def test_stream_with_a_usual_batch_is_small() -> None:
    full: StreamRecord = stream("decode", [1] * 256, [30_000] * 256, [0.01] * 8)
    assert len(encode(iteration(1, full))) < 4_000
