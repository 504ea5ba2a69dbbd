"""Which prefill tokens a budget buys: requests in the given order, the last one cut.

The count follows SGLang's admission (``PrefillAdder``), so that what is predicted is what will run: a prompt that fits
whole takes whole pages of the budget, and a chunk that is not its prompt's last ends on a page boundary.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from sglang_ext.policy.types import IntArray, Situation


class Offer(NamedTuple):
    """The waiting requests that the largest budget reaches, in order.

    ``new``, ``cached`` [n]: uncached and cached tokens. ``start`` [n + 1]: budget used up before each request and after
    the last; ``starts`` the same as a list. ``most``: the smallest budget, a multiple of ``page``, that takes all that
    the largest one can; 0 if nothing can be taken, because nothing waits or because the largest budget is less than a
    page. The budgets that the methods take are whole pages, at most ``most``.
    """

    new: IntArray
    cached: IntArray
    start: IntArray
    starts: list[int]
    most: int
    page: int

    def split(self, budgets: list[int]) -> tuple[IntArray, IntArray]:
        """How many prompts each budget [m] takes whole, and how many tokens of the next; each [m]."""
        asked = np.fromiter(budgets, np.int64, len(budgets))
        whole = self.start[1:].searchsorted(asked, "right")
        return whole, asked - self.start.take(whole)

    def prompts(self, budget: int) -> int:
        """How many prompts a budget takes whole."""
        return bisect_right(self.starts, budget) - 1

    def tokens(self, budget: int) -> int:
        """How many tokens a budget buys: fewer than it is where prompts end off a page."""
        if self.page == 1:
            return budget
        whole = self.prompts(budget)
        taken: list[int] = self.new[:whole].tolist()
        return sum(taken) + budget - self.starts[whole]

    def after(self, budget: int) -> Offer:
        """What is left when a budget below the most has been used."""
        whole = self.prompts(budget)
        part = budget - self.starts[whole]
        new, cached = self.new[whole:].copy(), self.cached[whole:].copy()
        new[0] -= part
        cached[0] += part
        starts = [0, *(start - budget for start in self.starts[whole + 1 :])]
        return Offer(new, cached, np.array(starts, dtype=np.int64), starts, self.most - budget, self.page)


def offer(situation: Situation) -> Offer:
    """Cut the queue to what the situation's budget can reach."""
    page = situation.page_size
    pages = max(situation.prefill_budget // page, 0)
    budget, starts, used = pages * page, [0], 0
    for tokens in situation.prefill_new[:pages].tolist():
        used += tokens if page == 1 else -(-tokens // page) * page
        starts.append(used)
        if used >= budget:
            break
    new, cached = situation.prefill_new[: len(starts) - 1], situation.prefill_cached[: len(starts) - 1]
    return Offer(new, cached, np.fromiter(starts, np.int64, len(starts)), starts, min(budget, used), page)


def ran_as_weighed(situation: Situation, budget: int, q: list[int], c: list[int]) -> bool:
    """Whether a batch with new and cached tokens ``q`` and ``c`` per request, its decodes last, is the mixed batch that
    ``budget`` was weighed as. Admission matches prefixes anew and may find less room."""
    prompts, page = len(q) - len(situation.decode_context), situation.page_size
    if prompts < 1:
        return False
    left = budget
    planned = zip(situation.prefill_new.tolist(), situation.prefill_cached.tolist(), strict=True)
    for tokens, cached, (new, had) in zip(q[:prompts], c[:prompts], planned, strict=False):
        if tokens != min(new, left) or cached != had:
            return False
        left -= -(-new // page) * page
    return left <= 0 or prompts == len(situation.prefill_new)
