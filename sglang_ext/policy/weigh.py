"""The plans of one iteration, predicted when first asked for and in as few calls of the model as possible."""

from __future__ import annotations

import numpy as np

from sglang_ext.policy.chunk import coarse_budgets, largest_chunk
from sglang_ext.policy.duet import duet
from sglang_ext.policy.forwards import Everything, Forwards, MixedTimes
from sglang_ext.policy.gaps import mixed_gap_s, within
from sglang_ext.policy.layout import Layout, lay_out, levels_on_offer
from sglang_ext.policy.pace import prefill_curve
from sglang_ext.policy.prefill import Offer
from sglang_ext.policy.table import SAME, plans
from sglang_ext.policy.types import (
    CHUNKED,
    RESERVED,
    SPATIAL,
    TEMPORAL,
    FloatArray,
    IntArray,
    Model,
    Settings,
    Situation,
)
from sglang_ext.policy.windows import DUET_SHARES, SHARES, as_windows, best_windows, lay_down, prefill_sizes, weigh

WINDOW_MODES: dict[str, tuple[int, ...]] = {
    "auto": (SPATIAL, RESERVED),
    "spatial": (SPATIAL,),
    "reserved": (RESERVED,),
    "duet": (SPATIAL,),
}
NOTHING = np.zeros(0, dtype=np.int64)


class Weighing:
    """All plans for one situation that has both phases. ``whole`` is the mixed batch of the whole offer."""

    def __init__(self, situation: Situation, settings: Settings, model: Model, offered: Offer) -> None:
        self.situation, self.settings = situation, settings
        self._model, self._offered = model, offered
        self._forwards = Forwards(situation, offered, model)
        self._most_steps = min(situation.max_look_ahead, settings.max_look_ahead)
        self._levels = levels_on_offer(settings, model.total_tpcs) if settings.concurrent else ()
        self._everything: Everything | None = None
        # A call costs far more than a row: what will be asked for when the whole does not fit is asked with it.
        if float(np.interp(offered.most, *prefill_curve(model))) + self._overhead_s() < situation.tbt_slo_s:
            self.whole = self._forwards.mixed(np.array([offered.most]))
        else:
            self.whole = self._ask().whole

    def _ask(self) -> Everything:
        if self._everything is None:
            budgets, (sizes, layout) = coarse_budgets(self._offered), self._divisions()
            self._everything = self._forwards.everything(budgets, self._most_steps, sizes, layout)
        return self._everything

    def _divisions(self) -> tuple[IntArray, Layout]:
        """Sizes of the prefill [p], and the divisions in which to weigh windows of each."""
        settings, total_tpcs = self.settings, self._model.total_tpcs
        modes = () if self.no_window() else WINDOW_MODES.get(settings.mode, ())
        sizes = prefill_sizes(self._offered, DUET_SHARES if settings.mode == "duet" else SHARES) if modes else NOTHING
        return sizes, lay_out(modes, self._levels, total_tpcs, settings.concurrent, len(sizes))

    def no_window(self) -> str:
        """Why no window is possible; empty if one is."""
        if self._most_steps < 1:
            return "no_look_ahead"
        return "no_division" if self.settings.concurrent and not self._levels else ""

    def whole_plan(self, mode: int) -> FloatArray:
        """The mixed batch of the whole offer, as a column of a candidate table [12, 1]."""
        return self._mixed_plan(mode, self.whole)

    def cut_plans(self, rival_rate: float = 0.0) -> list[FloatArray]:
        """Smaller mixed batches, where the whole one breaks τ, as columns of a candidate table.

        The largest that keeps τ or, if even a page breaks it, a page, and the largest that comes close to that; and if
        the decodes have waited, decode alone. Where no chunk can reach ``rival_rate`` (tokens per second, of another
        feasible plan) the largest is not looked for closely.
        """
        found = []
        coarse = self._ask().smaller
        if len(coarse.budgets):
            overhead_s = self._overhead_s()
            limit_s = within(self.situation.tbt_slo_s) - overhead_s
            tolerance_s = SAME * (float(coarse.upper_s[0]) + overhead_s)
            # At the limit the mean is as far below the bound as it is for the whole: both batches are mixed.
            mean_s = limit_s * float(self.whole.mean_s[0]) / float(self.whole.upper_s[0])
            rival_tokens = rival_rate * (mean_s + self.situation.host_overhead_s) - self._forwards.decodes
            chunk = largest_chunk(
                coarse,
                self.whole,
                self._forwards.mixed,
                self._offered,
                limit_s,
                tolerance_s,
                lambda tokens: tokens >= rival_tokens,
            )
            if float(coarse.upper_s[0]) > limit_s:
                found.append(self._mixed_plan(CHUNKED, coarse.row(0)))
            found.append(self._mixed_plan(CHUNKED, chunk))
        if self.situation.waited_s > 0:
            found.append(self._mixed_plan(TEMPORAL, self._ask().decode_alone))
        return found

    def window_plans(self) -> FloatArray:
        """The best window of each division, as columns of a candidate table [12, n]."""
        everything = self._ask()
        return best_windows(
            as_windows(everything), everything.layout, self.situation, everything.next_upper_s, self._most_steps
        )

    def duet_plans(self) -> FloatArray:
        """Every plan that DuetServe's algorithm visits, by its own constraint and objective, likewise."""
        situation, everything = self.situation, self._ask()
        layout, windows = everything.layout, as_windows(everything)
        visited = duet(
            windows.halves.decode_s[0],
            windows.halves.prefill_s[0],
            self._forwards.decodes,
            int(windows.prefill_tokens[0, 0]),
            situation.tbt_slo_s,
            self._most_steps,
            layout.concurrent,
        )
        weighed = weigh(windows, situation, visited.steps[:, None], everything.next_upper_s, layout.concurrent)
        weighed = weighed._replace(tokens_per_s=visited.tokens_per_s[:, None])
        by_division = np.arange(visited.steps.size).reshape(visited.steps.shape).T.ravel()
        return lay_down(windows, layout, weighed, visited.allowed[:, None], by_division)

    def _overhead_s(self) -> float:
        return self.situation.host_overhead_s + self.situation.waited_s

    def _mixed_plan(self, mode: int, times: MixedTimes) -> FloatArray:
        return mixed_plan(mode, times, self._forwards.decodes, self._model.total_tpcs, self.situation)


def mixed_plan(mode: int, times: MixedTimes, decodes: int, tpcs: int, situation: Situation) -> FloatArray:
    """One mixed batch as a column of a candidate table [12, 1]; without decodes it brings no gap."""
    mean_s, upper_s, host_s = float(times.mean_s[0]), float(times.upper_s[0]), situation.host_overhead_s
    gap_s = mixed_gap_s(upper_s, host_s + situation.waited_s) if decodes else 0.0
    tokens = decodes + int(times.prefill_tokens[0])
    return plans(
        1,
        mode=mode,
        prefill_tokens=times.budgets,
        prefill_tpcs=tpcs,
        decode_tpcs=tpcs,
        look_ahead_steps=1 if decodes else 0,
        predicted_s=mean_s,
        upper_s=upper_s,
        roofline_s=times.roofline_s,
        largest_gap_s=gap_s,
        tokens_per_s=tokens / (mean_s + host_s) if tokens else 0.0,
        feasible=gap_s <= within(situation.tbt_slo_s),
        left_s=0.0,
    )


def one_phase(situation: Situation, model: Model, offered: Offer) -> FloatArray:
    """Decode alone, or the whole prefill alone, or nothing at all, as a column of a candidate table [12, 1]."""
    decodes, tpcs = len(situation.decode_context), model.total_tpcs
    if decodes or offered.most:
        times = Forwards(situation, offered, model).mixed(np.array([offered.most]))
        return mixed_plan(TEMPORAL, times, decodes, tpcs, situation)
    nothing = np.zeros(1, dtype=np.int64)
    return mixed_plan(TEMPORAL, MixedTimes(nothing, nothing, *np.zeros((3, 1))), 0, tpcs, situation)
