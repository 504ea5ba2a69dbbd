"""Serves the demo model with ``--backend conflux`` until it is interrupted: ``python -m bench.serve [--port PORT]``."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from bench.model import NAME, ModelError, demo_model
from bench.server import ServerError, ServerProcess, port_is_free
from bench.serving import server_args

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__)
    parser.add_argument("--port", type=int, default=30000, help="port on 127.0.0.1 (default: 30000)")
    parser.add_argument("--mode", default="auto", help="--conflux-mode (default: auto)")
    parser.add_argument("--log", type=Path, default=ROOT / "out" / "serve" / "server.log")
    given = parser.parse_args(arguments)
    try:
        serve(given.port, given.mode, given.log)
    except (ModelError, ServerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
    return 0


def serve(port: int, mode: str, log: Path) -> None:
    """Serve until the server ends (raises :class:`ServerError`) or the caller is interrupted; leaves nothing behind."""
    if not port_is_free(port):
        raise ServerError(f"port {port} is in use: choose another with --port (make serve PORT=…)")
    model = demo_model()
    server = ServerProcess(server_args(model, mode=mode), log=log, port=port, cwd=ROOT)
    print(f"starting the server (log: {log}) …", flush=True)
    try:
        server.start()
        print(
            f"\nserving {NAME} at {server.url}   (Ctrl-C ends it; metrics at {server.url}/metrics)\n\n"
            f"curl -s {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d "
            f'\'{{"model": "{NAME}", "messages": '
            f'[{{"role": "user", "content": "What is the capital of France?"}}], '
            f'"max_tokens": 40, "temperature": 0}}\'\n',
            flush=True,
        )
        server.wait()
    finally:
        server.stop()


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
