from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.sizes import INERTIA, MOST_SHIFT, MOST_SIZES, Sizes, learn_sizes

samples = st.lists(st.tuples(st.integers(1, 100), st.floats(-1.0, 1.0)), max_size=200)


@given(samples)
def test_every_size_gets_the_median_of_its_own(drawn) -> None:
    tokens, residual = (np.array([each[at] for each in drawn], dtype=float) for at in (0, 1))
    sizes, shift = learn_sizes(tokens, residual)
    assert sizes == sorted(set(sizes))
    assert len(shift) == len(sizes) <= MOST_SIZES
    for size, one in zip(sizes, shift, strict=True):
        own = residual[tokens == size]
        expected = np.median(own) * len(own) / (len(own) + INERTIA)
        assert one == pytest.approx(np.clip(expected, -MOST_SHIFT, MOST_SHIFT))
    counts = {size: int((tokens == size).sum()) for size in set(tokens.tolist())}
    left_out = [count for size, count in counts.items() if size not in sizes]
    assert not left_out or (len(sizes) == MOST_SIZES and max(left_out) <= min(counts[size] for size in sizes))


@given(st.sets(st.integers(1, 100), max_size=MOST_SIZES), st.lists(st.integers(0, 120), max_size=40))
def test_only_exact_sizes_are_shifted(known, asked) -> None:
    sizes = sorted(map(float, known))
    shift = [0.001 * size for size in sizes]
    got = Sizes(sizes, shift).shift(np.array(asked, dtype=float))
    np.testing.assert_allclose(got, [0.001 * n if n in known else 0.0 for n in asked])
