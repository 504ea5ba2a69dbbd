"""What a load run will send: requests with their times, token ids of their own, and their targets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from learner.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest

FIRST_ORDINARY_ID = 256  # special tokens and single bytes come first in most vocabularies


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: when to send it (seconds after the start), its prompt, how many tokens to make, its targets."""

    arrival_s: float
    input_ids: list[int]
    output_tokens: int
    custom_params: dict[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Body of a streaming POST /generate: greedy, exactly ``output_tokens`` long."""
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": self.output_tokens, "ignore_eos": True}
        if self.custom_params:
            sampling["custom_params"] = self.custom_params
        return {"input_ids": self.input_ids, "sampling_params": sampling, "stream": True}


def make_plan(
    trace: Sequence[TraceRequest],
    vocabulary: int,
    *,
    seed: int = 0,
    custom_params: dict[str, Any] | None = None,
    share_blocks: bool = False,
    block_tokens: int = MOONCAKE_BLOCK_TOKENS,
) -> list[PlannedRequest]:
    """Give every request of a trace random token ids of its own, so that the radix cache never answers for the model.

    ``share_blocks``: where the trace names the blocks of its prompts, equal block ids become equal tokens instead, and
    the trace's prefixes are shared as they were. Arrivals are shifted so that the first is at 0. ``vocabulary`` is the
    model's; ids below 256 are left out where it is large enough.
    """
    if vocabulary < 2:
        raise ValueError(f"a vocabulary of {vocabulary} tokens holds no prompts")
    rng = random.Random(seed)
    lowest = FIRST_ORDINARY_ID if vocabulary > 2 * FIRST_ORDINARY_ID else 0
    ids = range(lowest, vocabulary)
    start_s = min((request.arrival_s for request in trace), default=0.0)
    plan = []
    for request in sorted(trace, key=lambda request: request.arrival_s):
        length = max(1, request.input_tokens)
        prompt: list[int] = []
        if share_blocks:
            for block in request.block_ids:
                prompt += random.Random(f"{seed}:{block}").choices(ids, k=block_tokens)
        prompt = prompt[:length] + rng.choices(ids, k=max(0, length - len(prompt)))
        plan.append(
            PlannedRequest(
                arrival_s=request.arrival_s - start_s,
                input_ids=prompt,
                output_tokens=max(1, request.output_tokens),
                custom_params=dict(custom_params or {}),
            )
        )
    return plan
