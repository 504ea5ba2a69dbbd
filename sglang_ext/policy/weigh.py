"""The plans of one iteration, predicted when first asked for and in as few calls of the model as possible."""

from __future__ import annotations

from typing import NamedTuple

from sglang_ext.policy.chunk import coarse_budgets, fitting_budgets, largest_chunk, least_budget
from sglang_ext.policy.forwards import Batch, Batches, Forwards, Windows
from sglang_ext.policy.gaps import mixed_gap_s, within
from sglang_ext.policy.layout import Layout, lay_out, levels_on_offer
from sglang_ext.policy.pace import prefill_s
from sglang_ext.policy.prefill import Offer
from sglang_ext.policy.table import NO_RIVAL, SAME, Rival
from sglang_ext.policy.types import CHUNKED, RESERVED, SPATIAL, TEMPORAL, FloatArray, Model, Plan, Settings, Situation
from sglang_ext.policy.windows import DUET_SHARES, SHARES, best_windows, duet_windows, prefill_sizes

WINDOW_MODES: dict[str, tuple[int, ...]] = {
    "auto": (SPATIAL, RESERVED),
    "spatial": (SPATIAL,),
    "reserved": (RESERVED,),
    "duet": (SPATIAL,),
}


class Everything(NamedTuple):
    """What is asked of the model when the whole offer does not fit."""

    mixed: Batches
    """Of ascending budgets, the whole offer last, and alone unless smaller ones may be asked for."""
    decode_alone: Batch
    windows: Windows | None


class Weighing:
    """All plans for one situation that has both phases. ``whole`` is the mixed batch of the whole offer."""

    def __init__(self, situation: Situation, settings: Settings, model: Model, offered: Offer) -> None:
        self.situation, self.settings = situation, settings
        self._offered, self._tpcs, self._model = offered, model.total_tpcs, model
        self._forwards = Forwards(situation, offered, model, settings.graph_tokens)
        self._least = least_budget(offered, settings.least_chunk)
        self._fitting = fitting_budgets(settings.graph_tokens, self._forwards.decodes, offered.page)
        self._most_steps = min(situation.max_look_ahead, settings.max_look_ahead)
        self._levels = levels_on_offer(settings, model.total_tpcs) if settings.concurrent else ()
        self._overhead_s = situation.host_overhead_s + situation.waited_s
        self._everything: Everything | None = None
        # A call costs far more than a batch: what will be asked for when the whole does not fit is asked with it.
        if prefill_s(model, offered.most) + self._overhead_s < situation.tbt_slo_s:
            self.whole = self._forwards.mixed([offered.most]).at(0)
        else:
            self.whole = self._ask().mixed.at(-1)

    def _ask(self) -> Everything:
        if self._everything is None:
            budgets, divided = [self._offered.most], self._divide()
            if self._cuts():
                budgets = coarse_budgets(self._offered, self._least, self._fitting)
            if divided is None:
                mixed, windows = self._forwards.mixed([0, *budgets]), None
            else:
                mixed, windows = self._forwards.mixed_and_windows([0, *budgets], *divided, self._most_steps)
            rest = Batches(budgets, mixed.mean_s[1:], mixed.upper_s[1:], mixed.roofline_s[1:])
            self._everything = Everything(rest, mixed.at(0), windows)
        return self._everything

    def _divide(self) -> tuple[list[int], Layout] | None:
        """Sizes of the prefill, and the divisions in which to weigh windows of each."""
        mode, concurrent = self.settings.mode, self.settings.concurrent
        if mode not in WINDOW_MODES or self.no_window() or (mode == "auto" and not concurrent):
            return None
        sizes = prefill_sizes(self._offered, DUET_SHARES if mode == "duet" else SHARES, self._least)
        return sizes, lay_out(WINDOW_MODES[mode], self._levels, self._tpcs, concurrent, len(sizes))

    def _cuts(self) -> bool:
        """Whether smaller mixed batches may be asked for."""
        return self.settings.mode in ("auto", "chunked") or (
            self.settings.mode != "temporal" and bool(self.no_window())
        )

    def no_window(self) -> str:
        """Why no window is possible; empty if one is."""
        if self._most_steps < 1:
            return "no_look_ahead"
        return "no_division" if self.settings.concurrent and not self._levels else ""

    def whole_plan(self, mode: int) -> Plan:
        """The mixed batch of the whole offer."""
        return self._mixed_plan(mode, self.whole)

    def cut_plans(self, rival: Rival = NO_RIVAL) -> list[Plan]:
        """Smaller mixed batches, where the whole one breaks τ.

        The largest that keeps τ or, if even the least breaks it, that one, and the largest that comes close to it; and
        if the decodes have waited, or the host takes its time because a window has ended, decode alone. Where no chunk
        can reach the rate of a ``rival``, another feasible plan, the largest is not looked for closely; and the rates
        of chunks are over as much of the offer as the rival takes.
        """
        found = []
        mixed = self._ask().mixed
        if len(mixed.budgets) > 1:
            least_s = mixed.upper_s[0]
            # What the host takes anyway costs no gap.
            limit_s = max(within(self.situation.tbt_slo_s) - self._overhead_s, self.situation.host_period_s)
            # At the limit the mean is as far below the bound as it is for the whole: both batches are mixed.
            mean_s = limit_s * self.whole.mean_s / self.whole.upper_s
            rival_tokens = rival.tokens_per_s * (mean_s + self.situation.host_overhead_s) - self._forwards.decodes
            chunk = largest_chunk(
                mixed,
                self._forwards.mixed,
                self._offered,
                limit_s,
                SAME * (least_s + self._overhead_s),
                lambda tokens: tokens >= rival_tokens,
                self._fitting,
            )
            if least_s > limit_s:
                found.append(self._mixed_plan(CHUNKED, mixed.at(0)))
            found.append(self._mixed_plan(CHUNKED, chunk))
            found = [plan._replace(tokens_per_s=self._rate_over(rival.prefill_tokens, plan)) for plan in found]
        if self.situation.waited_s > 0 or self.situation.after_window:
            found.append(self._mixed_plan(TEMPORAL, self._ask().decode_alone))
        return found

    def windows_lose(self) -> bool:
        """Whether every window's first gap is so large that a mixed batch is certain to be chosen instead.

        Then none is feasible; and either a mixed batch is, or one violates τ by less than all windows, beyond what
        predictions can tell apart.
        """
        everything = self._ask()
        least_s = self._windows().least_step_upper_s + self._overhead_s + self.situation.drain_s
        mixed_s = max(everything.mixed.upper_s[0], self.situation.host_period_s) + self._overhead_s
        limit_s = within(self.situation.tbt_slo_s)
        return least_s > limit_s and (mixed_s <= limit_s or least_s > mixed_s * (1.0 + SAME))

    def window_plans(self) -> FloatArray:
        """The best window of each division, as columns of a candidate table [13, n]. There must be some."""
        return best_windows(self._windows(), self.situation, self._most_steps)

    def duet_plans(self) -> FloatArray:
        """Every plan that DuetServe's algorithm visits, likewise."""
        return duet_windows(self._windows(), self.situation, self._most_steps)

    def _windows(self) -> Windows:
        windows = self._ask().windows
        assert windows is not None, "no window is possible"
        return windows

    def _rate_over(self, budget: int, plan: Plan) -> float:
        """Tokens per second if so much of the offer is prefilled in chunks such as ``plan``'s.

        The first chunk of a prompt looks back on the least, and its last one may be small: the first alone would seem
        cheaper than what it is the beginning of. Full chunks are taken to become dearer evenly.
        """
        chunk, offered = int(plan.prefill_tokens), self._offered
        if budget <= chunk:
            return plan.tokens_per_s
        count, rest = (budget / chunk, 0) if budget < offered.most else divmod(budget, chunk)
        last = Forwards(self.situation, offered.after(budget - chunk), self._model, self.settings.graph_tokens)
        means_s = last.mixed([chunk, rest] if rest else [chunk]).mean_s
        first_s, last_s, *rest_s = (max(s, self.situation.host_period_s) for s in (plan.predicted_s, *means_s))
        batches = count + len(rest_s)
        taken_s = count * (first_s + last_s) / 2 + sum(rest_s) + batches * self.situation.host_overhead_s
        return (offered.tokens(budget) + batches * self._forwards.decodes) / taken_s

    def _mixed_plan(self, mode: int, batch: Batch) -> Plan:
        tokens = self._forwards.decodes + self._offered.tokens(batch.budget)
        return mixed_plan(mode, batch, tokens, self._forwards.decodes, self._tpcs, self.situation)


def mixed_plan(mode: int, batch: Batch, tokens: int, decodes: int, tpcs: int, situation: Situation) -> Plan:
    """One mixed batch of so many tokens; without decodes it brings no gap."""
    host_s, period_s = situation.host_overhead_s, situation.host_period_s
    gap_s = mixed_gap_s(batch.upper_s, host_s + situation.waited_s, period_s) if decodes else 0.0
    rate = tokens / (max(batch.mean_s, period_s) + host_s) if tokens else 0.0
    steps, feasible = 1 if decodes else 0, gap_s <= within(situation.tbt_slo_s)
    return Plan(mode, batch.budget, tpcs, tpcs, steps, *batch[1:], gap_s, rate, feasible, 0.0, gap_s)


def one_phase(situation: Situation, model: Model, offered: Offer) -> Plan:
    """Decode alone, or the whole prefill alone, or nothing at all.

    Prefill alone is not predicted, its times are 0: there is nothing to choose, and the device is idle meanwhile.
    """
    decodes = len(situation.decode_context)
    if decodes:
        batch = Forwards(situation, offered, model).mixed([0]).at(0)
        return mixed_plan(TEMPORAL, batch, decodes, decodes, model.total_tpcs, situation)
    return Plan(TEMPORAL, offered.most, model.total_tpcs, model.total_tpcs, 0, *(0.0,) * 5, True, 0.0, 0.0)
