"""Targets of each request, and how often they were met."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sglang_ext.config import MIN_TBT_SLO_MS, ConfigError, positive_ms

TARGETS = ("ttft_slo_ms", "tbt_slo_ms")


def check_custom_params(params: object) -> None:
    """Raise ConfigError (a ValueError) if ``custom_params`` carries a target that is no positive number."""
    if isinstance(params, Mapping):
        for name in TARGETS:
            if params.get(name) is not None:
                positive_ms(f"custom_params.{name}", params[name], text=False)


@dataclasses.dataclass(slots=True)
class Progress:
    """One request's targets and what became of them; times in seconds on the scheduler's clock.

    ``cached`` is the last estimate of its tokens in the prefix cache, made at ``matched_s``. Its ``place``, what
    its place in the queue follows from at any time, is that of ``placed`` cached tokens, -1 before it has one.
    """

    arrival_s: float
    ttft_slo_s: float
    tbt_slo_s: float
    tokens: int = 0
    last_token_s: float = 0.0
    cached: int = 0
    matched_s: float = -1.0
    place: tuple[float, ...] = ()
    placed: int = -1

    @property
    def deadline_s(self) -> float:
        return self.arrival_s + self.ttft_slo_s

    @classmethod
    def of(cls, custom_params: object, *, now_s: float, ttft_slo_s: float, tbt_slo_s: float) -> Progress:
        """A request that arrives now. Targets that are absent are the server's; τ is floored at 5 ms."""
        given = custom_params if isinstance(custom_params, Mapping) else {}
        return cls(
            arrival_s=now_s,
            ttft_slo_s=_seconds(given, "ttft_slo_ms", ttft_slo_s),
            tbt_slo_s=max(_seconds(given, "tbt_slo_ms", tbt_slo_s), MIN_TBT_SLO_MS / 1e3),
        )


def _seconds(params: Mapping[str, Any], name: str, default_s: float) -> float:
    """A target in seconds. What came past the check (see ``check_custom_params``) and is none counts as absent."""
    value = params.get(name)
    if value is None:
        return default_s
    try:
        return positive_ms(name, value, text=False) / 1e3
    except ConfigError:
        return default_s


@dataclasses.dataclass(slots=True)
class Attainment:
    """Counts of first tokens and of gaps between tokens, and how many met their targets."""

    ttft_met: int = 0
    ttft_missed: int = 0
    tbt_met: int = 0
    tbt_missed: int = 0

    def note(self, progress: Progress, tokens: int, now_s: float) -> None:
        """``tokens`` generated so far are now with the client. Several at once count as one gap and no waiting."""
        if tokens <= progress.tokens:
            return
        if progress.tokens == 0:
            if now_s <= progress.deadline_s:
                self.ttft_met += 1
            else:
                self.ttft_missed += 1
        elif now_s - progress.last_token_s <= progress.tbt_slo_s:
            self.tbt_met += 1
        else:
            self.tbt_missed += 1
        progress.tokens = tokens
        progress.last_token_s = now_s
