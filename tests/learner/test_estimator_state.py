"""What the estimator takes in, when it fits, and the state that it keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import threadpoolctl

from learner import LatencyModel
from learner.estimator import FEWEST_NEW, OnlineEstimator
from learner.snapshot import Snapshot
from tests.learner.estimating import draw, learnt, run, same
from tests.learner.worlds import CPU, H200, LARGE, SMALL, CpuWorld, GpuWorld, iteration, stream


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with threadpoolctl.threadpool_limits(1):
        yield


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
    # What ran just before is not part of a state.
    probe = msgspec.structs.replace(source.draw(), iteration=10**6)
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
        "alarm": changed(lambda t: t["calibrations"][0]["alarm"].update(usual=math.nan)),
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
