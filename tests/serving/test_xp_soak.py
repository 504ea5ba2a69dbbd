"""Anything that clients do, all at once, against two ranks in a small pool: serving goes on, and nothing is left."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest
import requests

from tests.servers import Server
from tests.serving.xp import assert_nothing_left, xp_server, xp_state

pytestmark = pytest.mark.server

SECONDS = float(os.environ.get("CONFLUX_SOAK_S", "15"))
CLIENTS, POOL = 10, 900
ANSWERS = (200, 400, 499)  # 499: aborted by somebody


class Soak:
    """Clients and an operator, until a time; ``wrong`` is what should not have happened."""

    def __init__(self, server: Server, until_s: float) -> None:
        self._server, self._until_s = server, until_s
        self.answered, self.wrong = 0, list[str]()

    def run(self) -> None:
        threads = [threading.Thread(target=self._client, args=(seed,)) for seed in range(CLIENTS)]
        threads.append(threading.Thread(target=self._operator))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _post(self, path: str, body: dict, **options) -> requests.Response:
        return requests.post(f"{self._server.url}{path}", json=body, timeout=180, **options)

    def _client(self, seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < self._until_s and self._server.process.poll() is None:
            body = self._body(draw)
            try:
                if draw.random() < 0.4:
                    self._stream(body, draw)
                else:
                    self._whole(body)
            except requests.RequestException as error:
                self.wrong.append(repr(error))

    def _body(self, draw: random.Random) -> dict:
        params = {"max_new_tokens": draw.choice([1, 5, 60, 200]), "temperature": draw.choice([0, 1])}
        body = {"input_ids": [draw.randint(3, 1000) for _ in range(draw.choice([1, 3, 30, 200, 600]))]}
        kind = draw.random()
        if kind < 0.2:
            params["regex"] = draw.choice(["(x|yz){3,9}", "[a-z]+", "(ab)*c", "(["])
        elif kind < 0.25:
            params["n"] = 2
        elif kind < 0.3:
            body["return_logprob"] = True
        return body | {"sampling_params": params | {"ignore_eos": draw.random() < 0.5}}

    def _whole(self, body: dict) -> None:
        answer = self._post("/generate", body)
        self.answered += 1
        if answer.status_code not in ANSWERS:
            self.wrong.append(f"{answer.status_code}: {answer.text[:200]}")

    def _stream(self, body: dict, draw: random.Random) -> None:
        """Read some events, then go away, with or without a word."""
        rid = f"soak-{draw.random()}"
        with self._post("/generate", body | {"rid": rid, "stream": True}, stream=True) as answer:
            for event, _ in enumerate(answer.iter_lines()):
                if event > draw.choice([0, 3, 20, 400]):
                    if draw.random() < 0.5:
                        self._post("/abort_request", {"rid": rid})
                    break
        self.answered += 1

    def _operator(self) -> None:
        draw = random.Random(99)
        while time.monotonic() < self._until_s - 5.0 and self._server.process.poll() is None:
            time.sleep(draw.uniform(0.5, 3.0))
            kind = draw.random()
            if kind < 0.7:
                self._post("/pause_generation", {"mode": draw.choice(["in_place", "retract", "abort"])})
                time.sleep(draw.uniform(0.0, 0.5))
                self._post("/continue_generation", {})
            elif kind < 0.85:
                self._post("/abort_request", {"abort_all": True})
            else:
                self._post("/flush_cache", {})


def test_nothing_that_clients_do_ends_it_or_leaves_anything(tmp_path) -> None:
    with xp_server(
        2, tmp_path, "--chunked-prefill-size", "96", "--schedule-conservativeness", "0.1", pool=POOL
    ) as server:
        soak = Soak(server, time.monotonic() + SECONDS)
        soak.run()
        assert server.process.poll() is None
        assert not soak.wrong
        assert soak.answered > CLIENTS
        for _ in range(20):
            ranks = xp_state(server)
            if not any(rank["prompts"] + rank["decodes"] for rank in ranks):
                break
        assert_nothing_left(ranks)
        assert "Traceback" not in server.log_text()
