"""Look-ahead windows seen from outside: how their tokens reach the client."""

from __future__ import annotations

import threading
import time

import pytest

from learner.record_file import RecordReader
from tests.servers import Server
from tests.serving import workload
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.server, pytest.mark.quiet]

SPATIAL = ("--conflux-mode", "spatial", "--conflux-max-look-ahead", "8")


@pytest.fixture(scope="module")
def spatial(tmp_path_factory):
    """A model whose decode step takes tens of milliseconds, so that gaps stand above a client's noise."""
    folder = tmp_path_factory.mktemp("spatial")
    record = folder / "record.jsonl"
    model = make_tiny_model(layers=4, hidden=1024, heads=8, kv_heads=4, head_dim=128, intermediate=3072)
    args = (*SPATIAL, "--chunked-prefill-size", "64", "--disable-radix-cache")
    state = ("--conflux-state-dir", str(folder), "--conflux-record", str(record), "--conflux-learner", "off")
    with Server(model, backend="conflux", max_total_tokens=8000, args=(*args, *state)) as server:
        yield server, record


def test_every_token_is_an_event_of_its_own_in_its_own_time(spatial):
    """No bursts: a token follows the one before after at least half of its step's measured time.

    A window's tokens handed over at once would come early in seven of eight cases. One in ten may: client, HTTP and
    detokenizer share two cores with the forward, and a token that they delay shortens the next gap.
    """
    server, record = spatial
    decode: list[workload.Outcome] = []

    def run() -> None:
        request = workload.Request((9, 8, 7), {"max_new_tokens": 120, "ignore_eos": True})
        decode.append(workload.one(server, request))

    began = sum(1 for _ in RecordReader(record))
    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.5)
    server.generate([11] * 700, max_new_tokens=1)
    thread.join()
    time.sleep(1.5)  # the record is flushed every half second
    outcome = decode[0]
    assert outcome.counts == list(range(1, 121))
    steps = _steps_of_the_longest(list(RecordReader(record))[began:])
    assert len(steps) >= 119  # stock's overlap may run one step past the end
    steps = steps[:119]
    assert sum(spatial for _, spatial in steps) >= 40
    gaps = [b - a for a, b in zip(outcome.arrivals_s, outcome.arrivals_s[1:], strict=False)]
    early = [(i, gap, took) for i, (gap, (took, _)) in enumerate(zip(gaps, steps, strict=True)) if gap < 0.5 * took]
    assert len(early) <= len(gaps) // 10, f"{len(early)} of {len(gaps)} tokens came early, first: {early[0]}"


def _steps_of_the_longest(iterations) -> list[tuple[float, bool]]:
    """(measured time, in a window) of each decode step of the one request that decodes all the time."""
    steps = []
    for iteration in iterations:
        for stream in iteration.streams:
            if stream.phase == "decode":
                took = [e - s for s, e in zip(stream.step_start_s, stream.step_end_s, strict=True)]
                steps += [(t, iteration.mode == "spatial") for t in took]
            elif stream.phase == "mixed":
                steps.append((stream.step_end_s[0] - stream.step_start_s[0], False))
    return steps
