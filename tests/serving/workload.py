"""Requests of mixed length whose greedy output shows any mistake, and what a server made of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.servers import Event, Server

VOCABULARY = 1024


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    cancel_after: int | None = None  # close the connection after so many events


@dataclass(frozen=True)
class Outcome:
    """``tokens``: all output ids; ``arrivals_s``: when each event came; ``counts``: tokens so far, event by event."""

    tokens: list[int]
    finish: str
    arrivals_s: list[float] = field(default_factory=list, compare=False)
    counts: list[int] = field(default_factory=list, compare=False)


def requests(count: int, *, seed: int = 0, longest: int = 700, most_new: int = 48) -> list[Request]:
    """``count`` prompts from 1 to ``longest`` tokens; every third shares a prefix with another; half may end early."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(longest)]
    made = []
    for index in range(count):
        length = 1 + int((longest - 1) * rng.random() ** 2)
        own = [rng.randrange(3, VOCABULARY) for _ in range(length)]
        if index % 3 == 0 and length > 8:
            keep = rng.randrange(4, length)
            own = shared[:keep] + own[keep:]
        sampling: dict[str, Any] = {"max_new_tokens": rng.randint(2, most_new)}
        if index % 2 == 0:
            sampling["ignore_eos"] = True
        made.append(Request(tuple(own), sampling))
    return made


def run(server: Server, work: Sequence[Request], *, streams: int = 64) -> list[Outcome]:
    """All requests at once, streamed."""
    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(lambda request: one(server, request), work))


def one(server: Server, request: Request) -> Outcome:
    tokens: list[int] = []
    finish, arrivals, counts = "cancelled", [], []
    stream = server.stream(list(request.prompt), **request.sampling)
    for events, event in enumerate(stream, start=1):
        tokens = output_ids(tokens, event)
        arrivals.append(event.at_s)
        counts.append(len(tokens))
        reason = event.data["meta_info"].get("finish_reason")
        if reason is not None:
            finish = f"{reason['type']}:{reason.get('matched', reason.get('length', ''))}"
        if request.cancel_after is not None and events >= request.cancel_after:
            stream.close()
            break
    return Outcome(tokens, finish, arrivals, counts)


def output_ids(before: list[int], event: Event) -> list[int]:
    """SGLang's stream carries the whole output so far unless told otherwise."""
    if "error" in event.data:
        raise AssertionError(event.data["error"])
    return list(event.data["output_ids"])


def assert_same(expected: Sequence[Outcome], got: Sequence[Outcome], what: str) -> None:
    different = [
        f"request {index}: expected {e.tokens} ({e.finish}), got {g.tokens} ({g.finish})"
        for index, (e, g) in enumerate(zip(expected, got, strict=True))
        if e != g
    ]
    assert not different, f"{what}: {len(different)} of {len(expected)} differ, first: {different[0]}"
