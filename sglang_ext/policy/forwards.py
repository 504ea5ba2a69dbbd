"""The forwards that one decision asks the latency model about, in as few calls as their kinds allow.

A call costs far more than a row, so each kind of forward is one call over all its candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_ext.policy.layout import Layout
from sglang_ext.policy.prefill import Offer, compose, finished
from sglang_ext.policy.types import FloatArray, IntArray, Model, Situation

if TYPE_CHECKING:
    from learner.latency import Prediction, Terms


class MixedTimes(NamedTuple):
    """Mixed batches [m], one per budget: the prefill tokens carried and the predicted times."""

    budgets: IntArray
    prefill_tokens: IntArray
    mean_s: FloatArray
    upper_s: FloatArray
    roofline_s: FloatArray

    def rows(self, part: slice) -> MixedTimes:
        """Some of them."""
        return MixedTimes(
            self.budgets[part], self.prefill_tokens[part], self.mean_s[part], self.upper_s[part], self.roofline_s[part]
        )

    def row(self, index: int) -> MixedTimes:
        """One of them."""
        return self.rows(slice(index, index + 1))


class Sizes(NamedTuple):
    """Sizes of the prefill [p]: what each budget buys."""

    budgets: IntArray
    tokens: IntArray
    ended: IntArray
    """prompts that end in it"""


class Forwards:
    """Forwards of one situation's requests; what they have in common is prepared once."""

    def __init__(self, situation: Situation, offer: Offer, model: Model) -> None:
        self.offer = offer
        self.decodes = len(situation.decode_context)
        self._model = model
        self._context = np.concatenate([situation.decode_context, offer.cached]).astype(np.float64)

    def mixed(self, budgets: IntArray) -> MixedTimes:
        """Every decode and the prefill that each budget [m] buys, on all TPCs; budget 0 is decode alone."""
        q, new = self._mixed_rows(budgets, len(budgets))
        rows = finished(self.offer, new).sum(axis=1) + self.decodes
        terms = self._model.terms(q, self._contexts(len(q)), rows, self._model.total_tpcs)
        return self._mixed_times(budgets, new, self._model.predict(terms))

    def mixed_and_following(self, budgets: IntArray, grown: int) -> tuple[MixedTimes, float]:
        """:meth:`mixed`, and the bound on the next iteration's decode step if that runs nothing else.

        By then contexts have ``grown``, and every prompt that the first budget ends decodes too. The next iteration
        can always run this step, so it bounds how soon that makes a token.
        """
        count, decodes = len(budgets), self.decodes
        q, new = self._mixed_rows(budgets, count + 1)
        ended = finished(self.offer, new)
        q[count, decodes:] = ended[0]
        context = self._contexts(count + 1)
        context[count, decodes:] += self.offer.new
        context[count] += grown
        rows = np.empty(count + 1)
        rows[:count] = ended.sum(axis=1)
        rows[count] = rows[0]
        prediction = self._model.predict(self._model.terms(q, context, rows + decodes, self._model.total_tpcs))
        return self._mixed_times(budgets, new, prediction), float(prediction.upper_s[count])

    def halves(self, budgets: IntArray, layout: Layout) -> tuple[Sizes, Terms]:
        """The halves of windows: a decode step on each of the layout's ``step_tpcs``, and then a prefill for each
        budget [p] on each of its ``part_tpcs``, budget by budget.
        """
        new = compose(self.offer, budgets)
        sizes = Sizes(budgets, new.sum(axis=1), finished(self.offer, new).sum(axis=1))
        steps, parts = len(layout.step_tpcs), len(layout.part_tpcs)
        q = np.zeros((steps + len(budgets) * parts, len(self._context)))
        q[:steps, : self.decodes] = 1.0
        q[steps:, self.decodes :] = np.repeat(new, parts, axis=0)
        rows = np.empty(len(q))
        rows[:steps] = self.decodes
        rows[steps:] = np.repeat(sizes.ended, parts)
        return sizes, self._model.terms(q, self._contexts(len(q)), rows, layout.tpcs)

    def _contexts(self, rows: int) -> FloatArray:
        contexts = np.empty((rows, len(self._context)))
        contexts[:] = self._context
        return contexts

    def _mixed_rows(self, budgets: IntArray, rows: int) -> tuple[FloatArray, IntArray]:
        new = compose(self.offer, budgets)
        q = np.empty((rows, len(self._context)))
        q[:, : self.decodes] = 1.0
        q[: len(budgets), self.decodes :] = new
        return q, new

    def _mixed_times(self, budgets: IntArray, new: IntArray, prediction: Prediction) -> MixedTimes:
        count = len(budgets)
        mean_s, upper_s, roofline_s = prediction
        return MixedTimes(budgets, new.sum(axis=1), mean_s[:count], upper_s[:count], roofline_s[:count])
