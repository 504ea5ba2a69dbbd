from __future__ import annotations

import msgspec
import numpy as np
import pytest

from learner import LatencyModel
from learner.contention import CONTENTION_TERMS
from learner.window import Window
from tests.learner.worlds import H200, LARGE

MODEL = LatencyModel(LARGE, H200)
NOTHING = np.zeros(CONTENTION_TERMS)


def add(window: Window, serial: int, *, context: int = 100, rows: int = 4, tpcs: int = 66) -> None:
    terms = MODEL.terms([1] * rows, [context] * rows, rows, tpcs)
    window.add(terms.matrix[0], NOTHING, float(terms.roofline_s[0]), 0.01, 1, tpcs, serial)


def serials(window: Window) -> list[int]:
    return window.batch().serial.astype(int).tolist()


def test_a_ring_keeps_the_newest() -> None:
    window = Window(10, 10)
    for serial in range(25):
        add(window, serial, context=1 + 1000 * (serial % 3))
    assert serials(window) == list(range(15, 25))
    assert (len(window), window.strata, window.capacity) == (10, 1, 10)


def test_a_stratum_keeps_its_newest() -> None:
    window = Window(100, 8)
    for serial in range(50):
        add(window, serial)
    assert serials(window) == list(range(42, 50))


def test_the_rare_outlives_a_flood_of_the_usual() -> None:
    window = Window(64, 16, 66)
    for serial in range(5):
        add(window, serial, context=100_000)
    for serial in range(5, 2000):
        add(window, serial, context=10 << (serial % 8))
    assert len(window) == 64
    assert serials(window)[:5] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("change", [{"context": 5000}, {"rows": 9}, {"tpcs": 8}])
def test_strata_tell_apart(change: dict[str, int]) -> None:
    window = Window(64, 16, 66)
    add(window, 0)
    add(window, 1)
    assert window.strata == 1
    add(window, 2, **change)
    assert window.strata == 2


def test_round_trip() -> None:
    window, other = Window(64, 4, 66), Window(64, 4, 66)
    for serial in range(200):
        add(window, serial, context=10 << (serial % 10), rows=1 + serial % 5)
    other.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(window.state()), type=type(window.state())))
    assert other.state() == window.state()
    for serial in range(200, 300):
        add(window, serial, context=10 << (serial % 7))
        add(other, serial, context=10 << (serial % 7))
    assert other.state() == window.state()


def test_unsound_states_are_refused() -> None:
    window = Window(8, 8)
    add(window, 0)
    state = window.state()
    rows = np.frombuffer(state.data).copy()
    for at, value in ((0, np.nan), (3, np.inf), (-4, 0.0), (-5, -1.0), (-3, 99.0)):
        bad = rows.copy()
        bad[at] = value
        with pytest.raises(ValueError, match="cannot be"):
            window.restore(msgspec.structs.replace(state, data=bad.tobytes()))
    for change in ({"rows": 2}, {"width": 3}, {"data": b""}):
        with pytest.raises(ValueError, match="layout"):
            window.restore(msgspec.structs.replace(state, **change))
    assert serials(window) == [0]


def test_impossible_capacities_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        Window(4, 5)
