from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import threadpoolctl

from learner import Iteration, LatencyModel
from learner.columns import PHASES
from learner.estimator import COVERAGE, FEWEST_NEW, OnlineEstimator
from learner.samples import samples_of
from learner.snapshot import Snapshot
from tests.learner.worlds import CPU, H200, LARGE, SMALL, CpuWorld, GpuWorld, World, iteration, stream


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with threadpoolctl.threadpool_limits(1):
        yield


class Steps(NamedTuple):
    """Every step of a run, predicted before it was learnt: one array each."""

    iteration: np.ndarray
    group: np.ndarray
    measured_s: np.ndarray
    mean_s: np.ndarray
    upper_s: np.ndarray
    roofline_s: np.ndarray

    def take(self, index: Any) -> Steps:
        return Steps(*(column[index] for column in self))

    def error(self) -> float:
        return float(np.mean(np.abs(self.mean_s / self.measured_s - 1.0)))

    def roofline_error(self) -> float:
        return float(np.mean(np.abs(self.roofline_s / self.measured_s - 1.0)))

    def covered(self) -> float:
        return float(np.mean(self.measured_s <= self.upper_s))


def run(estimator: OnlineEstimator, iterations: list[Iteration]) -> Steps:
    rows = []
    for record in iterations:
        predictions = estimator.predict_iteration(record)
        for sample, predicted in zip(samples_of(record), predictions, strict=True):
            phase = PHASES.index(record.streams[sample.stream].phase)
            group = phase + len(PHASES) * (sample.beside is not None)
            rows.append((record.iteration, group, sample.measured_s, *predicted))
        estimator.observe(record)
        if estimator.ready():
            estimator.fit()
    return Steps(*np.array(rows).T)


def draw(world: World, count: int) -> list[Iteration]:
    return [world.draw() for _ in range(count)]  # type: ignore[attr-defined]


@functools.cache
def learnt(world: type[CpuWorld] | type[GpuWorld], count: int) -> tuple[OnlineEstimator, Steps]:
    """One run for all tests that only look at it."""
    estimator = OnlineEstimator(world.shape, world.profile)
    return estimator, run(estimator, draw(world(11), count))


def test_learns_a_noisy_cpu() -> None:
    """Noise of 12 % alone makes a mean error of 9.6 %, and pauses 1 % more."""
    estimator, steps = learnt(CpuWorld, 700)
    second = steps.take(slice(350, None))
    assert second.error() < 0.15
    assert second.error() < 0.3 * second.roofline_error()
    assert estimator.accepted == len(steps.measured_s)
    assert estimator.rejected == 0


def test_learns_contention_on_a_gpu() -> None:
    _, steps = learnt(GpuWorld, 500)
    second = steps.take(slice(len(steps.mean_s) // 2, None))
    assert second.error() < 0.08
    assert second.error() < 0.25 * second.roofline_error()
    beside = second.take(second.group >= len(PHASES))
    assert len(beside.mean_s) > 100
    assert beside.error() < 0.08


def test_extrapolates_to_partitions_never_tried() -> None:
    estimator, _ = learnt(GpuWorld, 500)
    world, model = GpuWorld(0), estimator.model
    for tpcs in (4, 10, 40, 56):
        decode = model.predict(model.terms([1] * 48, [2000] * 48, 48, tpcs)).mean_s[0]
        assert decode == pytest.approx(world.decode_s([2000] * 48, tpcs), rel=0.15)
        prefill = model.predict(model.terms([4096], [0], 1, tpcs)).mean_s[0]
        assert prefill == pytest.approx(world.prefill_s([4096], [0], tpcs), rel=0.25)


@pytest.mark.parametrize(("world", "count"), [(CpuWorld, 700), (GpuWorld, 500)])
def test_the_upper_bound_covers_what_it_says(world: type[CpuWorld], count: int) -> None:
    """Less the pauses, which are not chased."""
    estimator, steps = learnt(world, count)
    second = steps.take(slice(len(steps.mean_s) // 3, None))
    ordinary = second.take(second.measured_s < 1.9 * second.mean_s)
    assert COVERAGE - 0.012 <= ordinary.covered() <= 1.0
    assert second.covered() >= COVERAGE - 0.03
    # Not by being absurdly wide: the noise's own 99 % quantile is 1.32 (CPU) and 1.07 (GPU) times the mean.
    assert float(np.median(second.upper_s / second.mean_s)) < (1.9 if world is CpuWorld else 1.35)
    assert (second.upper_s >= second.mean_s).all()
    assert estimator.model.snapshot.coverage == COVERAGE


def test_bounds_enclose_what_was_seen() -> None:
    estimator, steps = learnt(CpuWorld, 700)
    snapshot = estimator.model.snapshot
    for group in (1, 2):
        ratio = (steps.measured_s / steps.roofline_s)[steps.group == group]
        assert 0.1 * ratio.min() < snapshot.min_ratio[group] < np.median(ratio) < snapshot.max_ratio[group]
        assert snapshot.max_ratio[group] < 10.0 * ratio.max()


@pytest.mark.parametrize("wave", [0.0, 0.4])
def test_the_correction_counts_where_it_helps(wave: float) -> None:
    """A factor that no sum of terms has: a wave over the logarithm of the number of decodes."""
    random = np.random.default_rng(6)
    model, estimator = LatencyModel(SMALL, CPU), OnlineEstimator(SMALL, CPU)
    records = []
    for number in range(600):
        rows = int(2.0 ** random.uniform(0.0, 6.0))
        roofline = float(model.terms([1] * rows, [300] * rows, rows, 1).roofline_s[0])
        factor = math.exp(wave * math.sin(2.5 * math.log2(rows + 1)) + 0.03 * random.standard_normal())
        records.append(iteration(stream("decode", 1, [1] * rows, [300] * rows, [roofline * factor]), number=number))
    steps = run(estimator, records)
    if wave:
        assert estimator.model.snapshot.correction_weight[1] == 1.0
        without = msgspec.structs.replace(estimator.model.snapshot, correction_weight=[0.0] * len(PHASES) * 2)
        plain = LatencyModel(SMALL, CPU, without)
        late = [(record, sample) for record in records[400:] for sample in samples_of(record)]
        errors = [
            abs(plain.predict(plain.terms(s.q, s.c, s.logits_rows, 1)).mean_s[0] / s.measured_s - 1.0) for _, s in late
        ]
        assert steps.take(slice(400, None)).error() < 0.6 * np.mean(errors)
    assert steps.take(slice(400, None)).error() < (0.12 if wave else 0.04)


def test_decode_errs_high() -> None:
    _, steps = learnt(GpuWorld, 500)
    decode = steps.take((steps.group % len(PHASES) == 1) & (steps.iteration > 250))
    assert np.mean(decode.mean_s >= decode.measured_s) > 0.5


def test_predictions_of_a_learnt_model_never_rise_with_tpcs() -> None:
    estimator, _ = learnt(GpuWorld, 500)
    model, tpcs = estimator.model, np.arange(1, 67)
    for q, c in (([1] * 30, [3000] * 30), ([4096], [0]), ([2048, 1, 1], [512, 900, 4000])):
        for column in model.predict(model.terms(q, c, 1, tpcs)):
            assert (np.diff(column) <= 1e-9 * column[:-1]).all()


@pytest.mark.parametrize("factor", [1.6, 0.6])
def test_follows_a_step_change(factor: float) -> None:
    """Everything takes ``factor`` times as long from iteration 300 on."""
    world = CpuWorld(5, scale=lambda number: 1.0 if number < 300 else factor)
    steps = run(OnlineEstimator(SMALL, CPU), draw(world, 600))
    before = steps.take((steps.iteration >= 200) & (steps.iteration < 300)).error()
    at_once = steps.take((steps.iteration >= 300) & (steps.iteration < 310)).error()
    after = steps.take(steps.iteration >= 420)
    assert at_once > 1.5 * before
    assert after.error() < 0.17
    assert after.covered() > 0.95


def test_pauses_do_not_move_it() -> None:
    """A first launch 100 times as long and pauses in pairs, against the same run without."""
    calm, paused = OnlineEstimator(SMALL, CPU), OnlineEstimator(SMALL, CPU)
    records = draw(CpuWorld(7, pauses=0.0), 400)
    disturbed = list(records)
    for at in [0, *range(100, 400, 75), *range(101, 400, 75)]:
        once = records[at].streams[0]
        longer = stream(once.phase, 1, once.q, once.c, [once.step_end_s[0] * (100.0 if at == 0 else 8.0)])
        disturbed[at] = iteration(longer, number=at)
    run(calm, records)
    run(paused, disturbed)
    probe = (([1] * 8, [400] * 8), ([128], [256]), ([100, 1, 1, 1], [0, 50, 60, 300]))
    for q, c in probe:
        terms = calm.model.terms(q, c, len(q), 1)
        expected = calm.model.predict(terms)
        got = paused.model.predict(terms)
        assert got.mean_s[0] == pytest.approx(expected.mean_s[0], rel=0.1)
        assert got.upper_s[0] == pytest.approx(expected.upper_s[0], rel=0.5)


def test_a_rare_regime_stays_known() -> None:
    """Ten long contexts early on, then nothing but short ones."""
    estimator, world = OnlineEstimator(SMALL, CPU), CpuWorld(9)
    long = ([1, 1], [20_000, 20_000])
    rare = [iteration(stream("decode", 1, *long, [world.disturbed(world.true_s(*long))])) for _ in range(10)]
    run(estimator, draw(world, 60) + rare + draw(world, 600))
    terms = estimator.model.terms(*long, 2, 1)
    assert estimator.model.predict(terms).mean_s[0] == pytest.approx(world.true_s(*long), rel=0.25)


@pytest.mark.parametrize("end_s", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-9, 1e6])
def test_an_absurd_timing_is_rejected_and_counted(end_s: float) -> None:
    estimator = OnlineEstimator(SMALL, CPU)
    sound = stream("decode", 1, [1], [10], [0.05, 0.05, 0.05])
    bad = msgspec.structs.replace(sound, step_end_s=[0.05, end_s, 0.15])
    assert estimator.observe(iteration(bad)) == 2
    assert (estimator.accepted, estimator.rejected) == (2, 1)
    assert all(np.isfinite(predicted).all() for predicted in estimator.predict_iteration(iteration(bad)))


@pytest.mark.parametrize("change", [{"q": [1, 1]}, {"c": [-1]}, {"tpcs": 2}, {"tpcs": 0}, {"logits_rows": 9}])
def test_an_impossible_batch_is_rejected_and_counted(change: dict[str, Any]) -> None:
    estimator = OnlineEstimator(SMALL, CPU)
    bad = msgspec.structs.replace(stream("decode", 1, [1], [10], [0.05, 0.05]), **change)
    assert estimator.observe(iteration(bad)) == 0
    assert (estimator.accepted, estimator.rejected) == (0, 2)


def test_an_idle_iteration_is_nothing() -> None:
    estimator = OnlineEstimator(SMALL, CPU)
    assert estimator.observe(iteration()) == 0
    assert estimator.predict_iteration(iteration()) == []
    assert (estimator.accepted, estimator.rejected) == (0, 0)


def test_garbage_among_the_sound_changes_nothing() -> None:
    records = draw(CpuWorld(3), 120)
    clean, dirty = OnlineEstimator(SMALL, CPU), OnlineEstimator(SMALL, CPU)
    run(clean, records)
    for record in records:
        for value in (math.nan, -1.0, 1e9):
            dirty.observe(iteration(msgspec.structs.replace(record.streams[0], step_end_s=[value])))
        run(dirty, [record])
    assert dirty.rejected == 360
    assert same(clean.model.snapshot, dirty.model.snapshot)


def same(one: Snapshot, other: Snapshot) -> bool:
    return msgspec.structs.replace(one, created_unix_s=0.0) == msgspec.structs.replace(other, created_unix_s=0.0)


def test_ready_early_then_less_often() -> None:
    estimator, world = OnlineEstimator(SMALL, CPU), CpuWorld(1)
    assert not estimator.ready()
    assert estimator.fit() is None
    published, fits, coefficients = 0, [], None
    while estimator.accepted < 1000:
        estimator.observe(world.draw())
        if estimator.ready():
            snapshot = estimator.fit()
            assert snapshot is not None
            snapshot.validate()
            published += 1
            assert (snapshot.version, snapshot.samples) == (published, estimator.accepted)
            if snapshot.coefficients != coefficients:
                fits.append(estimator.accepted)
                coefficients = snapshot.coefficients
    assert fits[0] == FEWEST_NEW
    assert max(np.diff(fits[:4])) <= FEWEST_NEW
    assert fits[-1] - fits[-2] > FEWEST_NEW // 2
    # What is nearby is published with every sample in between.
    assert published > 5 * len(fits)


@pytest.mark.parametrize(("world", "count"), [(CpuWorld, 150), (GpuWorld, 100)])
def test_state_round_trip(world: type[CpuWorld] | type[GpuWorld], count: int) -> None:
    source = world(2)
    first, second = OnlineEstimator(world.shape, world.profile), OnlineEstimator(world.shape, world.profile)
    run(first, draw(source, count))
    second.restore(first.state())
    assert second.state() == first.state()
    assert (second.accepted, second.model.version) == (first.accepted, first.model.version)
    assert second.model.version > 0
    assert second.ready()
    probe = source.draw()
    assert second.predict_iteration(probe) == first.predict_iteration(probe)
    first.restore(first.state())  # both fit anew
    refitted, expected = second.fit(), first.fit()
    assert refitted is not None
    assert expected is not None
    assert same(refitted, expected)
    more = draw(source, 30)
    np.testing.assert_array_equal(run(second, more), run(first, more))


def test_a_fresh_state_round_trip() -> None:
    estimator = OnlineEstimator(SMALL, CPU)
    estimator.restore(OnlineEstimator(SMALL, CPU).state())
    assert (estimator.accepted, estimator.model.version) == (0, 0)


def test_another_provenance_is_the_same_device() -> None:
    estimator = OnlineEstimator(SMALL, msgspec.structs.replace(CPU, provenance={"measured": "again"}))
    estimator.restore(learnt(CpuWorld, 700)[0].state())
    assert estimator.accepted == 700


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    estimator, state = OnlineEstimator(SMALL, CPU), learnt(CpuWorld, 700)[0].state()
    tree = msgspec.msgpack.decode(state)

    def changed(change: Callable[[Any], None]) -> bytes:
        copy = msgspec.msgpack.decode(state)
        change(copy)
        return msgspec.msgpack.encode(copy)

    bad = {
        "truncated": state[: len(state) // 2],
        "garbage": b"\x00" * 100,
        "schema": changed(lambda t: t.update(schema=99)),
        "count": changed(lambda t: t.update(accepted=-1)),
        "window": changed(lambda t: t["window"].update(rows=tree["window"]["rows"] - 1)),
        "calibrations": changed(lambda t: t["calibrations"].pop()),
        "level": changed(lambda t: t["calibrations"][0].update(alpha=math.nan)),
        "snapshot": changed(lambda t: t["snapshot"].update(margin=[0.0] * 6)),
    }
    for name, data in bad.items():
        with pytest.raises(ValueError):  # noqa: PT011 - the messages differ, the refusal is the point
            estimator.restore(data)
        assert estimator.accepted == 0, name
        assert estimator.model.version == 0, name
    for other in (OnlineEstimator(LARGE, CPU), OnlineEstimator(SMALL, H200)):
        with pytest.raises(ValueError, match="another model or device"):
            other.restore(state)


def test_a_restart_keeps_what_was_learnt() -> None:
    world, estimator = CpuWorld(8), OnlineEstimator(SMALL, CPU)
    run(estimator, draw(world, 300))
    successor = OnlineEstimator(SMALL, CPU)
    successor.restore(estimator.state())
    assert run(successor, draw(world, 100)).error() < 0.16


def test_memory_is_bounded() -> None:
    estimator, world = OnlineEstimator(SMALL, CPU, window=128), CpuWorld(4)
    sizes = []
    for _ in range(3):
        for record in draw(world, 1200):
            estimator.observe(record)
        sizes.append(len(estimator.state()))
    assert sizes[2] < 1.1 * sizes[1]


def test_a_full_window_is_fitted_quickly() -> None:
    """50 ms of CPU time are the goal; the test allows for a slow machine."""
    estimator = learnt(GpuWorld, 500)[0]
    other = OnlineEstimator(LARGE, H200)
    other.restore(estimator.state())
    for record in draw(GpuWorld(1), 600):
        other.observe(record)
    took = []
    for _ in range(3):
        start = time.process_time()
        other.fit()
        took.append(time.process_time() - start)
    assert min(took) < 0.25


def test_the_snapshot_is_what_the_scheduler_evaluates() -> None:
    estimator, _ = learnt(CpuWorld, 700)
    snapshot = Snapshot.decode(estimator.model.snapshot.encode())
    model = LatencyModel(SMALL, CPU, snapshot)
    terms = model.terms([64, 1, 1], [0, 100, 200], 3, 1)
    for got, expected in zip(model.predict(terms), estimator.model.predict(terms), strict=True):
        np.testing.assert_array_equal(got, expected)
