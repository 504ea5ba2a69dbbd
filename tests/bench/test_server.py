"""Child servers: started, refused, and ended whatever happens to whom. The servers here are a few lines of Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from bench.server import ServerError, ServerProcess, free_port, port_is_free

ROOT = Path(__file__).resolve().parents[2]

# Answers the health check; has a child in its group and one that left it.
HEALTHY = """
import http.server, subprocess, sys
children = [subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sleep", "60"], start_new_session=True)]
print("children", *[child.pid for child in children], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def fake(code: str, log: Path, startup_timeout_s: float = 20.0) -> ServerProcess:
    server = ServerProcess([], log=log, startup_timeout_s=startup_timeout_s)
    server.command = [sys.executable, "-c", code, str(server.port)]
    return server


def family(server: ServerProcess) -> list[int]:
    assert server.process is not None
    return [server.process.pid, *map(int, server.log_text().split("children")[1].split()[:2])]


def gone(pids: list[int], patience_s: float = 5.0) -> bool:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_stopping_ends_every_process(tmp_path: Path) -> None:
    with fake(HEALTHY, tmp_path / "log") as server:
        pids = family(server)
        assert all(psutil.pid_exists(pid) for pid in pids)
        server.check()
    assert gone(pids, 1.0)
    server.stop()  # once more does nothing


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    server = fake("import sys; print('bad flag --x'); sys.exit(2)", tmp_path / "log")
    begin = time.monotonic()
    with pytest.raises(ServerError, match="exit code 2") as raised:
        server.start()
    assert time.monotonic() - begin < 10
    assert "bad flag --x" in raised.value.log_tail
    assert "\n" not in str(raised.value)


def test_a_server_that_never_answers_is_ended(tmp_path: Path) -> None:
    server = fake("import time; print('children', 0, 0, flush=True); time.sleep(60)", tmp_path / "log", 1.5)
    waits: list[float] = []
    with pytest.raises(ServerError, match=r"no healthy server after 1\.5 s"):
        server.start(on_wait=waits.append)
    assert server.process is None
    assert waits == sorted(waits)
    assert waits[-1] < 1.6


def test_a_server_that_dies_later_is_noticed(tmp_path: Path) -> None:
    with fake(HEALTHY, tmp_path / "log") as server:
        assert server.process is not None
        server.process.kill()
        with pytest.raises(ServerError, match="exit code -9"):
            server.wait()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_does_not_outlive_its_starter(tmp_path: Path, sign: signal.Signals) -> None:
    code = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from tests.bench.test_server import HEALTHY, fake
        server = fake(HEALTHY, Path({str(tmp_path / "log")!r})).start()
        print(server.process.pid, flush=True)
        time.sleep(60)
    """)
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    in_group, outside = map(int, (tmp_path / "log").read_text().split("children")[1].split()[:2])
    try:
        starter.send_signal(sign)
        starter.wait(10)
        assert gone([pid, in_group])
    finally:
        os.kill(outside, signal.SIGKILL)  # whoever left the group can only be found by a living starter
        starter.stdout.close()


def test_ports() -> None:
    port = free_port()
    assert port_is_free(port)
    assert 1024 <= port < 65536
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not port_is_free(taken.getsockname()[1])
