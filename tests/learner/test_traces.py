from __future__ import annotations

import gzip
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.traces import (
    TraceError,
    TraceRequest,
    at_rate,
    cap_lengths,
    poisson,
    read_azure,
    read_mooncake,
    read_trace,
    scale_lengths,
    scale_rate,
    take,
)

SAMPLE = Path(__file__).parents[2] / "bench" / "data" / "azure_code_sample.csv"

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799600,110,27
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1200, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 4000, "input_length": 600, "output_length": 3, "hash_ids": [0, 9]}

"""

traces = st.lists(
    st.builds(TraceRequest, st.floats(0, 1e4), st.integers(1, 100_000), st.integers(1, 5_000)), min_size=1, max_size=20
).map(lambda trace: take(sorted(trace, key=lambda request: request.arrival_s)))


def file(tmp_path: Path, text: str, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def test_azure(tmp_path: Path) -> None:
    path = file(tmp_path, AZURE)
    trace = read_azure(path)
    assert [round(request.arrival_s, 6) for request in trace] == [0.0, 0.052, 60.0]
    assert [(request.input_tokens, request.output_tokens) for request in trace] == [(4808, 10), (3180, 8), (110, 27)]
    assert read_trace(path) == trace
    assert read_trace(path, limit=2) == trace[:2]


@pytest.mark.parametrize("end", ["\r\n", "\n"])
@pytest.mark.parametrize("time", ["2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:00", "2024-05-10T00:00:00.5"])
def test_azure_timestamps_of_both_years(tmp_path: Path, time: str, end: str) -> None:
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens{end}2024-05-10 00:00:00,1,1{end}{time},2162,5{end}"
    arrival = {"2024-05-10 00:00:00": 0.0, "2024-05-10T00:00:00.5": 0.5}.get(time, 0.00993)
    assert read_trace(file(tmp_path, text))[1].arrival_s == pytest.approx(arrival, abs=1e-6)


def test_mooncake(tmp_path: Path) -> None:
    expected = [TraceRequest(0.0, 1200, 500, (0, 1, 2)), TraceRequest(3.0, 600, 3, (0, 9))]
    assert read_mooncake(file(tmp_path, MOONCAKE)) == expected
    assert read_trace(file(tmp_path, MOONCAKE)) == expected


def test_gz(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))
    assert read_trace(path) == read_trace(file(tmp_path, AZURE))


def test_out_of_order_rows_are_sorted(tmp_path: Path) -> None:
    lines = AZURE.splitlines(keepends=True)
    swapped = file(tmp_path, lines[0] + lines[3] + lines[1] + lines[2])
    assert read_trace(swapped) == read_trace(file(tmp_path, AZURE, "other"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "neither"),
        ("hello\n", "neither"),
        ("TIMESTAMP,Context\n", "columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        (AZURE + "yesterday,1,2\n", "line 5"),
        (AZURE + "2023-11-16 18:18:04,1\n", "line 5"),
        (AZURE + "2023-11-16 18:18:04,many,2\n", "line 5"),
        (AZURE + "2023-11-16 18:18:04,-4,2\n", "-4 input tokens"),
        (AZURE + "2023-11-16 18:18:04,4,99999999999\n", "99999999999 output tokens"),
        (MOONCAKE + "{}\n", "line 4"),
        (MOONCAKE + '{"timestamp": "x", "input_length": 1, "output_length": 1}\n', "line 4"),
    ],
)
def test_errors_name_the_place(tmp_path: Path, text: str, why: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(TraceError, match=why) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_the_sample_is_the_head_of_the_public_trace() -> None:
    trace = read_trace(SAMPLE)
    assert len(trace) == 300
    assert trace[0] == TraceRequest(0.0, 4808, 10)
    assert (trace[-1].input_tokens, trace[-1].output_tokens) == (176, 88)
    assert trace[-1].arrival_s == pytest.approx(216.838, abs=1e-3)


@given(traces, st.floats(0.1, 10))
def test_scale_rate_changes_arrivals_only(trace: list[TraceRequest], factor: float) -> None:
    scaled = scale_rate(trace, factor)
    for before, after in zip(trace, scaled, strict=True):
        assert after.arrival_s * factor == pytest.approx(before.arrival_s)
        assert (after.input_tokens, after.output_tokens) == (before.input_tokens, before.output_tokens)


@given(traces, st.floats(0.1, 100))
def test_at_rate_reaches_the_rate(trace: list[TraceRequest], rate: float) -> None:
    scaled = at_rate(trace, rate)
    span_s = scaled[-1].arrival_s
    if trace[-1].arrival_s >= 1e-6:
        assert (len(scaled) - 1) / span_s == pytest.approx(rate)
    else:
        assert scaled == trace


@given(traces, st.integers(0, 5))
def test_poisson_arrivals_are_those_of_their_seed_and_in_order(trace: list[TraceRequest], seed: int) -> None:
    arriving = poisson(trace, seed)
    assert arriving == poisson(trace, seed)
    assert [replace(request, arrival_s=0.0) for request in arriving] == [
        replace(request, arrival_s=0.0) for request in trace
    ]
    times = [request.arrival_s for request in arriving]
    assert times[:1] in ([], [0.0])
    assert times == sorted(set(times))


def test_poisson_arrivals_come_one_a_second_on_average() -> None:
    times = [request.arrival_s for request in poisson([TraceRequest(0.0, 1, 1)] * 4000)]
    assert times[-1] == pytest.approx(3999, rel=0.05)


@given(traces, st.floats(0.01, 3), st.floats(0.01, 3))
def test_scaled_lengths_stay_requests(trace: list[TraceRequest], by_in: float, by_out: float) -> None:
    for before, after in zip(trace, scale_lengths(trace, by_in, by_out), strict=True):
        assert after.arrival_s == before.arrival_s
        assert after.input_tokens >= 1
        assert abs(after.input_tokens - before.input_tokens * by_in) <= 1.0
        assert abs(after.output_tokens - before.output_tokens * by_out) <= 1.0


@given(traces, st.integers(1, 10_000), st.integers(1, 100))
def test_capped_lengths_obey_the_caps(trace: list[TraceRequest], most_in: int, most_out: int) -> None:
    for before, after in zip(trace, cap_lengths(trace, input_tokens=most_in, output_tokens=most_out), strict=True):
        assert after.input_tokens == min(before.input_tokens, most_in)
        assert after.output_tokens == min(before.output_tokens, most_out)


@given(traces, st.floats(0, 1e4), st.floats(0, 1e4))
def test_take_slices_by_arrival(trace: list[TraceRequest], start_s: float, end_s: float) -> None:
    taken = take(trace, start_s=start_s, end_s=end_s)
    assert len(taken) == sum(start_s <= request.arrival_s < end_s for request in trace)
    assert not taken or taken[0].arrival_s == 0.0


def test_blocks_follow_the_prompt() -> None:
    trace = [TraceRequest(0.0, 1200, 5, (7, 8, 9))]
    assert cap_lengths(trace, input_tokens=513, output_tokens=5)[0].block_ids == (7, 8)
    assert cap_lengths(trace, input_tokens=5000, output_tokens=5)[0].block_ids == (7, 8, 9)
    assert scale_lengths(trace, 0.5, 1.0)[0].block_ids == ()
    assert scale_lengths(trace, 1.0, 0.5)[0].block_ids == (7, 8, 9)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_factors_must_be_positive(factor: float) -> None:
    for scale in (lambda: scale_rate([], factor), lambda: at_rate([], factor), lambda: scale_lengths([], 1.0, factor)):
        with pytest.raises(ValueError, match="positive"):
            scale()
