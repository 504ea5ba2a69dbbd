"""The batches that one decision asks the latency model about, in as few calls as can be.

A call costs far more than a batch, so all that is needed when the whole offer does not fit is asked for in one call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import numpy as np

from learner.outlook import Following
from sglang_ext.policy.layout import Layout
from sglang_ext.policy.prefill import Offer
from sglang_ext.policy.types import FloatArray, Model, Situation


class Batch(NamedTuple):
    """A mixed batch on all TPCs and its predicted times."""

    budget: int
    mean_s: float
    upper_s: float
    roofline_s: float


class Batches(NamedTuple):
    """Mixed batches, one per budget, and their predicted times."""

    budgets: list[int]
    mean_s: list[float]
    upper_s: list[float]
    roofline_s: list[float]

    def at(self, index: int) -> Batch:
        """One of them."""
        return Batch(self.budgets[index], self.mean_s[index], self.upper_s[index], self.roofline_s[index])


class Windows(NamedTuple):
    """Windows of p sizes of the prefill in every division of a layout, size by size: w = p · n."""

    layout: Layout
    least_step_upper_s: float
    """The bound on one step is no less in any of them."""
    next_upper_s: float
    """The bound on the next iteration's decode step if that runs nothing else, which it always can."""
    details: Callable[[], tuple[FloatArray, FloatArray]]
    """Of each size: prefill budget and the tokens that it buys [2, p]; mean, bound and roofline of one step of each
    window, then of the prefills [3, 2 · w]. To be asked for, if at all, before anything else is predicted."""


class Forwards:
    """Batches of one situation's requests; what they have in common is prepared once."""

    def __init__(self, situation: Situation, offer: Offer, model: Model, graph_tokens: tuple[int, ...] = ()) -> None:
        self.decodes = len(situation.decode_context)
        self._offer = offer
        self._eager_s = situation.eager_launch_s if self.decodes else 0.0
        self._largest_graph = graph_tokens[-1] if graph_tokens else 0
        self._outlook = model.outlook(offer.new, offer.cached, situation.decode_context)

    def mixed(self, budgets: list[int]) -> Batches:
        """Every decode and the prefill that each budget buys, on all TPCs; budget 0 is decode alone."""
        times = self._outlook.predict(*self._offer.split([*budgets, *_padding(len(budgets))]))
        return self._batches(budgets, times)

    def mixed_and_windows(
        self, budgets: list[int], sizes: list[int], layout: Layout, grown: int
    ) -> tuple[Batches, Windows]:
        """The same, and all windows with a prefill of each of ``sizes`` in the layout made for so many, their halves
        beside each other where they run at once.

        By the next decode step contexts have ``grown``, and every prompt that the whole offer ends decodes too.
        """
        offer, p, n = self._offer, len(sizes), len(layout.decode_tpcs)
        # The windows' own decode step, which runs beside their prefills or else alone, then the next iteration's.
        whole, part = offer.split([*sizes, 0, 0, *budgets, *_padding(p + 2 + len(budgets))])
        following = Following(offer.prompts(offer.most), grown)
        times = self._outlook.predict(whole, part, p, following, layout.pairs)
        prefills_s, times = (None, times) if layout.concurrent else (times[:, :p], times[:, p:])

        def details() -> tuple[FloatArray, FloatArray]:
            of_sizes = sizes, [offer.tokens(size) for size in sizes]
            if prefills_s is None:
                halves_s = self._outlook.beside()
            else:
                steps_s = times[:, :1].repeat(p * n, axis=1)
                halves_s = np.concatenate((steps_s, prefills_s.repeat(n, axis=1)), axis=1)
            return np.fromiter(chain(*of_sizes), np.float64, 2 * p).reshape(2, p), halves_s

        windows = Windows(layout, float(times[1, 0]), float(times[1, 1]), details)
        return self._batches(budgets, times[:, 2:]), windows

    def _batches(self, budgets: list[int], times: FloatArray) -> Batches:
        """The first of ``times`` are those of ``budgets``. What is launched kernel by kernel is bound later: the host
        cannot hand over the tokens of the batch before until the device, which it ran ahead of, has nearly ended that
        one and the rest is launched too."""
        batches = Batches(budgets, *times[:, : len(budgets)].tolist())
        eager_s, upper_s = self._eager_s, batches.upper_s
        if eager_s:
            first = bisect_right(budgets, 0, key=lambda budget: budget and self._is_eager(budget))
            for index in range(first, len(budgets)):
                if upper_s[index] > eager_s:
                    upper_s[index] += eager_s
        return batches

    def _is_eager(self, budget: int) -> bool:
        return self.decodes + self._offer.tokens(budget) > self._largest_graph


def _padding(batches: int) -> list[int]:
    """Decode steps that round up a number of batches, so that the model sees few numbers of them."""
    return [0] * (-batches % 16) if batches > 1 else []
