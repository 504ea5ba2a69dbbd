"""How conflux's output is compared with stock SGLang's, token for token."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

from tests.servers import Server
from tests.serving import workload
from tests.tiny import make_tiny_model

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
POOL = 8000
# Outputs are nearly uniform over the vocabulary: with 32 end tokens among 1,024, ends fall on every step of a window.
EOS = range(100, 132)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    pool: int = POOL
    longest: int = 700
    most_new: int = 48
    ends_everywhere: bool = False


SPATIAL = ("--conflux-mode", "spatial", "--conflux-max-look-ahead", "8")
SEEDED = [
    workload.Request((9, 8, 7 + seed), {"temperature": 0.8, "sampling_seed": seed, "max_new_tokens": 12})
    for seed in range(3)
]


def tiny_model() -> Path:
    return make_tiny_model(eos_token_ids=EOS)


def stock_reference(cases: Sequence[Case]) -> dict[object, list[workload.Outcome]]:
    """What stock says to the cases' requests; one server, since its output depends on none of their flags."""
    expected: dict[object, list[workload.Outcome]] = {}
    args = ("--chunked-prefill-size", "256")
    with Server(tiny_model(), max_total_tokens=POOL, args=args, env=STRICT) as server:
        for longest, most_new in {(case.longest, case.most_new) for case in cases}:
            expected[longest, most_new] = workload.run(server, _work(longest, most_new))
        once, again = (workload.run(server, SEEDED, streams=1) for _ in range(2))
        if once == again:
            expected["seeded"] = once
    return expected


def _work(longest: int, most_new: int) -> list[workload.Request]:
    work = workload.requests(62, longest=longest, most_new=most_new)
    # Stop strings are found by the text, which the scheduler decodes itself.
    stop = {"stop": ["a", "7", "Q"], "max_new_tokens": most_new, "ignore_eos": True}
    return [*work, *(dataclasses.replace(request, sampling=stop) for request in work[:2])]


def check(case: Case, stock: dict[object, list[workload.Outcome]], state_dir: Path) -> None:
    """Serve the case's requests three times, aborts in between, and leave the pool as empty as stock does."""
    work, expected = _work(case.longest, case.most_new), stock[case.longest, case.most_new]
    args = (*case.args, "--conflux-state-dir", str(state_dir))
    env = STRICT | dict(case.env) | {"CONFLUX_TESTING": "1"}
    with Server(tiny_model(), backend="conflux", max_total_tokens=case.pool, args=args, env=env) as server:
        workload.assert_same(expected, workload.run(server, work), "first round")
        if "seeded" in stock:  # stock reproduces them itself
            workload.assert_same(stock["seeded"], workload.run(server, SEEDED, streams=1), "with a seed")
        _abort_some(server, work, expected)
        workload.assert_same(expected[::2], workload.run(server, work[::2]), "after aborts")
        if case.ends_everywhere:
            _until_ends_everywhere(server, work, expected)
        state = _state(server)
        assert_pool_empty(server, case.pool)
        log = server.log_text()
    assert "Traceback" not in log
    _assert_exercised(case, state, log)


def _until_ends_everywhere(server: Server, work, expected) -> None:
    """Repeat until a request has ended at every step of a window."""
    for attempt in range(8):
        if set(_state(server)["windows"]["ends_at_step"]) == {str(step) for step in range(1, 9)}:
            return
        workload.assert_same(expected, workload.run(server, work), f"repeat {attempt}")
    raise AssertionError(f"requests ended only at steps {_state(server)['windows']['ends_at_step']}")


def _abort_some(server: Server, work, expected) -> None:
    rng = random.Random(1)
    some = [dataclasses.replace(r, cancel_after=rng.randint(1, 20)) if i % 2 else r for i, r in enumerate(work)]
    for outcome, whole in zip(workload.run(server, some), expected, strict=True):
        assert outcome.tokens == whole.tokens[: len(outcome.tokens)]
        if outcome.finish != "cancelled":
            assert outcome == whole


def assert_pool_empty(server: Server, total: int) -> None:
    server.flush()
    pool = _state(server)["pool"]
    assert pool["total_slots"] == pool["available_slots"] == total
    assert pool["rows"] == pool["free_rows"]
    assert pool["evictable_slots"] == pool["protected_slots"] == 0


def _state(server: Server) -> dict:
    return server.server_info()["internal_states"][0]["conflux"]


def _assert_exercised(case: Case, state: dict, log: str) -> None:
    decisions, windows = state["decisions"], state["windows"]
    if "spatial" in case.args or "random" in case.args:
        assert decisions["spatial"] > 5
        assert max(map(int, windows["by_size"])) > 1
    if case.ends_everywhere:
        assert windows["returned_slots"] > 0
        assert windows["discarded_tokens"] > 0
    if "random" in case.args:
        assert decisions["temporal"] + decisions.get("chunked", 0) > 5
    if case.name == "small pool":
        assert "KV cache pool is full. Retract requests" in log
