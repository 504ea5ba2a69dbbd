"""The demo around its server: what it says, how it fails, and what its report holds."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import demo, serve
from bench.demo_report import Outcome, print_outcome, write_report
from bench.machine_speed import Load, MachineSpeed, ProbeError
from bench.server import ServerError
from bench.serving import server_args
from learner.record_file import RecordWriter
from learner.traces import TraceRequest
from sglang_ext.served import LoadResult, RequestResult
from tests.learner.generated import header
from tests.learner.workload import workload

SPEED = MachineSpeed(200.0, 0.1)
LOAD = Load([TraceRequest(0.0, 100, 3)] * 3, 0.05, 0.5, 20.0, 2.0, 0.25)


def outcome(folder: Path, *, iterations: int = 240, errors: list[str | None] | None = None) -> Outcome:
    record = folder / "record.jsonl"
    with RecordWriter(record, header()) as writer:
        for iteration in workload(iterations):
            assert writer.write(iteration)
    results = [
        RequestResult(i, 0.0, 0.0, 1.0, 100, 3, [0.5, 0.6, 0.9], [1, 2, 3], error)
        for i, error in enumerate(errors or [None, None, None])
    ]
    return Outcome.of(LoadResult(results, 20.0), LOAD, SPEED, record, {"mode": "auto"})


def test_the_report_holds_all_that_was_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = outcome(tmp_path)
    print_outcome(found)
    said = capsys.readouterr().out
    for wanted in ("TTFT", "TBT", "P99", "SLO attainment", "temporal", "spatial", "roofline", "persistence", "learner"):
        assert wanted in said
    assert "first half" in said
    assert "240 iterations recorded" in said
    page = write_report(found, tmp_path)
    text = page.read_text()
    assert text.count("<img") >= 3
    assert "<script" not in text
    assert "conflux demo" in text
    load = json.loads((tmp_path / "load.json").read_text())
    assert load["p99_itl_ms"] == pytest.approx(300, rel=0.05)
    assert load["machine"]["decode_step_s"] == 0.1
    accuracy = json.loads((tmp_path / "accuracy.json").read_text())
    learner, roofline = (accuracy["second_half"]["by_predictor"][who]["mape_pct"] for who in ("learner", "roofline"))
    assert learner < roofline / 2  # the record's steps take a multiple of the roofline


def test_a_record_too_short_to_judge_still_gives_a_report(tmp_path: Path) -> None:
    found = outcome(tmp_path, iterations=1)
    assert found.accuracy is None
    print_outcome(found)
    assert write_report(found, tmp_path).exists()


def test_failed_requests_are_told_from_unfinished_ones(tmp_path: Path) -> None:
    found = outcome(tmp_path, iterations=8, errors=[None, "given up at the deadline", "HTTP 500: no"])
    assert found.failures == ["HTTP 500: no"]
    assert found.unfinished == 1
    assert found.summary.completed == 1


@pytest.mark.parametrize(
    "failure", [ServerError("the server ended with exit code 2"), ProbeError("a probe request failed: HTTP 500")]
)
def test_a_failure_is_one_line_and_exit_code_1(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: demo.Options) -> None:
        raise failure

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(demo, "run", fails)
    assert demo.main([]) == 1
    assert capsys.readouterr().err == f"error: {failure}\n"
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.alarm(0) == 0


@pytest.mark.parametrize(
    ("end", "code", "said"), [(lambda: signal.raise_signal(signal.SIGTERM), 130, "interrupted"),
                              (lambda: signal.raise_signal(signal.SIGALRM), 1, "not done after")]
)  # fmt: skip
def test_the_server_is_stopped_however_the_demo_ends(
    end: Callable[[], None],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []

    class FakeServer:
        def __init__(self, args: list[str], **_: object) -> None:
            self.url, self.log = "http://nowhere", tmp_path / "log"

        def start(self, **_: object) -> None:
            calls.append("start")

        def stop(self) -> None:
            calls.append("stop")

    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    monkeypatch.setattr(demo, "demo_model", lambda: tmp_path)
    monkeypatch.setattr(demo, "ServerProcess", FakeServer)
    monkeypatch.setattr(demo, "ask", lambda *_: end())
    assert demo.main(["--out", str(tmp_path / "out")]) == code
    assert calls == ["start", "stop"]
    assert said in capsys.readouterr().err


def test_a_server_without_conflux_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_http", lambda _: {"internal_states": [{"memory": 1}]})
    with pytest.raises(demo.DemoError, match="not served by conflux"):
        demo.server_info("http://nowhere")
    monkeypatch.setattr(demo, "_http", lambda _: {"internal_states": [{"conflux": {"mode": "auto"}}]})
    assert demo.server_info("http://nowhere") == {"mode": "auto"}


def test_a_taken_port_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "port_is_free", lambda _: False)
    monkeypatch.setattr(serve, "demo_model", lambda: pytest.fail("too far"))
    assert serve.main(["--port", "30000"]) == 1
    assert capsys.readouterr().err.startswith("error: port 30000 is in use")


def test_server_arguments_suit_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.serving.serves_on_cpu", lambda: True)
    args = server_args(tmp_path, record=tmp_path / "r.jsonl", mode="temporal")
    assert args[args.index("--backend") + 1] == "conflux"
    assert args[args.index("--dtype") + 1] == "float32"
    assert args[args.index("--conflux-mode") + 1] == "temporal"
    assert args[args.index("--conflux-record") + 1] == str(tmp_path / "r.jsonl")
    monkeypatch.setattr("bench.serving.serves_on_cpu", lambda: False)
    assert "--dtype" not in server_args(tmp_path)
