"""One iteration's decision: how much prefill, and how prefill and decode share the device.

A mixed batch of the whole budget, if it meets the target; else the highest predicted rate among a mixed batch with
the prefill cut, and windows of both kinds on every division of the TPCs, all held to "no gap above τ". Forced modes
weigh what they force.
"""

from __future__ import annotations

import numpy as np

from sglang_ext.policy.explore import Explorer
from sglang_ext.policy.gaps import within
from sglang_ext.policy.prefill import offer
from sglang_ext.policy.table import FEASIBLE, best_rate, choose, decision
from sglang_ext.policy.types import CHUNKED, TEMPORAL, CandidateTable, Decision, FloatArray, Model, Settings, Situation
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
    return _chosen([weighing.window_plans()], "forced")


def _auto(weighing: Weighing, explorer: Explorer | None) -> Decision:
    settings = weighing.settings
    whole = weighing.whole_plan(TEMPORAL)
    fits = bool(whole[FEASIBLE, 0])
    share = settings.concurrent and not weighing.no_window()
    turn = explorer if explorer is not None and settings.explore and share and explorer.due() else None
    if fits and turn is None:
        return _decided(whole, "fits")
    others = [weighing.window_plans()] if share else []
    if not fits:
        others += weighing.cut_plans(max((best_rate(plans) for plans in others), default=0.0))
    table = CandidateTable(np.concatenate([whole, *others], axis=1))
    index, reason = (0, "fits") if fits else choose(table)
    other = turn.pick(table, index, weighing.situation.tbt_slo_s) if turn is not None else None
    return decision(table, index, reason) if other is None else decision(table, other, "explore")


def _held_to_slo(weighing: Weighing, mode: int, reason: str) -> Decision:
    whole = weighing.whole_plan(mode)
    if whole[FEASIBLE, 0]:
        return _decided(whole, reason)
    return _chosen([whole, *weighing.cut_plans()], reason)


def _duet(weighing: Weighing) -> Decision:
    whole = weighing.whole_plan(TEMPORAL)
    whole[FEASIBLE] = weighing.whole.mean_s <= within(weighing.situation.tbt_slo_s)
    if whole[FEASIBLE, 0]:
        return _decided(whole, "fits")
    return _chosen([whole, weighing.duet_plans()], "best")


def _chosen(rows: list[FloatArray], reason: str) -> Decision:
    """The best of ``rows``, for ``reason``; a violation is named as such, unless it stands in for another mode."""
    table = CandidateTable(np.concatenate(rows, axis=1))
    index, why = choose(table)
    return decision(table, index, reason if why == "best" or reason.startswith("fallback") else why)


def _decided(row: FloatArray, reason: str) -> Decision:
    return decision(CandidateTable(row), 0, reason)
