from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from learner.samples import samples_of
from tests.learner.worlds import iteration, stream


def test_one_mixed_batch() -> None:
    (sample,) = samples_of(iteration(stream("mixed", 66, [100, 1], [0, 50], [0.25])))
    assert (sample.q.tolist(), sample.c.tolist()) == ([100, 1], [0, 50])
    assert (sample.logits_rows, sample.tpcs, sample.measured_s, sample.beside) == (2, 66, 0.25, None)
    assert (sample.stream, sample.step) == (0, 0)


def test_context_grows_with_each_step() -> None:
    samples = samples_of(iteration(stream("decode", 8, [1, 1], [10, 20], [0.1, 0.2, 0.3])))
    assert [sample.c.tolist() for sample in samples] == [[10, 20], [11, 21], [12, 22]]
    assert [sample.step for sample in samples] == [0, 1, 2]
    np.testing.assert_allclose([sample.measured_s for sample in samples], [0.1, 0.2, 0.3])


def test_beside_is_the_other_stream_while_it_runs() -> None:
    prefill, decode = stream("prefill", 50, [800], [0], [1.1]), stream("decode", 16, [1], [9], [0.4, 0.4, 0.4, 0.4])
    samples = samples_of(iteration(prefill, decode, concurrent=True))
    first = samples[0].beside
    assert first is not None
    assert (first.q.tolist(), first.c.tolist(), first.tpcs, first.logits_rows) == ([1], [9], 16, 1)
    # The third step runs beside the prefill for most of its time, the fourth not at all.
    assert [s.mostly_beside for s in samples[1:]] == [True, True, True, False]
    assert [None if s.beside is None else s.beside.q.tolist() for s in samples[1:]] == [[800], [800], [800], None]


def test_a_prefill_mostly_alone_is_alone() -> None:
    prefill, decode = stream("prefill", 50, [800], [0], [1.0]), stream("decode", 16, [1], [9], [0.4])
    samples = samples_of(iteration(prefill, decode, concurrent=True))
    assert [sample.mostly_beside for sample in samples] == [False, True]
    assert [sample.share for sample in samples] == pytest.approx([0.4, 1.0])


def test_streams_one_after_the_other_are_alone() -> None:
    prefill, decode = stream("prefill", 1, [800], [0], [1.0]), stream("decode", 1, [1], [9], [0.4], start_s=1.0)
    assert all(sample.beside is None for sample in samples_of(iteration(prefill, decode)))


def test_an_empty_stream_has_no_samples() -> None:
    empty = stream("prefill", 50, [], [], [0.1])
    padding = stream("prefill", 50, [0, 0], [0, 0], [0.1])
    decode = stream("decode", 16, [1], [9], [0.4])
    assert [len(samples_of(iteration(other, decode, concurrent=True))) for other in (empty, padding)] == [1, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"q": [1, 1]},
        {"c": []},
        {"step_start_s": []},
        {"q": [-1]},
        {"c": [-5]},
        {"q": [1 << 40]},
        {"c": [1 << 40]},
        {"logits_rows": 2},
        {"logits_rows": -1},
        {"tpcs": 0},
        {"q": [5], "step_start_s": [0.0, 1.0], "step_end_s": [1.0, 2.0]},  # a prefill of two steps
        {"c": [0], "step_start_s": [0.0, 1.0], "step_end_s": [1.0, 2.0]},
        {"q": [1] * 70_000, "c": [1] * 70_000},
        {"step_start_s": [0.0] * 5000, "step_end_s": [1.0] * 5000},
        {"q": [1] * 60_000, "c": [1] * 60_000, "step_start_s": [0.0] * 3000, "step_end_s": [1.0] * 3000},
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any]) -> None:
    sound = stream("decode", 8, [1], [10], [0.1])
    assert len(samples_of(iteration(sound))) == 1
    with pytest.raises(ValueError, match=r"a stream|decode batch"):
        samples_of(iteration(msgspec.structs.replace(sound, **change)))
