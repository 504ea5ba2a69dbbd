"""Versions, budgets and bounds of the pool, with estimators that do as they are told."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from learner.pool import VERSION_BLOCK, WORTH_SAVING, EstimatorPool, LearntModel
from learner.records import Header, Iteration
from learner.snapshot import Snapshot
from learner.store import StateStore
from tests.learner.generated import header, iteration, stream

ONE = iteration(1, stream("decode", [1], [10], [0.01]))


class Obedient:
    """Counts iterations, each as enough samples to be worth saving; its state is that count."""

    def __init__(self, header: Header) -> None:
        self.count = 0
        self.rejected = 0
        self.failure: Exception | None = None
        self.margin = 1.1
        self.model = SimpleNamespace(version=0, snapshot=Snapshot.roofline())

    def observe(self, iteration: Iteration) -> int:
        self.count += 1
        return WORTH_SAVING

    def ready(self) -> bool:
        return self.count > 0

    def fit(self) -> Snapshot | None:
        if self.failure is not None:
            raise self.failure
        plain = Snapshot.roofline()
        self.model.version += 1
        self.model.snapshot = msgspec.structs.replace(
            plain, samples=self.count * WORTH_SAVING, margin=[self.margin] * len(plain.margin)
        )
        return self.model.snapshot

    def state(self) -> bytes:
        return b"%d" % self.count

    def restore(self, state: bytes) -> None:
        self.count = int(state)
        self.fit()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pool(directory: Path | None, learner_id: str = "one", clock: Clock | None = None, limit: int = 8) -> EstimatorPool:
    store = StateStore(directory) if directory is not None else None
    return EstimatorPool(store, learner_id, clock=clock or Clock(), limit=limit, estimator=Obedient)  # type: ignore[arg-type]


def refit(pool: EstimatorPool, clock: Clock) -> LearntModel:
    clock.now += 100.0
    model = pool.refit()
    assert model is not None
    return model


def published(model: LearntModel) -> int:
    assert model.snapshot is not None
    assert model.snapshot.version == model.version
    return model.version


def test_snapshots_carry_key_learner_and_rising_versions() -> None:
    clock = Clock()
    some = pool(None, clock=clock)
    some.observe(some.open(header()), ONE)
    models = [refit(some, clock) for _ in range(3)]
    assert published(models[-1]) == 3
    snapshot = models[-1].snapshot
    assert snapshot is not None
    assert (snapshot.key, snapshot.learner_id, snapshot.samples) == (header().key, "one", WORTH_SAVING)


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("fits", [1, 3, VERSION_BLOCK + 2])
def test_versions_rise_over_restarts(tmp_path: Path, fits: int, clean: bool) -> None:
    """Also over one that follows a kill, when nothing since the last save is on disk."""
    clock = Clock()
    first = pool(tmp_path, clock=clock)
    model = first.open(header())
    first.observe(model, ONE)
    for _ in range(fits):
        refit(first, clock)
    assert published(model) == fits
    if clean:
        first.close()
    else:
        assert model.file is not None
        model.file.close()  # what the kernel does to the lock
    second = pool(tmp_path, "two", clock)
    restored = second.open(header())
    assert published(restored) > fits
    assert restored.samples == WORTH_SAVING
    if clean:
        assert published(restored) == fits + 1


def test_saving_in_between_keeps_the_reserved_versions(tmp_path: Path) -> None:
    clock = Clock()
    first = pool(tmp_path, clock=clock)
    model = first.open(header())
    for _ in range(3):
        first.observe(model, ONE)
        refit(first, clock)
        first.save()
    refit(first, clock)
    assert model.file is not None
    model.file.close()
    second = pool(tmp_path, "two", clock)
    restored = second.open(header())
    assert published(restored) > 4
    assert restored.samples == 3 * WORTH_SAVING


def test_refits_keep_to_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refit of t seconds is followed by nine times as long without one."""
    clock = Clock()
    some = pool(None, clock=clock)
    some.observe(some.open(header()), ONE)
    ticks = iter([0.0, 2.0, 0.0, 0.001])
    monkeypatch.setattr("learner.pool.time.thread_time", lambda: next(ticks))
    assert some.refit() is not None
    for now, due in ((0.0, False), (17.9, False), (18.1, True), (18.2, False)):
        clock.now = now
        assert (some.refit() is not None) == due
    monkeypatch.undo()
    clock.now = 18.7
    assert some.refit() is not None


def test_no_refit_before_it_may() -> None:
    ready = False
    some = EstimatorPool(None, "one", clock=Clock(), may_fit=lambda: ready, estimator=Obedient)  # type: ignore[arg-type]
    some.observe(some.open(header()), ONE)
    assert some.refit() is None
    ready = True
    assert some.refit() is not None


def test_the_longest_unfitted_model_goes_first() -> None:
    clock = Clock()
    some = pool(None, clock=clock)
    for name in ("a", "b", "c"):
        some.observe(some.open(header(name)), ONE)
    assert [refit(some, clock).header.model.name for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_a_failing_refit_is_survived_and_not_repeated_at_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    some = pool(None, clock=clock)
    model = some.open(header())
    some.observe(model, ONE)
    model.estimator.failure = RuntimeError("SVD did not converge")
    assert some.refit() is None
    assert "SVD did not converge" in caplog.text
    model.estimator.failure = None
    assert some.refit() is None
    assert published(refit(some, clock)) == 1


def test_an_unusable_snapshot_is_not_published() -> None:
    clock = Clock()
    some = pool(None, clock=clock)
    model = some.open(header())
    some.observe(model, ONE)
    model.estimator.margin = math.nan
    assert some.refit() is None
    assert model.snapshot is None
    model.estimator.margin = 1.1
    assert published(refit(some, clock)) == 1


def test_made_up_headers_do_not_push_out_what_was_learnt(tmp_path: Path) -> None:
    clock = Clock()
    some = pool(tmp_path, clock=clock, limit=4)
    model = some.open(header("real"))
    for _ in range(10):
        some.observe(model, ONE)
    refit(some, clock)
    for number in range(100):
        some.open(header(f"made up {number}"))
    assert some.open(header("real")) is model
    assert published(model) == 1


def test_a_model_beyond_the_limit_is_saved_and_comes_back(tmp_path: Path) -> None:
    clock = Clock()
    some = pool(tmp_path, clock=clock, limit=1)
    for name, count in (("a", 3), ("b", 5)):
        for _ in range(count):
            some.observe(some.open(header(name)), ONE)
    again = some.open(header("a"))
    assert again.estimator.count == 3
    assert some.open(header("b")).estimator.count == 5


def test_state_that_the_estimator_refuses_is_set_aside(tmp_path: Path) -> None:
    file = StateStore(tmp_path).file(header())
    file.save(estimator=b"not a number", last_version=41, saved_unix_s=0.0)
    file.close()
    clock = Clock()
    some = pool(tmp_path, clock=clock)
    model = some.open(header())
    assert model.estimator.count == 0
    assert file.path.with_suffix(".corrupt").exists()
    some.observe(model, ONE)
    assert published(refit(some, clock)) == 42


def test_what_is_hardly_learnt_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Obedient, "observe", lambda self, iteration: 1)
    monkeypatch.setattr(Obedient, "ready", lambda self: True)
    clock = Clock()
    some = pool(tmp_path, clock=clock, limit=1)
    for number in range(5):
        some.observe(some.open(header(f"stray {number}")), ONE)
        refit(some, clock)
        some.save()
    some.close()
    assert list(tmp_path.iterdir()) == []
    model = some.open(header())
    for _ in range(WORTH_SAVING):
        some.observe(model, ONE)
    some.close()
    assert len(list(tmp_path.glob("*.state"))) == 1


def test_without_a_store_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    clock = Clock()
    some = pool(None, clock=clock)
    some.observe(some.open(header()), ONE)
    refit(some, clock)
    some.save()
    some.close()
    assert list(tmp_path.iterdir()) == []
