"""Hypothesis strategies for every record and message, and plain examples of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import strategies as st

from learner.device import DeviceProfile
from learner.messages import Heartbeat, Hello, SnapshotMessage, WhoAreYou
from learner.records import Candidates, Header, Iteration, StreamRecord
from learner.shape import ModelShape
from learner.snapshot import Snapshot

SHAPE = ModelShape(
    name="tiny", layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, intermediate=512, vocabulary=1024
)
CPU = DeviceProfile(name="cpu", tpcs=1, flops=((1.0, 2e11),), bandwidth=((1.0, 2e10),))

MODES = ("temporal", "chunked", "spatial", "reserved")

names = st.text(max_size=20)
tokens = st.integers(0, 2**31 - 1)
seconds = st.floats(0, 1e6, allow_nan=False)


def header(name: str = "tiny", **changes: object) -> Header:
    plain = Header(created_unix_s=1.7e9, model=msgspec.structs.replace(SHAPE, name=name), device=CPU)
    return msgspec.structs.replace(plain, **changes)


def stream(
    phase: str,
    q: Sequence[int],
    c: Sequence[int],
    measured_s: Sequence[float],
    predicted_s: Sequence[float] | None = None,
    tpcs: int = 1,
) -> StreamRecord:
    """Steps of the given durations, one after the other."""
    ends, end = [], 0.0
    for took in measured_s:
        end += took
        ends.append(end)
    predicted = list(measured_s if predicted_s is None else predicted_s)
    return StreamRecord(
        phase=phase,
        tpcs=tpcs,
        q=list(q),
        c=list(c),
        logits_rows=len(q),
        step_start_s=[0.0, *ends[:-1]] if ends else [],
        step_end_s=ends,
        predicted_s=predicted,
        upper_s=[1.2 * value for value in predicted],
        roofline_s=[0.5 * value for value in predicted],
    )


def iteration(number: int, *streams: StreamRecord, mode: str = "temporal", version: int = 0) -> Iteration:
    return Iteration(
        iteration=number,
        time_s=0.1 * number,
        mode=mode,
        reason="fits",
        tbt_slo_s=0.1,
        model_version=version,
        running=sum(len(s.q) for s in streams),
        waiting=0,
        concurrent=False,
        host_overhead_s=0.001,
        candidates=None,
        decision=-1,
        streams=list(streams),
    )


@st.composite
def headers(draw: st.DrawFn) -> Header:
    points = sorted(draw(st.sets(st.integers(1, 100), min_size=1, max_size=5)))
    rates = st.floats(1.0, 1e18)
    curve = tuple((float(at), draw(rates)) for at in points)
    kv_heads = draw(st.integers(1, 8))
    return Header(
        created_unix_s=draw(st.floats(0, 1e10)),
        model=ModelShape(
            name=draw(names),
            layers=draw(st.integers(1, 200)),
            hidden=draw(st.integers(1, 20_000)),
            heads=kv_heads * draw(st.integers(1, 16)),
            kv_heads=kv_heads,
            head_dim=draw(st.integers(1, 512)),
            intermediate=draw(st.integers(1, 100_000)),
            vocabulary=draw(st.integers(1, 500_000)),
            tied_embeddings=draw(st.booleans()),
            graph_tokens=tuple(sorted(draw(st.sets(st.integers(1, 5000), max_size=4)))),
        ),
        device=DeviceProfile(
            name=draw(st.text(min_size=1, max_size=20)),
            tpcs=points[-1],
            flops=curve,
            bandwidth=curve,
            link_bandwidth=draw(st.floats(0, 1e15)),
            provenance=draw(st.dictionaries(names, names, max_size=3)),
        ),
        dtype=draw(names),
        mode=draw(names),
        versions=draw(st.dictionaries(names, names, max_size=3)),
    )


@st.composite
def streams(draw: st.DrawFn) -> StreamRecord:
    requests, steps = draw(st.integers(0, 6)), draw(st.integers(0, 4))

    def column(values: st.SearchStrategy, length: int) -> list:
        return draw(st.lists(values, min_size=length, max_size=length))

    return StreamRecord(
        phase=draw(st.sampled_from(["prefill", "decode", "mixed"])),
        tpcs=draw(st.integers(1, 100)),
        q=column(tokens, requests),
        c=column(tokens, requests),
        logits_rows=draw(st.integers(0, 100)),
        step_start_s=column(seconds, steps),
        step_end_s=column(seconds, steps),
        predicted_s=column(seconds, steps),
        upper_s=column(seconds, steps),
        roofline_s=column(seconds, steps),
    )


@st.composite
def candidates(draw: st.DrawFn) -> Candidates:
    rows = draw(st.integers(0, 5))
    kinds: dict[str, st.SearchStrategy] = {
        "mode": st.sampled_from(MODES),
        "prefill_tokens": tokens,
        "prefill_tpcs": st.integers(0, 100),
        "decode_tpcs": st.integers(0, 100),
        "look_ahead_steps": st.integers(0, 32),
        "feasible": st.booleans(),
    }
    return Candidates(
        **{
            name: draw(st.lists(kinds.get(name, seconds), min_size=rows, max_size=rows))
            for name in Candidates.__struct_fields__
        }
    )


@st.composite
def iterations(draw: st.DrawFn) -> Iteration:
    weighed = draw(st.none() | candidates())
    return Iteration(
        iteration=draw(st.integers(0, 2**40)),
        time_s=draw(st.floats(0, 1e10)),
        mode=draw(st.sampled_from(MODES)),
        reason=draw(names),
        tbt_slo_s=draw(seconds),
        model_version=draw(st.integers(0, 2**40)),
        running=draw(tokens),
        waiting=draw(tokens),
        concurrent=draw(st.booleans()),
        host_overhead_s=draw(seconds),
        candidates=weighed,
        decision=draw(st.integers(-1, len(weighed.mode) - 1)) if weighed is not None else -1,
        streams=draw(st.lists(streams(), max_size=3)),
    )


def snapshots() -> st.SearchStrategy[Snapshot]:
    return st.builds(
        lambda version, key, samples: msgspec.structs.replace(
            Snapshot.roofline(), version=version, key=key, learner_id="a", samples=samples
        ),
        st.integers(0, 2**40),
        names,
        st.integers(0, 2**40),
    )


counts = st.integers(0, 2**40)
ids = st.text(min_size=1, max_size=40)
messages = st.one_of(
    st.builds(Hello, header=headers()),
    iterations(),
    st.builds(WhoAreYou, learner_id=ids),
    st.builds(SnapshotMessage, snapshot=snapshots()),
    st.builds(Heartbeat, learner_id=ids, received=counts, rejected=counts, samples=counts),
)
