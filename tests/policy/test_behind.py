from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sglang_ext.policy.behind import LEFT_OUT, FarBehind
from sglang_ext.policy.decide import decide
from sglang_ext.policy.types import Settings
from tests.policy.test_decide import LEVELS, MODEL, PLAIN

AUTO = Settings("auto", True, LEVELS, max_look_ahead=64)
LONG = dataclasses.replace(
    PLAIN,
    decode_context=np.full(64, 8000),
    prefill_new=np.array([8000]),
    prefill_budget=8000,
    tbt_slo_s=0.05,
    max_look_ahead=64,
)


@pytest.mark.parametrize(("window_yield", "far"), [(1.0, False), (0.3, True)])
def test_windows_that_are_far_behind_are_left_out_of_the_next_decisions(window_yield: float, far: bool) -> None:
    s, behind = dataclasses.replace(LONG, window_yield=window_yield), FarBehind()
    assert not behind.skips(s)
    behind.note(decide(s, AUTO, MODEL))
    assert [behind.skips(s) for _ in range(LEFT_OUT + 1)] == [far] * LEFT_OUT + [False]


def test_after_a_window_all_is_weighed() -> None:
    s, behind = dataclasses.replace(LONG, window_yield=0.3), FarBehind()
    behind.note(decide(s, AUTO, MODEL))
    assert behind.skips(s)
    assert not behind.skips(dataclasses.replace(s, after_window=True))
    assert not behind.skips(s)


def test_what_fits_says_nothing_of_windows() -> None:
    behind = FarBehind()
    behind.note(decide(PLAIN, AUTO, MODEL))
    assert not behind.skips(PLAIN)
