"""How conflux's output is compared with stock SGLang's, token for token."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from sglang_ext.lanes import RandomLane
from tests.servers import Server
from tests.serving import workload
from tests.serving.workload import Outcome, Request
from tests.tiny import make_tiny_model

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
POOL = 8000
# Outputs are nearly uniform over the vocabulary: with 32 end tokens among 1,024, ends fall on every step of a window.
EOS = range(100, 132)
SPATIAL = ("--conflux-mode", "spatial", "--conflux-max-look-ahead", "8")

Reference = dict[str, list[Outcome]]
"""What stock says, by the name of the work."""


def _with_stops(requests: list[Request]) -> list[Request]:
    # Stop strings are found by the text, which the scheduler decodes itself.
    stop = {"stop": ["a", "7", "Q"], "max_new_tokens": 48, "ignore_eos": True}
    return [*requests, *(dataclasses.replace(request, sampling=stop) for request in requests[:2])]


def _beside_long_prompts() -> list[Request]:
    """Three that decode, and may end at any step, to one whose prefill takes as long as many of their steps."""
    rng = random.Random(3)
    made = []
    for index in range(48):
        length, most = (2500, 1) if index % 4 == 3 else (rng.randint(2, 20), 40)
        made.append(
            Request(tuple(rng.randrange(3, workload.VOCABULARY) for _ in range(length)), {"max_new_tokens": most})
        )
    return made


WORKS = {
    "mixed": _with_stops(workload.requests(62)),
    "long outputs": _with_stops(workload.requests(62, longest=300, most_new=160)),
    "ends": _beside_long_prompts(),
}
# One after another on a new server, whose --random-seed then decides: stock keeps a request's own sampling_seed only
# in its deterministic mode.
SAMPLED = [Request((9, 8, 7 + i), {"temperature": 0.8, "max_new_tokens": 12}) for i in range(3)]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    args: tuple[str, ...]
    pool: int = POOL
    work: str = "mixed"
    ends_everywhere: bool = False


def tiny_model() -> Path:
    return make_tiny_model(eos_token_ids=EOS)


def stock_reference(folder: Path, model: Path | None = None) -> Reference:
    """One stock server a test run, whichever process asks first: its output depends on none of the cases' flags.

    ``model``: another than all the rest is tested with.
    """
    path = folder / f"stock{'-' + model.name if model else ''}.json"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            said = {name: [dataclasses.asdict(one) for one in outcomes] for name, outcomes in _ask_stock(model).items()}
            path.write_text(json.dumps(said))
    return {name: [Outcome(**one) for one in outcomes] for name, outcomes in json.loads(path.read_text()).items()}


def _ask_stock(model: Path | None = None) -> Reference:
    args = ("--chunked-prefill-size", "256")
    with Server(model or tiny_model(), max_total_tokens=POOL, args=args, env=STRICT) as server:
        sampled = workload.run(server, SAMPLED, streams=1)
        return {"sampled": sampled} | {name: workload.run(server, work) for name, work in WORKS.items()}


def check(case: Case, stock: Reference, state_dir: Path) -> None:
    """A server for the case, which leaves its pool as empty as stock does."""
    args = (*case.args, "--conflux-state-dir", str(state_dir))
    env = STRICT | {"CONFLUX_TESTING": "1"}
    with Server(tiny_model(), backend="conflux", max_total_tokens=case.pool, args=args, env=env) as server:
        if "--disable-overlap-schedule" not in case.args:  # which makes stock sample once more at a request's end
            workload.assert_same(stock["sampled"], workload.run(server, SAMPLED, streams=1), "sampled")
        serve(server, case.work, stock)
        if case.ends_everywhere:
            _until_ends_everywhere(server, stock)
        state = conflux_state(server)
        assert_pool_empty(server, case.pool)
        log = server.log_text()
    failed = len(RandomLane.failing) if "random" in case.args else 0
    assert state["fallbacks"].get("window_error", 0) == failed
    assert log.count("Traceback") == min(failed, 1)
    _assert_exercised(case, state, log)


def serve(server: Server, work: str, stock: Reference) -> None:
    """The work's requests, some of them once more with aborts in between, and some after those."""
    requests, expected = WORKS[work], stock[work]
    workload.assert_same(expected, workload.run(server, requests), "first round")
    _abort_some(server, requests[:40], expected[:40])
    workload.assert_same(expected[::4], workload.run(server, requests[::4]), "after aborts")


def _until_ends_everywhere(server: Server, stock: Reference) -> None:
    """Repeat until a request has ended at every step of a window."""
    for attempt in range(8):
        workload.assert_same(stock["ends"], workload.run(server, WORKS["ends"], streams=6), f"ends, {attempt}")
        ends = conflux_state(server)["windows"]["ends_at_step"]
        if set(ends) == {str(step) for step in range(1, 9)}:
            return
        server.flush()  # a cached prompt's prefill is over too soon
    raise AssertionError(f"requests ended only at steps {ends}")


def _abort_some(server: Server, requests: Sequence[Request], expected: Sequence[Outcome]) -> None:
    rng = random.Random(1)
    some = [dataclasses.replace(r, cancel_after=rng.randint(1, 20)) if i % 2 else r for i, r in enumerate(requests)]
    for outcome, whole in zip(workload.run(server, some), expected, strict=True):
        assert outcome.tokens == whole.tokens[: len(outcome.tokens)]
        if outcome.finish != "cancelled":
            assert outcome == whole


def assert_pool_empty(server: Server, total: int) -> None:
    server.flush()
    pool = conflux_state(server)["pool"]
    assert pool["total_slots"] == pool["available_slots"] == total
    assert pool["rows"] == pool["free_rows"]
    assert pool["evictable_slots"] == pool["protected_slots"] == 0


def conflux_state(server: Server) -> dict:
    return server.server_info()["internal_states"][0]["conflux"]


def _assert_exercised(case: Case, state: dict, log: str) -> None:
    decisions, windows = state["decisions"], state["windows"]
    assert decisions["spatial"] > 5
    assert max(map(int, windows["by_size"])) > 1
    if case.ends_everywhere:
        assert windows["returned_slots"] > 0
        assert windows["discarded_tokens"] > 0
    if "random" in case.args:
        assert decisions["temporal"] + decisions.get("chunked", 0) > 5
    if case.work == "long outputs":
        assert "KV cache pool is full. Retract requests" in log
