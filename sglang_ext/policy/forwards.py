"""The forwards that one decision asks the latency model about, in as few calls as their kinds allow.

A call costs far more than a row, so all that is needed when the whole offer does not fit is asked for in one call. The
decodes are summed once for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from learner.decodes import DecodeBatch, Decoding
from learner.latency import Prediction
from sglang_ext.policy.layout import Layout, arrange
from sglang_ext.policy.prefill import Offer, compose, finished
from sglang_ext.policy.types import FloatArray, IntArray, Model, Situation


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
    """What :meth:`Forwards.everything` predicts; of mixed batches, decode alone, the whole offer and smaller ones."""

    decode_alone: MixedTimes
    whole: MixedTimes
    smaller: MixedTimes
    next_upper_s: float
    """The bound on the next iteration's decode step if that runs nothing else, which it always can."""
    layout: Layout
    sizes: Sizes
    windows: Prediction
    """[2 · p · n]: the steps in each size's divisions of the layout, then their prefills"""


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

    def everything(self, smaller: IntArray, grown: int, sizes: IntArray, layout: Layout) -> Everything:
        """Mixed batches of ``smaller`` budgets [m] and the whole offer, and windows of each of ``sizes`` [p] in each
        division of ``layout``, their halves beside each other where they run at once.

        By the next decode step contexts have ``grown``, and every prompt that the whole offer ends decodes too.
        """
        offer, p = self.offer, len(sizes)
        rows = arrange(layout, p, len(smaller) + 2, grown)
        budgets = np.concatenate((sizes, (0, offer.most), smaller))
        new = compose(offer, budgets)
        ended = finished(offer, new)
        tokens, ends = np.add.reduce(new, axis=1), np.add.reduce(ended, axis=1)

        q, context = new.take(rows.composition, axis=0), np.empty((len(rows.tpcs), len(offer.cached)))
        context[:] = offer.cached
        q[rows.following] = ended[p + 1]
        context[rows.following] += offer.new + grown
        logits = ends.take(rows.composition) + self.decodes * rows.decodes
        decodes = Decoding(self._batch, rows.growth)
        terms = self._model.terms(q, context, logits, rows.tpcs, decodes)
        if layout.concurrent:
            prediction = self._model.predict_pairs(terms, rows.own, rows.beside)
        else:
            prediction = Prediction(*(time.take(rows.own) for time in self._model.predict(terms)))

        windows = len(layout.own)
        times = MixedTimes(budgets[p:], tokens[p:], *(time[windows + 1 :] for time in prediction))
        return Everything(
            times.row(0),
            times.row(1),
            times.rows(slice(2, None)),
            float(prediction.upper_s[windows]),
            layout,
            Sizes(sizes, tokens[:p], ends[:p]),
            Prediction(*(time[:windows] for time in prediction)),
        )
