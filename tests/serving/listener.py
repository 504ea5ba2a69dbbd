"""A streamed request as a process of its own sees it, which does nothing but read.

In the process that asks for other things too, what arrives would wait for the interpreter.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.servers import ROOT, Event


class Listener:
    """Started and waiting, so that asking costs the machine next to nothing; it asks once."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-c", "from tests.serving import listener; listener.main()", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it is up

    def ask(self, body: dict[str, Any]) -> None:
        """POST /generate with ``body``, streamed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(body | {"stream": True}) + "\n")
        self._process.stdin.flush()

    def events(self, timeout_s: float = 120.0) -> list[Event]:
        """All that arrived, once the answer has ended."""
        said, _ = self._process.communicate(timeout=timeout_s)
        return [Event(at_s, data) for at_s, data in json.loads(said)]


def main() -> None:
    print("ready", flush=True)
    body = sys.stdin.readline().encode()
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as server:
        # HTTP/1.0: what comes is not cut into chunks.
        head = f"POST /generate HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        server.sendall(head.encode() + body)
        pieces = [(time.perf_counter(), piece) for piece in iter(lambda: server.recv(65536), b"")]
    json.dump(list(_events(pieces)), sys.stdout)


def _events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Each server-sent event at the time of the piece that completed it."""
    rest, in_head = b"", True
    for at_s, piece in pieces:
        rest += piece
        if in_head:
            _, found, after = rest.partition(b"\r\n\r\n")
            if not found:
                continue
            rest, in_head = after, False
        *complete, rest = rest.split(b"\n\n")
        for event in complete:
            if event != b"data: [DONE]":
                yield at_s, json.loads(event.removeprefix(b"data: "))
