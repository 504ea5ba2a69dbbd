"""The policy's rules once more, one plan at a time and in plain loops, to check it against."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sglang_ext.policy.types import Settings, Situation


@dataclass(frozen=True)
class Plan:
    mode: str
    budget: int
    decode_tpcs: int
    prefill_tpcs: int
    steps: int
    predicted_s: float
    upper_s: float
    gap_s: float
    rate: float
    violation_s: float

    def keeps(self, tbt_slo_s: float) -> bool:
        return self.gap_s <= tbt_slo_s * (1 + 1e-9)


def admit(new: list[int], budget: int, page: int) -> list[int]:
    """SGLang's admission: whole prompts in whole pages, then a chunk of whole pages, then no more."""
    taken = []
    for tokens in new:
        if -(-tokens // page) * page <= budget:
            taken.append(tokens)
            budget -= -(-tokens // page) * page
        else:
            taken.append(budget // page * page)
            budget = 0
    return taken


def largest_budget(s: Situation) -> int:
    budget = s.prefill_budget // s.page_size * s.page_size
    return min(budget, sum(-(-int(n) // s.page_size) * s.page_size for n in s.prefill_new))


def forward(model, q, c, rows, tpcs, beside=None):
    terms = model.terms(np.array([q]), np.array([c]), rows, tpcs)
    other = None if beside is None else model.terms(np.array([beside[0]]), np.array([beside[1]]), *beside[2:])
    mean_s, upper_s, _ = model.predict(terms, other)
    return float(mean_s[0]), float(upper_s[0])


def mixed(s: Situation, model, budget: int, mode: str) -> Plan:
    new = admit(s.prefill_new.tolist(), budget, s.page_size)
    q = [1] * len(s.decode_context) + new
    c = s.decode_context.tolist() + s.prefill_cached.tolist()
    rows = len(s.decode_context) + sum(a == b for a, b in zip(new, s.prefill_new.tolist(), strict=True))
    mean_s, upper_s = forward(model, q, c, rows, model.total_tpcs)
    tokens = len(s.decode_context) + sum(new)
    gap_s = s.waited_s + s.host_overhead_s + max(upper_s, s.host_period_s) if len(s.decode_context) else 0.0
    tpcs, lasts_s = model.total_tpcs, max(mean_s, s.host_period_s) + s.host_overhead_s
    return Plan(mode, budget, tpcs, tpcs, 1, mean_s, upper_s, gap_s, tokens / lasts_s, gap_s)


def over(s: Situation, model, budget: int, first: Plan) -> Plan:
    """``first`` with the rate of so much of the offer in chunks of its size, which become dearer evenly."""
    chunk, most = first.budget, largest_budget(s)
    if budget <= chunk:
        return first
    new, cached = s.prefill_new.tolist(), s.prefill_cached.tolist()
    skip = budget - chunk
    while skip:
        pages = -(-new[0] // s.page_size) * s.page_size
        if pages <= skip:
            skip -= pages
            del new[0], cached[0]
        else:
            new[0], cached[0], skip = new[0] - skip, cached[0] + skip, 0
    later = replace(s, prefill_new=np.array(new), prefill_cached=np.array(cached), prefill_budget=most)

    def lasts_s(plan: Plan) -> float:
        return max(plan.predicted_s, s.host_period_s) + s.host_overhead_s

    count, rest = (budget / chunk, 0) if budget < most else divmod(budget, chunk)
    lasting_s = count * (lasts_s(first) + lasts_s(mixed(later, model, chunk, "chunked"))) / 2
    if rest:
        lasting_s += lasts_s(mixed(later, model, rest, "chunked"))
    tokens = sum(admit(s.prefill_new.tolist(), budget, s.page_size)) + (count + bool(rest)) * len(s.decode_context)
    return replace(first, rate=tokens / lasting_s)


def halves(s: Situation, model, budget, decode_tpcs, prefill_tpcs, concurrent):
    """Prefill tokens per request, ended prompts, and (mean, bound) of a decode step and of the prefill."""
    new = admit(s.prefill_new.tolist(), budget, s.page_size)
    ended = sum(a == b for a, b in zip(new, s.prefill_new.tolist(), strict=True))
    decode = ([1] * len(s.decode_context), s.decode_context.tolist(), len(s.decode_context), decode_tpcs)
    prefill = (new, s.prefill_cached.tolist(), ended, prefill_tpcs)
    step = forward(model, *decode, prefill if concurrent else None)
    return new, ended, step, forward(model, *prefill, decode if concurrent else None)


def window(s: Situation, model, mode, budget, decode_tpcs, prefill_tpcs, k, most_steps, concurrent) -> Plan:
    new, _, (t_d, u_d), (t_p, u_p) = halves(s, model, budget, decode_tpcs, prefill_tpcs, concurrent)
    # The next iteration's decode step, with all prompts that could have ended.
    whole = admit(s.prefill_new.tolist(), largest_budget(s), s.page_size)
    joined = [n + c for n, c, q in zip(s.prefill_new, s.prefill_cached, whole, strict=True) if q == n]
    contexts = [c + most_steps for c in [*s.decode_context.tolist(), *joined]]
    _, following = forward(model, [1] * len(contexts), contexts, len(contexts), model.total_tpcs)
    before, after = s.host_overhead_s + s.drain_s, s.after_window_s
    if concurrent:
        predicted, upper = max(k * t_d, t_p), max(k * u_d, u_p)
        # Decode goes on beside a prefill that outlasts its k steps, and what is queued runs when it ends.
        most = min(2 * k + 2, most_steps)
        waits = [u_p - most * t_d, 0.0]
    else:
        predicted, upper = k * t_d + t_p, k * u_d + u_p
        waits = [u_p]
    gaps = sorted((s.waited_s + before + u_d, max(waits) + after + following))
    rate = (k * len(s.decode_context) + sum(new)) / (predicted + before + after)
    violation = gaps[1] + max(gaps[0] - s.tbt_slo_s, 0.0)
    return Plan(mode, budget, decode_tpcs, prefill_tpcs, k, predicted, upper, gaps[1], rate, violation)


def all_windows(s: Situation, settings: Settings, model, modes, shares=(1, 2, 4)) -> list[Plan]:
    """Every division and every size on offer, with the two k that DuetServe's article tries."""
    most_steps = min(s.max_look_ahead, settings.max_look_ahead)
    if most_steps < 1:
        return []
    total, page = model.total_tpcs, s.page_size
    levels = settings.levels if settings.fixed_split is None else (settings.fixed_split,)
    plans = []
    for mode in modes:
        if settings.concurrent:
            parts = [(d if mode == "spatial" else total, total - d) for d in levels if 1 <= d < total]
        else:
            parts = [(total, total)]
        budgets = {max(largest_budget(s) // page // share, 1) * page for share in shares}
        for decode_tpcs, prefill_tpcs in parts:
            for budget in budgets:
                _, _, (t_d, _), (t_p, _) = halves(s, model, budget, decode_tpcs, prefill_tpcs, settings.concurrent)
                fewest = int(t_p // t_d)
                # Beside a prefill steps go on until it has ended.
                for k in {min(max(n, 1), most_steps) for n in (fewest + settings.concurrent, fewest + 1)}:
                    plans.append(
                        window(s, model, mode, budget, decode_tpcs, prefill_tpcs, k, most_steps, settings.concurrent)
                    )
    return plans


def all_mixed(s: Situation, model) -> list[Plan]:
    """Every mixed batch that carries prefill, by budget, ascending."""
    return [mixed(s, model, b, "chunked") for b in range(s.page_size, largest_budget(s) + 1, s.page_size)]


def best_of_divisions(plans: list[Plan], tbt_slo_s: float) -> list[Plan]:
    """Of each division the best feasible plan; a smaller prefill is better only where its rate is 5 % higher."""
    sizes = sorted({plan.budget for plan in plans}, reverse=True)
    best: dict[tuple[str, int, int], Plan] = {}

    def counts(plan: Plan) -> float:
        return plan.rate * 0.95 ** sizes.index(plan.budget)

    for plan in plans:
        division = plan.mode, plan.decode_tpcs, plan.prefill_tpcs
        if plan.keeps(tbt_slo_s) and (division not in best or counts(plan) > counts(best[division])):
            best[division] = plan
    return list(best.values())
