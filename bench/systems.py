"""Systems that are compared on one GPU, and how each is started."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from bench.cpu import cpu_environment
from bench.server import ServerError, ServerProcess
from bench.shapes import cpu_args, gpu_args, shape_folder

Point = TypeVar("Point", bound=tuple)  # whose first field is its system
ROOT = Path(__file__).resolve().parent.parent

STOCK: dict[str, tuple[str, ...]] = {"stock": ()} | {
    f"stock-mixed-{chunk}": ("--enable-mixed-chunk", "--chunked-prefill-size", str(chunk))
    for chunk in (512, 1024, 2048, 4096, 8192)
}
PDMUX = {"stock-pdmux": ("--enable-pdmux", "--chunked-prefill-size", "-1", "--disable-overlap-schedule")}
"""Stock's own sharing of SMs, left out unless asked for; 0.5.17 does not start with it by itself, see bench/pdmux."""
CONFLUX = {f"conflux-{mode}": mode for mode in ("auto", "chunked", "temporal", "spatial", "reserved", "duet")}


def groups(systems: list[str]) -> list[list[str]]:
    """Systems by the server that serves them: one for each of stock's settings, one for all of conflux's modes.

    Raises ValueError for a name that is none of STOCK, PDMUX or CONFLUX.
    """
    if unknown := [system for system in systems if system not in {*STOCK, *PDMUX, *CONFLUX}]:
        raise ValueError(f"unknown system {unknown[0]!r}: one of {', '.join([*STOCK, *PDMUX, *CONFLUX])}")
    stock = [[system] for system in systems if system not in CONFLUX]
    own = [system for system in systems if system in CONFLUX]
    return [*stock, own] if own else stock


def add_arguments(parser: argparse.ArgumentParser, *, several: bool = True) -> None:
    """What :func:`server` and, if ``several``, :func:`measure_missing` need of the command line besides ``systems`` and
    ``model``. One server alone is there for its record."""
    parser.add_argument("--server-args", nargs=argparse.REMAINDER, default=[], help="further flags for every server")
    parser.add_argument("--pool", type=int, help="KV cache of each server, in tokens (default: what memory allows)")
    if several:
        parser.add_argument("--record", action="store_true", help="have conflux record, at the cost of host time")
        text = "start so many servers at once on the GPU, all with --pool, and measure them in turns (default: 1)"
        parser.add_argument("--together", type=int, default=1, help=text)
    else:
        parser.set_defaults(together=1, record=True)


def measure_missing(
    given: argparse.Namespace,
    missing: Callable[[list[str]], Sequence[Point]],
    measure: Callable[[ServerProcess, Point], None],
    until_s: float,
    **options: float,
) -> int:
    """``measure`` the points of ``given.systems`` that are ``missing``, those of servers that run together in turns.

    None is begun after ``until_s`` (:func:`time.monotonic`). A server that fails is passed over. ``options`` are those
    of :func:`bench.shapes.gpu_args`. Returns an exit status: 3 if points are missing still.
    """
    todo = [group for group in groups(given.systems) if missing(group)]
    while todo and time.monotonic() < until_s:
        batch, todo = todo[: given.together], todo[given.together :]
        running = _started([group[0] for group in batch], given, options)
        try:
            servers = {name: running[group[0]] for group in batch if group[0] in running for name in group}
            # Points that differ only in their systems follow each other.
            for point in sorted(missing(list(servers)), key=lambda point: point[1:]):
                if time.monotonic() > until_s:
                    break
                if (one := servers.get(point[0])) is not None and not _measured(one, point, measure):
                    servers = {name: other for name, other in servers.items() if other is not one}
        finally:
            for one in running.values():
                one.stop()
    count = len(missing(given.systems))
    if count:
        print(f"{count} points are missing: run again to go on")
    return 3 if count else 0


def _measured(one: ServerProcess, point: Point, measure: Callable[[ServerProcess, Point], None]) -> bool:
    try:
        measure(one, point)
    except ServerError as error:
        _say(point[0], error)
        return False
    return True


def _say(system: str, error: ServerError) -> None:
    print(f"{system}: {error}\n{error.log_tail}", flush=True)


def _started(firsts: list[str], given: argparse.Namespace, options: dict[str, float]) -> dict[str, ServerProcess]:
    """The servers that came up, each by the first of its systems."""

    def start(first: str) -> ServerProcess | None:
        try:
            return server(first, given, **options).start()
        except ServerError as error:
            _say(first, error)
            return None

    with ThreadPoolExecutor(len(firsts)) as pool:
        return {first: one for first, one in zip(firsts, pool.map(start, firsts), strict=True) if one is not None}


def server(
    first: str,
    given: argparse.Namespace,
    *,
    path: Path | None = None,
    variables: Mapping[str, str] | None = None,
    **options: float,
) -> ServerProcess:
    """The server for a group, by its first system. Of ``given``: ``model``, ``logs`` and what :func:`add_arguments`
    adds; ``options`` are those of :func:`bench.shapes.gpu_args`. The tiny shape is served on a CPU. A record goes under
    ``logs``. ``path`` is put before ``PYTHONPATH``, ``variables`` are further ones of its environment."""
    given.logs.mkdir(parents=True, exist_ok=True)
    folder, tiny = shape_folder(given.model, given.logs), given.model == "tiny"
    if given.pool is not None and not tiny:
        # Memory is divided by pools of equal size: a fraction would be of what others have left.
        options |= {"memory": 0.95}
    args = cpu_args(folder) if tiny else gpu_args(folder, **options)  # type: ignore[arg-type]
    args += ["--max-total-tokens", str(given.pool)] if given.pool is not None else []
    # Who waits for its turn must not keep a core busy meanwhile.
    args += ["--sleep-on-idle"] if given.together > 1 else []
    if first not in CONFLUX:
        args += STOCK[first] if first in STOCK else PDMUX[first]
    else:
        args += ["--backend", "conflux", "--conflux-state-dir", str(given.logs / "state")]
        args += ["--conflux-record", str(given.logs / "conflux.jsonl.gz")] if given.record else []
    env = (cpu_environment(first in STOCK) if tiny else dict(os.environ)) | dict(variables or {})
    if path := ROOT / "bench" / "pdmux" if first in PDMUX else path:
        env["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [env.get("PYTHONPATH")])])
    log = given.logs / f"{first}.log"
    return ServerProcess([*args, *given.server_args], log=log, env=env, cwd=ROOT, startup_timeout_s=300.0)
