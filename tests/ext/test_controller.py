"""The controller: decisions, records of what ran, and what happens when something fails."""

from __future__ import annotations

import dataclasses
import random
import time

import msgspec
import numpy as np
import pytest

from learner.client import ClientStats
from learner.device import DeviceProfile
from learner.latency import LatencyModel
from learner.record_file import RecordReader, RecordWriter
from learner.records import Header
from learner.shape import ModelShape
from learner.snapshot import GROUP_NAMES, Snapshot
from sglang_ext import controller as module
from sglang_ext.config import Config, ConfigError
from sglang_ext.controller import Controller
from sglang_ext.host_time import HostTime, WindowYield
from sglang_ext.iteration import Half
from sglang_ext.metrics import Metrics
from sglang_ext.policy.types import Settings, Situation
from sglang_ext.timing import Span, WallClock

SHAPE = ModelShape(name="m", layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocabulary=1000)
PROFILE = DeviceProfile(name="cpu", tpcs=1, flops=((1.0, 2e10),), bandwidth=((1.0, 5e9),))


def make(tmp_path=None, *, mode: str = "auto", client=None, tbt_slo_s: float = 0.1, **options):
    config = Config(mode=mode, tbt_slo_s=tbt_slo_s)
    header = Header(created_unix_s=1.0, model=SHAPE, device=PROFILE)
    writer = RecordWriter(tmp_path / "r.jsonl", header) if tmp_path is not None else None
    options |= {"client": client, "writer": writer}
    return Controller(config, header, LatencyModel(SHAPE, PROFILE), Settings(mode=mode), WallClock(), **options)


def situation(decodes: int = 4, waiting: int = 2, **changes) -> Situation:
    base = Situation(
        decode_context=np.full(decodes, 300, dtype=np.int64),
        prefill_new=np.full(waiting, 700, dtype=np.int64),
        prefill_cached=np.zeros(waiting, dtype=np.int64),
        tbt_slo_s=0.1,
        prefill_budget=1024,
        max_look_ahead=8,
    )
    return dataclasses.replace(base, **changes)


def span(start_s: float, end_s: float | None) -> Span:
    made = Span()
    made.start_s, made.end_s = start_s, end_s
    return made


def run(controller: Controller, *halves: Half, mode: str = "temporal", decision=None):
    iteration = controller.begin(decision, mode, "best", tbt_slo_s=0.1, running=4, waiting=2)
    iteration.halves += halves
    controller.launched(iteration)
    controller.poll()
    return iteration


def test_a_record_holds_inputs_candidates_and_times(tmp_path):
    controller = make(tmp_path)
    decision = controller.decide(situation())
    begun_s = 0.0
    iteration = controller.begin(decision, decision.mode, decision.reason, tbt_slo_s=0.1, running=4, waiting=2)
    begun_s = iteration.time_s
    iteration.halves.append(Half("mixed", 1, [700, 1], [0, 300], 2, [span(begun_s + 0.01, begun_s + 0.05)]))
    controller.launched(iteration)
    controller.close()
    reader = RecordReader(tmp_path / "r.jsonl")
    (record,) = list(reader)
    assert reader.header.model == SHAPE
    assert record.candidates.mode[record.decision] == decision.mode
    (stream,) = record.streams
    assert stream.q == [700, 1]
    assert stream.step_end_s[0] - stream.step_start_s[0] == pytest.approx(0.04)
    assert stream.roofline_s[0] > 0
    assert stream.upper_s[0] >= stream.predicted_s[0] > 0


def test_look_ahead_steps_are_predicted_with_growing_context(tmp_path):
    controller = make(tmp_path)
    now_s = time.perf_counter()
    steps = [span(now_s + i, now_s + i + 0.5) for i in range(4)]
    run(controller, Half("decode", 1, [1] * 64, [2000] * 64, 64, steps), mode="spatial")
    controller.close()
    (record,) = list(RecordReader(tmp_path / "r.jsonl"))
    predicted = record.streams[0].predicted_s
    assert len(predicted) == 4
    assert predicted == sorted(predicted)
    assert predicted[0] < predicted[-1]


def test_an_iteration_is_finished_when_its_times_are_known():
    controller = make()
    open_span = span(1.0, None)
    run(controller, Half("prefill", 1, [64], [0], 1, [open_span]))
    assert controller.state()["iterations"] == 0
    open_span.end_s = 1.2
    controller.poll()
    assert controller.state()["iterations"] == 1
    assert controller.state()["decisions"] == {"temporal": 1}


def test_host_overhead_is_the_gap_between_forwards_unless_idle():
    controller = make()
    for start in (1.0, 1.13):
        run(controller, Half("decode", 1, [1], [9], 1, [span(start, start + 0.1)]))
    assert controller.host_time.overhead_s == pytest.approx(0.1 * 0.03)
    before = controller.host_time.overhead_s
    controller.idle()
    run(controller, Half("decode", 1, [1], [9], 1, [span(50.0, 50.1)]))
    assert controller.host_time.overhead_s == before


def mixed(start_s: float, end_s: float) -> Half:
    return Half("mixed", 1, [64, 1], [0, 9], 2, [span(start_s, end_s)])


def test_host_time_around_windows_is_learnt_by_where_it_falls():
    controller = make()
    run(controller, mixed(1.0, 1.1))
    window = Half("decode", 1, [1], [9], 1, [span(1.12, 1.2)]), Half("prefill", 1, [64], [0], 1, [span(1.12, 1.3)])
    run(controller, *window, mode="spatial")
    run(controller, mixed(1.35, 1.4))
    assert controller.host_time.drained.mean_s == pytest.approx(0.1 * 0.02)
    assert controller.host_time.after_window.mean_s == pytest.approx(0.1 * 0.05)
    assert controller.host_time.overhead_s == 0.0
    # What gaps are held to is a bound: the mean and twice the mean deviation, which here is as much.
    assert controller.host_time.overheads(False) == pytest.approx((0.0, 0.006, 0.015, 0.0))
    assert controller.host_time.overheads(True) == pytest.approx((0.015, 0.0, 0.015, 0.0))


def test_a_window_is_held_to_what_it_promised():
    controller = make()
    decision = controller.decide(situation())
    before = controller.window_yield.value
    steps = Half("decode", 1, [1] * 4, [300] * 4, 4, [span(1.0, 1.1), span(1.1, 1.2)])
    prefill = Half("prefill", 1, [700, 300], [0, 0], 2, [span(1.0, 1.25)])
    run(controller, steps, prefill, mode="spatial", decision=decision)
    promised = decision.candidates.plan(decision.index).tokens_per_s / before
    expected = WindowYield()
    expected.note((1000 + 8) / 0.25 / promised)
    assert controller.window_yield.value == pytest.approx(expected.value)
    run(controller, mixed(1.3, 1.4), decision=decision)
    expected.fade()
    assert controller.state()["window_yield"] == pytest.approx(expected.value, abs=1e-3)


@pytest.mark.parametrize("spread", [0.0, 0.002])
def test_the_bound_on_host_time_after_windows_covers_its_spread(spread: float):
    host, rng, at_s, covered = HostTime(launches_ahead=True), random.Random(5), 1.0, 0
    for number in range(400):
        after_s = 0.006 + spread * rng.uniform(-1.0, 1.0)
        covered += number >= 200 and after_s <= host.overheads(True).after_window_s + 1e-9
        host.note(at_s, at_s + 0.1, window=True, mixed=False, after_idle=False)
        at_s += 0.1 + after_s
    assert covered >= 190
    assert host.overheads(True).after_window_s <= 0.006 + 1.3 * spread + 1e-6


def test_a_device_that_waits_between_mixed_batches_has_a_slow_host_if_it_is_launched_ahead():
    ahead, in_turn = make(launches_ahead=True), make()
    for controller in (ahead, in_turn):
        for start in (1.0, 1.03, 1.06):
            run(controller, mixed(start, start + 0.02))
    assert ahead.host_time.period_s == pytest.approx(0.03 * (1 - 0.9**2))
    assert ahead.host_time.overhead_s == 0.0
    assert (in_turn.host_time.period_s, in_turn.host_time.overhead_s) == (0.0, pytest.approx(0.01 * (1 - 0.9**2)))
    # One that follows at once shows that the host is quicker than the batch before it.
    run(ahead, mixed(1.08, 1.083))
    run(ahead, mixed(1.083, 1.2))
    assert ahead.host_time.period_s == pytest.approx(0.003)


def test_mode_and_targets_change_while_serving():
    controller = make()
    controller.change(controller.config.changed({"mode": 3, "tbt_slo_ms": 40}))
    assert (controller.settings.mode, controller.state()["mode"]) == ("spatial", "spatial")
    assert (controller.config.tbt_slo_s, controller.config.ttft_slo_s) == (0.04, 2.0)
    controller.change(controller.config.changed({"mode": "auto"}))
    assert (controller.settings.mode, controller.config.tbt_slo_s) == ("auto", 0.04)
    for wrong in ({"mode": 6}, {"mode": "fast"}, {"tbt_slo_ms": -1, "mode": 1}, {"learner": 0}, {"mode": 0.5}):
        with pytest.raises(ConfigError):
            controller.config.changed(wrong)


def test_after_errors_windows_run_in_turn_with_the_look_ahead_of_that():
    controller = make()
    controller.settings = dataclasses.replace(controller.settings, concurrent=True, max_look_ahead=64)
    controller.one_after_the_other()
    assert (controller.settings.concurrent, controller.settings.max_look_ahead) == (False, 8)


def test_a_pause_is_no_overhead_and_what_windows_cost_fades():
    controller = make(launches_ahead=True)
    run(controller, mixed(1.0, 1.1))
    run(controller, mixed(6.1, 6.2))
    assert controller.host_time.overheads(False) == (0.0, 0.0, 0.0, 0.0)
    controller.host_time.after_window.mean_s = 0.04
    for number in range(1000):
        run(controller, mixed(7.0 + number, 8.0 + number))
    assert 0.0 < controller.host_time.after_window.mean_s < 0.02


class Client:
    def __init__(self) -> None:
        self.records = []
        self.snapshot = None

    stats = ClientStats(0, 0, 3, 0, 99.0, "", 0, 0, 0, 0)

    def poll(self):
        found, self.snapshot = self.snapshot, None
        return found

    def send(self, record) -> bool:
        self.records.append(record)
        return True


class Drifting:
    """Metrics that keep which groups drift."""

    def learner(self, *, drifting, **others) -> None:
        self.drifting = list(drifting)

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: None


def test_the_learner_gets_what_can_be_learnt_from():
    controller = make(client=(client := Client()))
    run(controller, Half("decode", 1, [1], [9], 1, [span(1.0, 1.1)]))
    iteration = controller.begin(None, "temporal", "idle", tbt_slo_s=0.1, running=1, waiting=0)
    iteration.learnable = False
    iteration.halves.append(Half("decode", 1, [1], [9], 1, [span(2.0, 2.1)]))
    controller.launched(iteration)
    controller.poll()
    assert len(client.records) == 1


def test_a_silent_or_confused_learner_is_said_once(caplog):
    controller = make(client=Client())
    for _ in range(3):
        controller._housekeeping_s = 0.0
        controller.poll()
    assert caplog.text.count("no word from the learner for 99 s") == 1
    assert caplog.text.count("the learner sent something that cannot be used") == 1


def test_drift_is_said_once_each_way_and_shown(caplog):
    caplog.set_level("INFO")
    metrics = Drifting()
    controller = make(client=(client := Client()), metrics=metrics)

    def polled(version: int, *groups: str) -> list[str]:
        drifting = [float(name in groups) for name in GROUP_NAMES]
        client.snapshot = msgspec.structs.replace(Snapshot.roofline(), version=version, drifting=drifting)
        controller._housekeeping_s = controller._heard_s = 0.0
        controller.poll()
        assert metrics.drifting == controller.state()["learner"]["drifting"] == list(groups)
        said = [f"{record.levelname} {record.message}" for record in caplog.records if "takes" in record.message]
        caplog.clear()
        return said

    assert controller.state()["learner"]["drifting"] == []
    assert polled(1) == []
    (begun,) = polled(2, "decode")
    assert begun.startswith("WARNING conflux: decode takes other times than learnt")
    assert polled(3, "decode") == []
    (begun,) = polled(4, "decode", "prefill_beside")
    assert begun.startswith("WARNING conflux: prefill_beside takes")
    (over,) = polled(5, "prefill_beside")
    assert over == "INFO conflux: decode takes about what is predicted again"
    (over,) = polled(6)
    assert "prefill_beside" in over
    # One that comes and goes is not said again so soon, though it is shown.
    assert polled(7, "decode") == polled(8) == []


def test_the_metrics_name_groups_in_drift(prometheus):
    metrics = Metrics("drift")
    metrics.learner(version=3, age_s=0.1, restarts=0, dropped=0, rejected=0, drifting=["decode_beside"])
    text = prometheus.generate_latest().decode()
    for group in GROUP_NAMES:
        value = 1.0 if group == "decode_beside" else 0.0
        assert f'conflux:learner_drift{{group="{group}",model_name="drift"}} {value}' in text
    metrics.learner(version=4, age_s=0.1, restarts=0, dropped=0, rejected=0, drifting=[])
    assert (
        'conflux:learner_drift{group="decode_beside",model_name="drift"} 0.0' in prometheus.generate_latest().decode()
    )


def test_a_failing_model_falls_back_to_the_roofline(monkeypatch, caplog):
    controller, calls = make(), []
    real = module.decide

    def failing(*args):
        calls.append(args)
        if len(calls) == 1:
            raise FloatingPointError("snapshot")
        return real(*args)

    monkeypatch.setattr(module, "decide", failing)
    assert controller.decide(situation()).prefill_tokens > 0
    assert controller.state()["fallbacks"] == {"decision_error": 1}
    assert "using the roofline" in caplog.text


def test_fall_backs_are_counted_always_and_said_once(caplog):
    controller = make()
    for _ in range(5):
        controller.fell_back("grammar")
    assert controller.state()["fallbacks"] == {"grammar": 5}
    assert caplog.text.count("falling back (grammar)") == 1


def test_random_mode_draws_every_mode():
    controller = make(mode="auto")
    controller = Controller(
        Config(mode="random"), controller.header, controller.model, Settings(mode="auto"), WallClock()
    )
    decided = [controller.decide(situation()) for _ in range(60)]
    assert {"temporal", "spatial", "reserved"} <= {d.mode for d in decided}
    assert {d.look_ahead_steps for d in decided if d.mode == "spatial"} > {8}
    assert all(1 <= d.look_ahead_steps <= 8 for d in decided)


@pytest.mark.parametrize(("exposed_s", "sent"), [(0.0, 12), (0.005, 4)])
def test_a_late_host_spares_itself_most_records(exposed_s: float, sent: int):
    client = Client()
    controller = make(client=client, launches_ahead=True)
    at_s = 1.0
    for _ in range(12):
        run(controller, mixed(at_s, at_s + 0.02))
        at_s += 0.02 + exposed_s
    # The first follows nothing, so it is not late.
    assert len(client.records) == sent
    assert controller.state()["iterations"] == 12
    assert controller.state()["host_ms"]["poll"]["p50"] > 0
    assert controller.host_time.period_s > 0.01 or not exposed_s
