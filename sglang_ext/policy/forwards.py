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
    """Sizes of a window's prefill [p]: what each budget buys."""

    budgets: IntArray
    tokens: IntArray
    ended: IntArray
    """prompts that end in it"""


class Everything(NamedTuple):
    """What :meth:`Forwards.everything` predicts."""

    mixed: MixedTimes
    next_upper_s: float
    """The bound on the next iteration's decode step if that runs nothing else, which it always can."""
    sizes: Sizes
    windows: FloatArray
    """[3, 2 · p · n]: mean, bound and roofline of the steps of each size's divisions, then of their prefills"""


class Forwards:
    """Forwards of one situation's requests; what they have in common is prepared once."""

    def __init__(self, situation: Situation, offer: Offer, model: Model) -> None:
        self.offer = offer
        self.decodes = len(situation.decode_context)
        self._model = model
        self._batch = DecodeBatch(situation.decode_context)

    def mixed(self, budgets: IntArray) -> MixedTimes:
        """Every decode and the prefill that each budget [m] buys, on all TPCs; budget 0 is decode alone."""
        new = compose(self.offer, budgets)
        rows = np.add.reduce(finished(self.offer, new), axis=1) + self.decodes
        terms = self._model.terms(new, self.offer.cached, rows, self._model.total_tpcs, Decoding(self._batch))
        return MixedTimes(budgets, np.add.reduce(new, axis=1), *self._model.predict(terms))

    def everything(self, budgets: IntArray, grown: int, sizes: IntArray, layout: Layout) -> Everything:
        """:meth:`mixed` of ``budgets`` [m], the next decode step, and the halves of windows for each of ``sizes`` [p],
        each half beside the other where the layout runs them at once.

        By the next step contexts have ``grown``, and every prompt that the first of ``budgets`` ends decodes too.
        """
        offer, model = self.offer, self._model
        p, rows = len(sizes), arrange(layout, len(sizes), len(budgets))
        new = compose(offer, np.concatenate((sizes, budgets)))
        ended = finished(offer, new)
        tokens, ends = np.add.reduce(new, axis=1), np.add.reduce(ended, axis=1)

        q, context = new.take(rows.size, axis=0), np.empty((len(rows.size), len(offer.cached)))
        context[:] = offer.cached
        q[rows.following], context[rows.following] = ended[p], offer.cached + offer.new + grown
        decodes = Decoding(self._batch, rows.decodes, rows.grows * float(grown))
        logits = ends.take(rows.size) + self.decodes * rows.decodes
        terms = model.terms(q, context, logits, rows.tpcs, decodes)
        beside = terms.take(rows.beside) if layout.concurrent else None
        prediction = model.predict(terms.take(rows.own), beside)

        windows, at = rows.windows, rows.windows + 1
        mixed = MixedTimes(budgets, tokens[p:], *(time[at:] for time in prediction))
        halves = np.array([time[:windows] for time in prediction])
        next_upper_s = float(prediction.upper_s[windows])
        return Everything(mixed, next_upper_s, Sizes(sizes, tokens[:p], ends[:p]), halves)


class Arrangement(NamedTuple):
    """Rows of one call: the layout's forwards, the next decode step, mixed batches, and nothing at all.

    ``size`` says which composition each row prefills, of those of the windows' sizes and then the mixed batches';
    ``decodes`` whether it decodes, ``grows`` whether in longer contexts; all [r]. ``own`` and ``beside`` [w + 1 + m]
    pick what is predicted, windows first.
    """

    size: IntArray
    decodes: FloatArray
    grows: FloatArray
    tpcs: IntArray
    following: int
    own: IntArray
    beside: IntArray
    windows: int


