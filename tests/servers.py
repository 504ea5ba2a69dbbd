"""Real SGLang servers for tests: stock or conflux, on a free port, spoken to over HTTP."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import requests

from bench.cpu import CPU_ARGS, ROOT, cpu_environment
from bench.server import ServerError, ServerProcess

__all__ = ["Event", "Server", "ServerError", "request_body", "server_environment"]


class Event(NamedTuple):
    """One server-sent event: when the client read it (``time.perf_counter()``), and what it says."""

    at_s: float
    data: dict[str, Any]


def server_environment(backend: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment in which ``backend`` runs on a CPU."""
    return cpu_environment(backend == "stock", extra)


class Server(ServerProcess):
    """A server of ``model`` as a context manager.

    ``args`` follow the common CPU flags and so override them. ``max_total_tokens`` bounds the KV pool (None: the
    server's own choice). The log is kept in ``log``; its end is in the error if the server does not come up.
    """

    def __init__(
        self,
        model: Path,
        *,
        backend: Literal["stock", "conflux"] = "stock",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        max_total_tokens: int | None = 4000,
        log: Path | None = None,
        startup_timeout_s: float = 180.0,
    ) -> None:
        flags = ["--model-path", str(model), "--random-seed", "0", *CPU_ARGS]
        if backend == "conflux":
            flags += ["--backend", "conflux"]
        if max_total_tokens is not None and "--max-total-tokens" not in args:
            flags += ["--max-total-tokens", str(max_total_tokens)]
        super().__init__(
            [*flags, *args],
            log=log or Path(tempfile.mkstemp(prefix=f"server-{backend}-", suffix=".log")[1]),
            env=server_environment(backend, env),
            cwd=ROOT,
            startup_timeout_s=startup_timeout_s,
        )
        self.http = requests.Session()

    def __enter__(self) -> Server:
        try:
            self.start()
        except ServerError as error:
            raise ServerError(f"{error}\n{error.log_tail}") from None
        return self

    def generate(self, prompt: str | Sequence[int], timeout_s: float = 120.0, **sampling: Any) -> dict[str, Any]:
        """POST /generate with greedy sampling unless ``sampling`` says otherwise; raises HTTPError on an error status.

        ``extra`` in ``sampling`` is merged into the request's body beside the sampling parameters.
        """
        answer = requests.post(f"{self.url}/generate", json=request_body(prompt, sampling), timeout=timeout_s)
        answer.raise_for_status()
        result: dict[str, Any] = answer.json()
        return result

    def stream(self, prompt: str | Sequence[int], timeout_s: float = 120.0, **sampling: Any) -> Iterator[Event]:
        """POST /generate with ``stream``; yields every event as it arrives (``data`` is cumulative)."""
        body = request_body(prompt, sampling) | {"stream": True}
        with requests.post(f"{self.url}/generate", json=body, stream=True, timeout=timeout_s) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines(chunk_size=1):
                at_s = time.perf_counter()
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield Event(at_s, json.loads(line[len(b"data: ") :]))

    def flush(self, timeout_s: float = 30.0) -> None:
        """Empty the radix cache, waiting until no request is left."""
        answer = self.http.post(f"{self.url}/flush_cache", params={"timeout": timeout_s}, timeout=timeout_s + 5)
        answer.raise_for_status()

    def server_info(self) -> dict[str, Any]:
        answer = self.http.get(f"{self.url}/server_info", timeout=30)
        answer.raise_for_status()
        result: dict[str, Any] = answer.json()
        return result

    def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """GET /metrics (needs ``--enable-metrics``): sample name → [(labels, value)]."""
        from prometheus_client.parser import text_string_to_metric_families

        answer = self.http.get(f"{self.url}/metrics", timeout=30)
        answer.raise_for_status()
        samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for metric in text_string_to_metric_families(answer.text):
            for sample in metric.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return samples


def request_body(prompt: str | Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = {"temperature": 0, "max_new_tokens": 16, **sampling}
    extra = parameters.pop("extra", {})
    source = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    return {**source, "sampling_params": parameters, **extra}
