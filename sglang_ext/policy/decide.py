"""One iteration's decision: how much prefill, and how prefill and decode share the device.

A mixed batch of the whole budget, if it meets the target; else the highest predicted rate among a mixed batch with
the prefill cut, and windows of both kinds on every division of the TPCs, all held to "no gap above τ". Forced modes
weigh what they force.
"""

from __future__ import annotations

from sglang_ext.policy.explore import Explorer
from sglang_ext.policy.gaps import within
from sglang_ext.policy.prefill import offer
from sglang_ext.policy.table import best_rival, choose, decision
from sglang_ext.policy.types import (
    CHUNKED,
    NO_PLANS,
    TEMPORAL,
    CandidateTable,
    Decision,
    Model,
    Plan,
    Settings,
    Situation,
)
from sglang_ext.policy.weigh import Weighing, one_phase


def decide(situation: Situation, settings: Settings, model: Model, explorer: Explorer | None = None) -> Decision:
    """Decide one iteration. Pure but for the explorer's count of its turns.

    - One phase absent: the other alone, prefill with the whole budget (``idle``). τ binds nothing then, or nothing
      could be traded for it.
    - ``auto``: in the article's order. The mixed batch if it ``fits``; else the ``best`` feasible plan, else the
      ``least_violation``. Windows are weighed only where the device is ``concurrent`` and there is room for k ≥ 1.
      After a window, decode alone is a plan too: it pays for the wait that the window left behind.
    - ``temporal``: the mixed batch of the whole budget, whatever τ. ``chunked``: the same, cut to τ.
    - ``spatial``, ``reserved``: a window, the best feasible one or the least violation. It is impossible without room
      for look-ahead (``fallback:no_look_ahead``) and, on a concurrent device, without a division
      (``fallback:no_division``); then the mixed batch, cut to τ.
    - ``duet``: DuetServe's algorithm (:mod:`sglang_ext.policy.duet`), its windows as published.
    - ``explore``: now and then ``auto`` on a concurrent device runs another mode's plan than the best.
    """
    offered = offer(situation)
    if len(situation.decode_context) == 0 or offered.most == 0:
        return _decided(one_phase(situation, model, offered), "idle")
    weighing = Weighing(situation, settings, model, offered)
    mode = settings.mode
    if mode == "temporal":
        return _decided(weighing.whole_plan(TEMPORAL), "forced")
    if mode == "auto":
        return _auto(weighing, explorer)
    if mode == "chunked":
        return _held_to_slo(weighing, CHUNKED, "forced")
    if why := weighing.no_window():
        return _held_to_slo(weighing, TEMPORAL, f"fallback:{why}")
    if mode == "duet":
        return _duet(weighing)
    return _chosen(CandidateTable(weighing.window_plans()), "forced")


def _auto(weighing: Weighing, explorer: Explorer | None) -> Decision:
    settings = weighing.settings
    whole = weighing.whole_plan(TEMPORAL)
    share = settings.concurrent and not weighing.no_window()
    turn = explorer if explorer is not None and settings.explore and share and explorer.due() else None
    if whole.feasible and turn is None:
        return _decided(whole, "fits")
    windows = weighing.window_plans() if share and not weighing.windows_lose() else NO_PLANS
    cut = [] if whole.feasible else weighing.cut_plans(best_rival(windows))
    table = CandidateTable(windows, [whole], cut)
    index, reason = (0, "fits") if whole.feasible else choose(table)
    other = turn.pick(table, index, weighing.situation.tbt_slo_s) if turn is not None else None
    return decision(table, index, reason) if other is None else decision(table, other, "explore")


def _held_to_slo(weighing: Weighing, mode: int, reason: str) -> Decision:
    whole = weighing.whole_plan(mode)
    if whole.feasible:
        return _decided(whole, reason)
    return _chosen(CandidateTable(first=[whole], last=weighing.cut_plans()), reason)


def _duet(weighing: Weighing) -> Decision:
    fits = weighing.whole.mean_s <= within(weighing.situation.tbt_slo_s)
    whole = weighing.whole_plan(TEMPORAL)._replace(feasible=fits)
    if fits:
        return _decided(whole, "fits")
    return _chosen(CandidateTable(weighing.duet_plans(), [whole]), "best")


def _chosen(table: CandidateTable, reason: str) -> Decision:
    """The best of ``table``, for ``reason``; a violation is named as such, unless it stands in for another mode."""
    index, why = choose(table)
    return decision(table, index, reason if why == "best" or reason.startswith("fallback") else why)


def _decided(plan: Plan, reason: str) -> Decision:
    return decision(CandidateTable(first=[plan]), 0, reason)
