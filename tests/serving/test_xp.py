"""Several ranks serve as one: tokens are stock's, the work was shared, nothing is left, and a lost rank ends it all."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.servers import Server, ServerError
from tests.serving import exactness, workload
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.server

LAYERS, HEAD_DIM, BYTES = 2, 32, 4


def llama() -> Path:
    """Heads for four ranks."""
    return make_tiny_model(family="llama", heads=8, kv_heads=4, eos_token_ids=exactness.EOS)


def xp_server(ranks: int, state_dir: Path, *args: str, model: Path | None = None, pool: int = 8000) -> Server:
    return Server(
        model or exactness.tiny_model(),
        backend="conflux",
        max_total_tokens=pool,
        args=("--conflux-xp", str(ranks), "--conflux-state-dir", str(state_dir), *args),
        env={"CONFLUX_TESTING": "1"},
    )


def xp_state(server: Server) -> list[dict[str, Any]]:
    """What each rank has and has done, once nothing runs."""
    server.flush()
    time.sleep(2.5)  # ranks say it when the next iteration begins
    state: list[dict[str, Any]] = exactness.conflux_state(server)["xp"]["rank"]
    return state


def assert_nothing_left(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["free_slots"] == rank["slots"]
        assert rank["prompts"] == rank["decodes"] == 0


def assert_shared(ranks: list[dict[str, Any]], heads: int, kv_heads: int) -> None:
    """By the counters: every long prompt had rows everywhere, and as many bytes went as the formulas say."""
    n, tokens = len(ranks), ranks[0]["prefilled_tokens"]
    assert sum(rank["rows"] for rank in ranks) == tokens
    for rank in ranks:
        assert rank["long_prompts_with_rows"] == rank["long_prompts"] > 40
    row_bytes = LAYERS * HEAD_DIM * BYTES
    # Of q, k and v a rank keeps an Nth; of what attention makes of all rows by an Nth of the heads, its own rows.
    there, back = (heads + 2 * kv_heads) * row_bytes, heads * row_bytes
    assert sum(rank["all_to_all_bytes"] for rank in ranks) * n == tokens * (n - 1) * (there + back)
    migrated = sum(rank["migrated_bytes"] for rank in ranks)
    assert migrated == ranks[0]["migrating_tokens"] * 2 * kv_heads * row_bytes
    assert 0 < ranks[0]["migrating_tokens"] < tokens


def test_two_ranks_serve_what_stocks_one_does(stock, tmp_path) -> None:
    with xp_server(2, tmp_path, "--chunked-prefill-size", "96") as server:
        exactness.serve(server, "mixed", stock)
        ranks = xp_state(server)
        assert_nothing_left(ranks)
        assert_shared(ranks, heads=4, kv_heads=2)
        assert min(rank["rows"] for rank in ranks) > 0.4 * ranks[0]["prefilled_tokens"]
        assert "Traceback" not in server.log_text()
        _refuses(server)
        _answers(server)
        _pauses(server)
        assert_nothing_left(xp_state(server))


def test_four_ranks_serve_what_stocks_one_does(tmp_path, tmp_path_factory) -> None:
    stock = exactness.stock_reference(tmp_path_factory.getbasetemp(), llama())
    with xp_server(4, tmp_path, "--chunked-prefill-size", "64", model=llama()) as server:
        exactness.serve(server, "mixed", stock)
        ranks = xp_state(server)
        assert_nothing_left(ranks)
        assert_shared(ranks, heads=8, kv_heads=4)


def test_decodes_that_outgrow_their_rank_begin_again_there(stock, tmp_path) -> None:
    """Whole prompts at once, more of them than fit."""
    with xp_server(2, tmp_path, "--schedule-conservativeness", "0.1", pool=1000) as server:
        # Those that go on to their last token.
        work, expected = exactness.WORKS["long outputs"][:62:2], stock["long outputs"][:62:2]
        workload.assert_same(expected, workload.run(server, work), "in a small pool")
        assert "KV cache pool is full. Retract requests" in server.log_text()
        assert_nothing_left(xp_state(server))
        # Longer than one rank's pool with its shard, though not than the model's context.
        body = {"input_ids": [5] * 900, "sampling_params": {"max_new_tokens": 2}}
        answer = requests.post(f"{server.url}/generate", json=body, timeout=60)
        assert answer.status_code == 400
        assert "exceeds the maximum allowed length" in answer.text
        workload.assert_same(stock["mixed"][:4], workload.run(server, exactness.WORKS["mixed"][:4]), "afterwards")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_ends_the_server(tmp_path, lost: int) -> None:
    with xp_server(2, tmp_path) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        ranks = [one for one in family if "scheduler" in " ".join(one.cmdline()).lower()]
        assert len(ranks) == 2
        stream = server.stream([9, 8, 7], max_new_tokens=3000, ignore_eos=True)
        next(stream)
        begin_s = time.monotonic()
        os.kill(sorted(ranks, key=lambda one: one.create_time())[lost].pid, signal.SIGKILL)
        assert server.process.wait(30) != 0
        assert time.monotonic() - begin_s < 30
        _, left = psutil.wait_procs(family, timeout=10)
        assert not left


def test_heads_that_cannot_be_divided_are_refused_at_once() -> None:
    with (
        pytest.raises(ServerError, match="exit code 2") as refused,
        Server(exactness.tiny_model(), backend="conflux", args=("--conflux-xp", "3")),
    ):
        pass
    assert "--conflux-xp 3: the model has 4 attention heads and 2 KV heads" in str(refused.value)


def _refuses(server: Server) -> None:
    """What one rank cannot do alone is answered with 400 or a failure, and serving goes on."""
    for more, said in (
        ({"sampling_params": {"regex": "[a-z]+", "max_new_tokens": 4}}, "structured output"),
        ({"return_logprob": True, "logprob_start_len": 0}, "log probabilities of the prompt"),
    ):
        answer = requests.post(f"{server.url}/generate", json={"input_ids": [5, 6, 7], **more}, timeout=60)
        assert answer.status_code == 400
        assert said in answer.text


def _answers(server: Server) -> None:
    """What users ask for besides plain tokens."""
    sampled = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 1.0, "max_new_tokens": 20, "n": 4}}
    answers = requests.post(f"{server.url}/generate", json=sampled, timeout=60).json()
    assert len({tuple(one["output_ids"]) for one in answers}) == 4
    chat = {"model": "x", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5, "n": 3}
    answer = requests.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).json()
    assert len(answer["choices"]) == 3
    body = {"input_ids": [5, 6, 7] * 9, "return_logprob": True, "top_logprobs_num": 2}
    body["sampling_params"] = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    info = requests.post(f"{server.url}/generate", json=body, timeout=60).json()["meta_info"]
    assert len(info["output_token_logprobs"]) == 6
    assert all(
        value == pytest.approx(top[0][0])
        for (value, *_), top in zip(info["output_token_logprobs"], info["output_top_logprobs"], strict=True)
    )
    assert json.dumps(info)
    assert requests.get(f"{server.url}/health_generate", timeout=60).ok


def _pauses(server: Server) -> None:
    for mode in ("in_place", "retract"):
        stream = server.stream([9, 8, 7], max_new_tokens=200, ignore_eos=True)
        for _ in range(20):
            next(stream)
        assert requests.post(f"{server.url}/pause_generation", json={"mode": mode}, timeout=30).ok
        time.sleep(1.0)
        assert requests.post(f"{server.url}/continue_generation", json={}, timeout=30).ok
        assert sum(1 for _ in stream) > 100
