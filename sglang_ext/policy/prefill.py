"""Which prefill tokens a budget buys: requests in the given order, the last one cut.

The count follows SGLang's admission (``PrefillAdder``), so that what is predicted is what will run: a prompt that fits
whole takes whole pages of the budget, and a chunk that is not its prompt's last ends on a page boundary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sglang_ext.policy.types import BoolArray, IntArray, Situation


class Offer(NamedTuple):
    """The waiting requests that the largest budget reaches, in order.

    ``new``, ``cached`` [n]: uncached and cached tokens. ``start`` [n]: budget used up before each request.
    ``most``: the smallest budget, a multiple of ``page``, that takes all that the largest one can; 0 if nothing
    can be taken, because nothing waits or because the largest budget is less than a page.
    """

    new: IntArray
    cached: IntArray
    start: IntArray
    most: int
    page: int


def offer(situation: Situation) -> Offer:
    """Cut the queue to what the situation's budget can reach."""
    page = situation.page_size
    budget = situation.prefill_budget // page * page
    reach = max(budget // page, 0)
    new, cached = situation.prefill_new[:reach], situation.prefill_cached[:reach]
    paged = new if page == 1 else -(-new // page) * page
    end = paged.cumsum()
    count = int(end.searchsorted(budget)) + 1
    new, cached, paged, end = new[:count], cached[:count], paged[:count], end[:count]
    most = min(budget, int(end[-1])) if len(end) else 0
    return Offer(new, cached, end - paged, most, page)


def compose(offer: Offer, budgets: IntArray) -> IntArray:
    """New tokens per request [m, n] for each budget [m], all multiples of the page."""
    composed: IntArray = np.minimum(np.maximum(budgets[:, None] - offer.start, 0), offer.new)
    return composed


def finished(offer: Offer, composed: IntArray) -> BoolArray:
    """Which requests end their prompt [m, n] under each composition [m, n]."""
    return np.equal(composed, offer.new)
