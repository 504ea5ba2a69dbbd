"""The clients that people use, against one server with ``--backend conflux``."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import openai
import pytest
import requests

from tests.servers import ROOT, server_environment

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_chat(client):
    answer = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "hello"}], max_tokens=8, temperature=0
    )
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert 1 <= answer.usage.completion_tokens <= 8


def test_chat_stream_says_what_chat_says(client):
    asked = {"model": "default", "messages": [{"role": "user", "content": "a story"}], "max_tokens": 12}
    whole = client.chat.completions.create(**asked, temperature=0).choices[0].message.content
    parts = client.chat.completions.create(**asked, temperature=0, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == whole


def test_completions_with_n_and_logprobs(client):
    answer = client.completions.create(
        model="default", prompt="once", max_tokens=6, n=3, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
    )
    assert len({choice.text for choice in answer.choices}) == 1
    assert all(len(choice.logprobs.token_logprobs) == 6 for choice in answer.choices)


def test_json_schema(client):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
            "age": {"type": "integer", "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "who?"}],
        max_tokens=200,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    )
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"name", "age"}
    assert isinstance(found["age"], int)


def test_per_request_targets_through_extra_body(client):
    answer = client.completions.create(
        model="default",
        prompt="x",
        max_tokens=4,
        extra_body={"custom_params": {"ttft_slo_ms": 500, "tbt_slo_ms": 20.5}},
    )
    assert answer.choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize("value", [0, -1, "fast", [5], True])
@pytest.mark.parametrize("name", ["ttft_slo_ms", "tbt_slo_ms"])
@pytest.mark.parametrize("stream", [False, True])
def test_targets_that_are_no_positive_number_are_answered_400(client, server, name, value, stream):
    params = {"custom_params": {name: value}}
    with pytest.raises(openai.BadRequestError, match=name):
        client.completions.create(model="default", prompt="x", max_tokens=2, stream=stream, extra_body=params)
    with pytest.raises(openai.BadRequestError, match=name):
        client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "x"}], stream=stream, extra_body=params
        )
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, **params}, "stream": stream}
    answer = requests.post(f"{server.url}/generate", json=body, timeout=30)
    assert answer.status_code == 400
    assert name in answer.text


def test_a_batch_is_checked_request_by_request(server):
    good, bad = {"max_new_tokens": 2}, {"max_new_tokens": 2, "custom_params": {"tbt_slo_ms": -5}}
    body = {"input_ids": [[5, 6], [7, 8]], "sampling_params": [good, bad]}
    assert requests.post(f"{server.url}/generate", json=body, timeout=30).status_code == 400
    body["sampling_params"] = [good, good]
    assert len(requests.post(f"{server.url}/generate", json=body, timeout=30).json()) == 2


PROGRAM = r"""
import json, re, sys
import sglang as sgl
from sglang import assistant, function, gen, select, set_default_backend, system, user
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

set_default_backend(RuntimeEndpoint(sys.argv[1]))

@function
def turns(s):
    s += system("be brief") + user("one") + assistant(gen("first", max_tokens=6))
    s += user("two") + assistant(gen("second", max_tokens=6))

@function
def branches(s):
    s += "tips:"
    forks = s.fork(3)
    for i, f in enumerate(forks):
        f += f" {i}:" + gen("tip", max_tokens=4)
    forks.join()
    for f in forks:
        s += f["tip"]
    s += gen("end", max_tokens=4)

@function
def choice(s):
    s += "yes or no? " + select("word", choices=["yes", "no"])

@function
def number(s):
    s += "ip: " + gen("ip", regex=r"[0-9]{1,3}\.[0-9]{1,3}", max_tokens=12)

@function
def story(s):
    s += "so " + gen("text", max_tokens=10, temperature=0)

out = {}
s = turns.run(); out["turns"] = [s["first"], s["second"]]
s = branches.run(); out["end"] = s["end"]
out["word"] = choice.run()["word"]
out["ip"] = number.run()["ip"]
stream = story.run(stream=True); out["stream"] = "".join(stream.text_iter("text"))
out["whole"] = story.run()["text"]
print("RESULT" + json.dumps(out))
"""


def test_frontend_programs(server):
    """gen, multi-turn, fork and join, select, regex, streaming."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, server.url],
        env=server_environment("conflux"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "RESULT" in done.stdout, done.stderr[-2000:]
    out = json.loads(done.stdout.split("RESULT", 1)[1])
    assert len(out["turns"]) == 2
    assert out["word"] in ("yes", "no")
    assert re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", out["ip"])
    assert out["stream"] == out["whole"]


def test_bench_serving(server, tmp_path):
    result = tmp_path / "bench.jsonl"
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai", "--base-url", server.url),
        *("--dataset-name", "random-ids", "--random-input-len", "40", "--random-output-len", "8"),
        *("--num-prompts", "12", "--request-rate", "20", "--output-file", str(result), "--disable-tqdm"),
        *("--extra-request-body", '{"custom_params": {"tbt_slo_ms": 80}}'),
    ]
    done = subprocess.run(
        command, env=server_environment("conflux"), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(result.read_text().splitlines()[-1])["completed"] == 12
