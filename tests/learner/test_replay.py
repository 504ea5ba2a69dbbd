from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner import cli
from learner.accuracy import accuracy
from learner.persistence import Persistence
from learner.record_file import RecordWriter
from learner.records import Iteration
from learner.replay import PREDICTORS, ReplayError, ReplayReport, Steps, replay, windows
from learner.samples import Forward, Sample
from tests.learner.generated import header, iteration, stream
from tests.learner.workload import workload

positive = st.floats(1e-6, 1e3)


@pytest.fixture(scope="module")
def recorded() -> list[Iteration]:
    """The live predictions are the roofline's, then claimed to be a snapshot's in the second half."""
    return [*workload(200, noise=0.02), *workload(160, noise=0.02, first=200, seed=1, version=7)]


@pytest.fixture(scope="module")
def replayed(recorded: list[Iteration]) -> tuple[ReplayReport, Steps]:
    return replay(header(), recorded)


@given(st.lists(st.tuples(positive, positive, positive), min_size=1, max_size=30))
def test_accuracy_against_plain_arithmetic(rows: list[tuple[float, float, float]]) -> None:
    predicted, measured, upper = (np.array(column) for column in zip(*rows, strict=True))
    found = accuracy(predicted, measured, upper)
    errors = sorted(abs(p - m) / m * 100 for p, m, _ in rows)
    assert found.steps == len(rows)
    assert found.mape_pct == pytest.approx(sum(errors) / len(rows))
    assert found.max_ape_pct == pytest.approx(errors[-1])
    rising = [errors[0], found.p50_ape_pct, found.p90_ape_pct, found.p99_ape_pct, errors[-1]]
    assert all(low <= high * (1 + 1e-9) for low, high in itertools.pairwise(rising))
    assert found.p50_ape_pct == pytest.approx(statistics.median(errors))
    assert found.under_estimate_share == sum(p < m for p, m, _ in rows) / len(rows)
    assert found.coverage == sum(m <= u for _, m, u in rows) / len(rows)
    assert accuracy(predicted, measured).coverage is None
    assert abs(found.bias_pct) <= found.mape_pct * (1 + 1e-9)


def sample(q: list[int], c: list[int], took: float, tpcs: int = 1, beside: Forward | None = None) -> Sample:
    return Sample(np.array(q), np.array(c), len(q), tpcs, beside, took, 0, 0)


def test_persistence_repeats_the_last_time_of_the_same_batch() -> None:
    baseline = Persistence()
    batch = sample([1, 1], [10, 20], 0.5)
    assert baseline.predict("decode", batch) is None
    for took in (0.5, 0.7, 0.6):
        baseline.observe("decode", batch._replace(measured_s=took))
    assert baseline.predict("decode", batch) == 0.6
    assert baseline.predict("prefill", batch) is None
    beside = Forward(np.array([64]), np.array([0]), 1, 1)
    assert baseline.predict("decode", batch._replace(beside=beside)) is None


def test_persistence_takes_the_nearest_in_doublings() -> None:
    baseline = Persistence()
    for tokens in (16, 64, 256, 1024):
        baseline.observe("prefill", sample([tokens], [0], tokens / 1000))
    for tokens, nearest in ((1, 16), (20, 16), (33, 64), (100, 64), (200, 256), (100_000, 1024)):
        assert baseline.predict("prefill", sample([tokens], [0], 0.0)) == nearest / 1000
    baseline.observe("prefill", sample([100], [0], 9.0, tpcs=60))
    assert baseline.predict("prefill", sample([100], [0], 0.0)) == 0.064


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 8))
def test_persistence_remembers_the_newest(contexts: list[int], memory: int) -> None:
    baseline = Persistence(memory)
    for number, context in enumerate(contexts):
        baseline.observe("decode", sample([1], [context], float(number)))
    kept = list(enumerate(contexts))[-memory:]
    for number, context in kept:
        last = max(n for n, c in kept if c == context)
        assert baseline.predict("decode", sample([1], [context], 0.0)) == last
        assert number >= len(contexts) - memory


def test_the_learner_beats_what_stands_beside_it(replayed: tuple[ReplayReport, Steps]) -> None:
    report, steps = replayed
    assert report.iterations == 360
    assert report.refits > 0
    assert report.judged_steps == len(steps) == report.total.steps
    assert report.unusable_steps == 0
    late = {who: report.second_half.by_predictor[who].mape_pct for who in PREDICTORS}
    assert late["learner"] < late["roofline"] / 2
    assert late["learner"] < late["persistence"]
    assert late["learner"] < 10.0
    assert late["roofline"] > 40.0
    coverage = report.second_half.by_predictor["learner"].coverage
    assert coverage is not None
    assert coverage > 0.9
    assert report.total.by_predictor["roofline"].coverage is None


def test_live_predictions_are_those_of_the_record(
    replayed: tuple[ReplayReport, Steps], recorded: list[Iteration]
) -> None:
    report, steps = replayed
    assert report.last_live_version == 7
    assert report.live_learnt is not None
    assert report.live_learnt.steps == int((steps.version > 0).sum())
    logged = [value for one in recorded for each in one.streams for value in each.predicted_s]
    assert set(steps.live_s.tolist()) <= set(logged)
    # The made-up server predicted with the roofline, so live and roofline agree.
    assert report.total.by_predictor["live"].mape_pct == pytest.approx(report.total.by_predictor["roofline"].mape_pct)


def test_groups_and_windows_partition_the_steps(replayed: tuple[ReplayReport, Steps]) -> None:
    report, steps = replayed
    total = report.total.steps
    assert {group.name for group in report.phases} == {"prefill", "decode", "mixed"}
    assert {group.name for group in report.modes} == {"temporal", "spatial"}
    for parts in (report.phases, report.modes, [report.first_half, report.second_half], report.windows):
        assert sum(part.steps for part in parts) == total
    for who in PREDICTORS:
        weighed = sum(window.steps * window.mape_pct[who] for window in report.windows) / total
        assert weighed == pytest.approx(report.total.by_predictor[who].mape_pct)
    starts = [window.start_s for window in report.windows]
    assert starts == sorted(starts)
    assert len(windows(steps, 7)) == 7
    assert len(windows(steps.where(np.arange(total) < 3))) == 3


def test_replay_is_repeatable(recorded: list[Iteration], replayed: tuple[ReplayReport, Steps]) -> None:
    """And nothing is learnt before it is predicted: what comes later cannot change an earlier prediction."""
    again, head = replay(header(), recorded[:100])
    assert again == replay(header(), recorded[:100])[0]
    _, whole = replayed
    for name in ("learner_s", "learner_upper_s", "persistence_s", "roofline_s"):
        np.testing.assert_array_equal(getattr(head, name), getattr(whole, name)[: len(head)])


def test_impossible_timings_are_left_out_and_counted() -> None:
    def records() -> list[Iteration]:
        good = list(workload(60))
        bad = [
            iteration(n, stream("decode", [1], [5], [took], [0.01]))
            for n, took in enumerate((math.nan, -1.0, 0.0, 1e5))
        ]
        empty = [iteration(9), iteration(10, stream("decode", [1], [5], []))]
        return [one for pair in zip(good, [*bad, *empty] * 10, strict=True) for one in pair]

    report, steps = replay(header(), records())
    assert report.iterations == 120
    assert report.unusable_steps == 40
    assert report.judged_steps + report.unjudged_steps == sum(
        len(each.step_end_s) for one in workload(60) for each in one.streams
    )
    assert np.isfinite(steps.learner_s).all()


@pytest.mark.parametrize("records", [[], [iteration(1)], [iteration(1, stream("decode", [1], [5], [0.1]))]])
def test_a_record_with_nothing_to_judge(records: list[Iteration]) -> None:
    with pytest.raises(ReplayError):
        replay(header(), records)


def test_command(tmp_path: Path, recorded: list[Iteration], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.jsonl.gz"
    with RecordWriter(path, header()) as writer:
        for one in recorded[:120]:
            writer.write(one)
    page, figures = tmp_path / "r.html", tmp_path / "r.json"
    assert cli.replay([str(path), "--html", str(page), "--json", str(figures)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in ("learner", "roofline", "persistence", "live", "MAPE", "decode", "spatial", "first half", "P99"):
        assert word in out
    found = msgspec.json.decode(figures.read_bytes())
    assert found["iterations"] == 120
    assert found["second_half"]["by_predictor"]["learner"]["mape_pct"] > 0
    assert found["header"]["model"]["name"] == "tiny"
    assert "data:image/png;base64," in page.read_text()


def test_command_on_a_cut_record_says_so(
    tmp_path: Path, recorded: list[Iteration], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    with RecordWriter(path, header()) as writer:
        for one in recorded[:50]:
            writer.write(one)
    path.write_bytes(path.read_bytes()[:-30])
    assert cli.replay([str(path)]) == 0
    assert "ends in the middle of a line" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "arguments", "named"),
    [
        (None, [], "No such file"),
        (b"", [], "is empty"),
        (b"{}\n", [], "line 1"),
        (b"\x00\xff", [], "line 1"),
        ("header", [], "fewer than two steps"),
        ("header", ["--html", "/nonexistent/r.html"], "/nonexistent/r.html"),
        ("header", ["--json", "/nonexistent/r.json"], "/nonexistent/r.json"),
    ],
)
def test_command_errors_are_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | str | None,
    arguments: list[str],
    named: str,
) -> None:
    path = tmp_path / "r.jsonl"
    if content == "header":
        RecordWriter(path, header()).close()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    assert cli.replay([str(path), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("conflux replay: error: ")
    assert named in line
