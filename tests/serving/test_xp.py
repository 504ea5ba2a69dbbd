"""Two ranks serve as one: tokens are stock's, the work was shared, nothing is left, and users find what they expect."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.servers import Server, ServerError
from tests.serving import exactness, workload
from tests.serving.xp import assert_nothing_left, assert_shared, rank_processes, xp_server, xp_state

pytestmark = pytest.mark.server


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
        _waits_for_a_slow_rank(server, stock)
        assert_nothing_left(xp_state(server))


def test_decodes_that_outgrow_their_rank_begin_again_there(stock, tmp_path) -> None:
    """Whole prompts at once, more of them than fit."""
    with xp_server(2, tmp_path, "--schedule-conservativeness", "0.1", pool=1000) as server:
        # Those that go on to their last token.
        work, expected = exactness.WORKS["long outputs"][:62:2], stock["long outputs"][:62:2]
        # How many run at once, and so whether they outgrow the pool, is a matter of when they arrive.
        for _ in range(6):
            workload.assert_same(expected, workload.run(server, work), "in a small pool")
            if retracted := "KV cache pool is full. Retract requests" in server.log_text():
                break
        assert retracted
        assert_nothing_left(xp_state(server))
        # Longer than one rank's pool with its shard, though not than the model's context.
        body = {"input_ids": [5] * 900, "sampling_params": {"max_new_tokens": 2}}
        answer = requests.post(f"{server.url}/generate", json=body, timeout=60)
        assert answer.status_code == 400
        assert "exceeds the maximum allowed length" in answer.text
        workload.assert_same(stock["mixed"][:4], workload.run(server, exactness.WORKS["mixed"][:4]), "afterwards")


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
        ({"sampling_params": {"regex": "([", "max_new_tokens": 4}}, "Failed to compile regex grammar"),
        ({"return_logprob": True, "logprob_start_len": 0}, "log probabilities of the prompt"),
        ({"input_ids": None, "input_embeds": [[0.1] * 64] * 5}, "input embeddings"),
        ({"input_ids": [5, 1024]}, "input_ids must lie between 0 and 1023"),
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
    _constrained(server)
    assert requests.get(f"{server.url}/health_generate", timeout=60).ok


def _constrained(server: Server) -> None:
    """Answers that follow a grammar, of requests that decode on either rank and beside ones that follow none."""
    bodies = [{"input_ids": [5, 6, 7 + at], "sampling_params": {"max_new_tokens": 40}} for at in range(16)]
    for at, body in enumerate(bodies[4:]):
        body["sampling_params"]["regex"] = f"(x|yz){{{3 + at % 4},6}}"  # four grammars, each for both ranks
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = pool.map(lambda body: requests.post(f"{server.url}/generate", json=body, timeout=120).json(), bodies)
        for body, answer in zip(bodies, answers, strict=True):
            if pattern := body["sampling_params"].get("regex"):
                assert re.fullmatch(pattern, answer["text"])
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
    chat = {"model": "x", "messages": [{"role": "user", "content": "a"}], "max_tokens": 200, **asked}
    answer = requests.post(f"{server.url}/v1/chat/completions", json=chat, timeout=120).json()
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    if answer["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["n"], int)


def _pauses(server: Server) -> None:
    for mode in ("in_place", "retract"):
        stream = server.stream([9, 8, 7], max_new_tokens=200, ignore_eos=True)
        for _ in range(20):
            next(stream)
        assert requests.post(f"{server.url}/pause_generation", json={"mode": mode}, timeout=30).ok
        time.sleep(1.0)
        assert requests.post(f"{server.url}/continue_generation", json={}, timeout=30).ok
        assert sum(1 for _ in stream) > 100


def _waits_for_a_slow_rank(server: Server, stock) -> None:
    """All wait for it, then go on where they were."""
    _, slow = rank_processes(server)
    work, expected = exactness.WORKS["mixed"][:6], stock["mixed"][:6]
    stopped_s = 3.0
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(workload.run, server, work)
        time.sleep(0.1)
        slow.suspend()
        try:
            begin_s = time.monotonic()
            time.sleep(stopped_s)
        finally:
            slow.resume()
        workload.assert_same(expected, answers.result(timeout=120), "of a server with a slow rank")
        assert time.monotonic() - begin_s > stopped_s
    assert server.process.poll() is None
