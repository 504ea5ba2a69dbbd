"""Real SGLang servers for tests: started on a free port, spoken to over HTTP, and surely ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import requests

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = ROOT / "sglang_ext" / "cpu" / "stand_in"
NO_PLUGIN = "none"  # SGLANG_PLUGINS names the plugins to load; no plugin has this name
CPU_ARGS = ("--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle")


class Event(NamedTuple):
    """One server-sent event: when the client read it (``time.perf_counter()``), and what it says."""

    at_s: float
    data: dict[str, Any]


class ServerError(RuntimeError):
    """The server ended, or did not come up in time. The message carries the end of its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_environment(backend: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment in which ``backend`` runs on a CPU. Stock loads no plugin, so it needs the CPU set-up by hand."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = [str(ROOT), env.get("PYTHONPATH", "")]
    if backend == "stock":
        env |= {"SGLANG_PLUGINS": NO_PLUGIN, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        paths.append(str(STAND_IN))
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env | dict(extra or {})


class Server:
    """``python -m sglang.launch_server`` as a context manager.

    ``args`` follow the common CPU flags and so override them. ``max_total_tokens`` bounds the KV pool (None: the
    server's own choice). The log is kept in ``log``; its end is quoted in errors.
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
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.startup_timeout_s = startup_timeout_s
        self.env = server_environment(backend, env)
        self.log = log or Path(tempfile.mkstemp(prefix=f"server-{backend}-", suffix=".log")[1])
        defaults = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(self.port), "--random-seed", "0"]
        if backend == "conflux":
            defaults += ["--backend", "conflux"]
        defaults += CPU_ARGS
        if max_total_tokens is not None and "--max-total-tokens" not in args:
            defaults += ["--max-total-tokens", str(max_total_tokens)]
        self.command = [sys.executable, "-m", "sglang.launch_server", *defaults, *args]
        self.process: subprocess.Popen[bytes] | None = None
        self.http = requests.Session()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Server:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy(self.process)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, *, gracefully: bool = False) -> None:
        """End the server and all its processes; returns when they are gone.

        ``gracefully`` lets it answer running requests first, as an operator's SIGTERM does; otherwise it is killed.
        """
        process, self.process = self.process, None
        if process is None:
            return
        family = _family(process.pid)
        if gracefully:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for member in family:  # whoever left the group
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(10)
        psutil.wait_procs(family, timeout=10)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def generate(self, prompt: str | Sequence[int], timeout_s: float = 120.0, **sampling: Any) -> dict[str, Any]:
        """POST /generate with greedy sampling unless ``sampling`` says otherwise; raises HTTPError on an error status.

        ``extra`` in ``sampling`` is merged into the request's body beside the sampling parameters.
        """
        answer = self.http.post(f"{self.url}/generate", json=request_body(prompt, sampling), timeout=timeout_s)
        answer.raise_for_status()
        result: dict[str, Any] = answer.json()
        return result

    def stream(self, prompt: str | Sequence[int], timeout_s: float = 120.0, **sampling: Any) -> Iterator[Event]:
        """POST /generate with ``stream``; yields every event as it arrives."""
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

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.startup_timeout_s
        while time.monotonic() < deadline:
            if (code := process.poll()) is not None:
                raise ServerError(f"the server ended with exit code {code}; {self.log}:\n{self._log_tail()}")
            with suppress(requests.RequestException):
                if self.http.get(f"{self.url}/health_generate", timeout=20).status_code == 200:
                    return
            time.sleep(0.25)
        raise ServerError(f"no healthy server after {self.startup_timeout_s:g} s; {self.log}:\n{self._log_tail()}")

    def _log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])


def request_body(prompt: str | Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = {"temperature": 0, "max_new_tokens": 16, **sampling}
    extra = parameters.pop("extra", {})
    source = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    return {**source, "sampling_params": parameters, **extra}


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
