"""Whether answers that part do so at ties, by what a server itself says of the two tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from bench.server import ServerError

# Logits of SmolLM2 lie between 8 and 32; a bfloat16 number there has steps of 1/16 or 1/8.
# Two steps are a tie; what is compared are differences of float32 log probabilities.
TIE = 2 * 0.125 + 1e-4
# Other requests beside one that is asked again.
COMPANY = (0, 1, 3, 7, 15, 31, 63)

Case = tuple[int, int, list[int], list[int]]
"""A parting: of which prompt, at which token, what was expected, what came."""


async def post(session: Any, url: str, body: dict[str, Any]) -> Any:
    """The answer to a ``/generate`` request. Raises ServerError for any other status than 200."""
    async with session.post(f"{url}/generate", json=body) as answer:
        if answer.status != 200:
            raise ServerError(f"HTTP {answer.status}: {(await answer.text())[:300]}")
        return await answer.json()


def greedy_body(prompt: Any, tokens: int, **more: Any) -> dict[str, Any]:
    """A request for so many greedy tokens, whatever they are."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, **more}


async def margins(prompts: Sequence[list[int]], url: str, cases: Sequence[Case]) -> list[float | None]:
    """By how much stock holds one token for likelier than the other, after the same tokens; None: of another length, or
    one is not among stock's first twenty.

    Where that is no tie it is asked again in other company: a batch of another size is added up in another order. The
    margin is the least that is found, and 0 if one time the one and another time the other token is the likelier.
    """
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def one(case: Case) -> float | None:
            index, at, expected, got = case
            if at >= min(len(expected), len(got)):
                return None
            prompt = prompts[index] + expected[:at]
            answer = await post(session, url, greedy_body(prompt, 1, return_logprob=True, top_logprobs_num=20))
            likely = {token: value for value, token, *_ in answer["meta_info"]["output_top_logprobs"][0]}
            if expected[at] not in likely or got[at] not in likely:
                return None
            return float(likely[expected[at]] - likely[got[at]])

        async def beside(case: Case, others: int) -> float | None:
            company = [post(session, url, greedy_body(prompts[other], 4)) for other in range(others)]
            margin, *_ = await asyncio.gather(one(case), *company)
            return margin

        found = await asyncio.gather(*map(one, cases))
        seen: dict[tuple[int, int, int, int], list[float]] = {}
        for case, margin in zip(cases, found, strict=True):
            if margin is not None:
                seen.setdefault(_question(case), []).append(margin)
        for case in {_question(case): case for case in cases if _question(case) in seen}.values():
            for others in COMPANY:
                if least(seen[_question(case)]) <= TIE:
                    break
                margin = await beside(case, min(others, len(prompts)))
                if margin is not None:
                    seen[_question(case)].append(margin)
    return [None if margin is None else least(seen[_question(case)]) for case, margin in zip(cases, found, strict=True)]


def _question(case: Case) -> tuple[int, int, int, int]:
    """What sets one parting apart from another: where it is, and between which tokens."""
    index, at, expected, got = case
    return index, at, expected[at] if at < len(expected) else -1, got[at] if at < len(got) else -1


def least(margins_found: Sequence[float]) -> float:
    """The smallest of some signed margins; 0 if they have both signs."""
    if min(margins_found) < 0.0 < max(margins_found):
        return 0.0
    return min(map(abs, margins_found))
