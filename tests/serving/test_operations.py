"""Operating a conflux server: live state, metrics, pause, weight update, profiler, and the death of its learner."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest
import requests

from learner.record_file import RecordReader
from tests.serving import workload

pytestmark = pytest.mark.server


def state(server) -> dict:
    return server.server_info()["internal_states"][0]["conflux"]


def eventually(check, *, within_s: float = 60.0):
    """What ``check`` returns once that is truthy."""
    deadline = time.monotonic() + within_s
    while not (found := check()):
        assert time.monotonic() < deadline, f"still not so after {within_s:g} s"
        time.sleep(0.2)
    return found


def total(server, name: str, **labels: str) -> float:
    samples = server.metrics().get(name, [])
    return sum(value for found, value in samples if labels.items() <= found.items())


def learner_pid(server) -> int:
    family = psutil.Process(server.process.pid).children(recursive=True)
    return next(p.pid for p in family if "conflux::learner" in " ".join([p.name(), *p.cmdline()]))


def test_server_info_shows_live_state(server):
    before = state(server)
    workload.run(server, workload.requests(8, seed=5))
    after = state(server)
    assert server.server_info()["conflux"] == {"mode": "auto"}
    assert after["iterations"] > before["iterations"]
    assert after["ttft_slo_met"] + after["ttft_slo_missed"] >= 8
    assert after["pool"]["total_slots"] == 20_000


def test_decisions_are_made_with_what_was_learnt(server, record_file):
    def learnt() -> bool:
        workload.run(server, workload.requests(16, seed=6))
        return state(server)["model_version"] > 0

    eventually(learnt, within_s=180)
    workload.run(server, workload.requests(8, seed=7))
    eventually(lambda: any(i.model_version > 0 for i in RecordReader(record_file)))
    record = list(RecordReader(record_file))
    assert all(stream.step_end_s[0] > stream.step_start_s[0] for i in record for stream in i.streams)
    reasons = {i.reason for i in record if not i.reason.startswith("fallback:")}
    assert reasons <= {"fits", "best", "least_violation", "idle", "explore"}
    assert any(i.candidates is not None and len(i.candidates.mode) > 1 for i in record)
    assert any(i.streams[0].phase == "mixed" for i in record)


def test_metrics_stand_beside_sglangs(server):
    workload.run(server, workload.requests(8, seed=8))
    time.sleep(1.0)
    assert total(server, "conflux:decisions_total", mode="temporal") > 0
    assert total(server, "conflux:forward_seconds_count", phase="decode") > 0
    assert total(server, "conflux:prediction_error_ratio_count") > 0
    assert total(server, "conflux:tbt_slo_tokens_total") > 0
    assert total(server, "conflux:ttft_slo_requests_total") > 0
    assert total(server, "conflux:decision_seconds_count") > 0
    assert total(server, "sglang:num_requests_total") > 0
    assert total(server, "conflux:learner_version") == state(server)["model_version"]


def test_batches_that_need_sglangs_own_path_are_counted(server):
    long = [7] * 1500
    asked = {"extra": {"return_logprob": True, "logprob_start_len": -1}}

    def decode() -> None:
        server.generate([5, 6, 7], max_new_tokens=60, ignore_eos=True, **asked)

    def counted() -> float:
        thread = threading.Thread(target=decode)
        thread.start()
        time.sleep(0.2)
        server.generate([*long, int(time.time()) % 500], max_new_tokens=2)
        thread.join()
        return total(server, "conflux:fallbacks_total", reason="logprob")

    eventually(counted)
    assert state(server)["fallbacks"]["logprob"] > 0


def test_pause_and_continue(server):
    answers: list[dict] = []
    thread = threading.Thread(
        target=lambda: answers.append(server.generate([5, 6, 7], max_new_tokens=150, ignore_eos=True))
    )
    thread.start()
    time.sleep(0.3)
    assert server.http.post(f"{server.url}/pause_generation", json={"mode": "in_place"}, timeout=30).ok
    iterations = eventually(lambda: state(server)["iterations"])
    time.sleep(1.0)
    if not answers:  # still paused in the middle
        assert state(server)["iterations"] == iterations
    assert server.http.post(f"{server.url}/continue_generation", json={}, timeout=30).ok
    thread.join(60)
    assert len(answers[0]["output_ids"]) == 150


def test_weights_can_be_updated_and_the_cache_flushed(server):
    before = server.generate([9, 8, 7, 6], max_new_tokens=12, ignore_eos=True)["output_ids"]
    path = server.server_info()["model_path"]
    answer = server.http.post(f"{server.url}/update_weights_from_disk", json={"model_path": path}, timeout=120)
    assert answer.json()["success"], answer.text
    server.flush()
    assert server.generate([9, 8, 7, 6], max_new_tokens=12, ignore_eos=True)["output_ids"] == before


def test_profiler(server, tmp_path):
    body = {"output_dir": str(tmp_path), "activities": ["CPU"]}
    assert server.http.post(f"{server.url}/start_profile", json=body, timeout=30).ok
    server.generate([5, 6], max_new_tokens=4)
    assert server.http.post(f"{server.url}/stop_profile", timeout=120).ok
    eventually(lambda: list(tmp_path.rglob("*.json.gz")))


def test_a_killed_learner_costs_no_request_and_learning_resumes(server):
    eventually(lambda: workload.run(server, workload.requests(8, seed=9)) and state(server)["model_version"] > 0)
    # Saved at intervals: what is learnt now must be on disk before the kill for "resumes from its state" to be tested.
    version, samples = state(server)["model_version"], state(server)["learner"]["samples"]
    time.sleep(6)
    restarts = state(server)["learner"]["restarts"]
    work = workload.requests(48, seed=10)
    killed = learner_pid(server)
    timer = threading.Timer(0.5, os.kill, (killed, signal.SIGKILL))
    timer.start()
    outcomes = workload.run(server, work)
    timer.join()
    assert all(outcome.finish.split(":")[0] in ("length", "stop") for outcome in outcomes)
    eventually(lambda: state(server)["learner"]["restarts"] == restarts + 1)
    assert learner_pid(server) != killed
    assert eventually(lambda: total(server, "conflux:learner_restarts_total") >= restarts + 1)
    assert "the learner ended with status -9" in server.log_text()
    assert eventually(lambda: state(server)["learner"]["samples"]) > samples // 2

    def newer() -> bool:
        workload.run(server, workload.requests(16, seed=11))
        return state(server)["model_version"] > version

    eventually(newer, within_s=180)


def test_health_and_errors_are_sglangs(server):
    assert server.http.get(f"{server.url}/health", timeout=30).status_code == 200
    answer = requests.post(f"{server.url}/generate", json={"input_ids": [5] * 9000}, timeout=30)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"input_ids": [5, 1024]}, "input_ids must lie between 0 and 1023"),
        ({"input_ids": [5, -1]}, "input_ids must lie between 0 and 1023"),
        ({"sampling_params": {"max_new_tokens": 1.5}}, "max_new_tokens must be a whole number, got 1.5"),
        ({"return_logprob": True, "top_logprobs_num": 2000}, "top_logprobs_num is 2000, and the model knows 1024"),
    ],
)
def test_what_would_end_the_scheduler_is_refused(server, more, said):
    answer = requests.post(f"{server.url}/generate", json={"input_ids": [5, 6, 7], **more}, timeout=60)
    assert answer.status_code == 400
    assert said in answer.text
    assert server.generate([5, 6, 7], max_new_tokens=2)["meta_info"]["completion_tokens"] == 2


def test_mode_and_targets_change_while_serving(server):
    def change(**values) -> bool:
        return requests.post(f"{server.url}/set_internal_state", json={"server_args": values}, timeout=30).json()[0]

    assert change(conflux_mode=2, conflux_tbt_slo_ms=70)
    assert (state(server)["mode"], state(server)["tbt_slo_ms"]) == ("chunked", pytest.approx(70))
    assert not change(conflux_mode=9)
    assert not change(conflux_record=1)
    workload.run(server, workload.requests(4, seed=8))
    assert change(conflux_mode=0, conflux_tbt_slo_ms=50)
    assert state(server)["mode"] == "auto"
