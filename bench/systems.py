"""Systems that are compared on one GPU, and how each is started."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
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
CONFLUX = {f"conflux-{mode}": mode for mode in ("auto", "chunked", "temporal", "spatial", "reserved", "duet")}


def groups(systems: list[str]) -> list[list[str]]:
    """Systems by the server that serves them: one for each of stock's settings, one for all of conflux's modes.

    Raises ValueError for a name that is none of STOCK or CONFLUX.
    """
    if unknown := [system for system in systems if system not in {*STOCK, *CONFLUX}]:
        raise ValueError(f"unknown system {unknown[0]!r}: one of {', '.join([*STOCK, *CONFLUX])}")
    stock = [[system] for system in systems if system in STOCK]
    own = [system for system in systems if system in CONFLUX]
    return [*stock, own] if own else stock


def measure_missing(
    systems: list[str],
    missing: Callable[[list[str]], Sequence[Point]],
    measure: Callable[[Sequence[Point]], None],
    until_s: float,
) -> int:
    """Have each server ``measure`` the points of its systems that are ``missing``, none started after ``until_s``
    (:func:`time.monotonic`); one that fails is passed over. Returns an exit status: 3 if points are missing still."""
    for group in groups(systems):
        left = missing(group)
        if not left:
            continue
        if time.monotonic() > until_s:
            break
        try:
            measure(left)
        except ServerError as error:
            print(f"{left[0][0]}: {error}\n{error.log_tail}", flush=True)
    count = len(missing(systems))
    if count:
        print(f"{count} points are missing: run again to go on")
    return 3 if count else 0


def server(first: str, given: argparse.Namespace, **options: float) -> ServerProcess:
    """The server for a group, by its first system. Of ``given``: ``model``, ``logs`` and ``server_args``; ``options``
    are those of :func:`bench.shapes.gpu_args`. The tiny shape is served on a CPU. Conflux records what it does under
    ``logs``."""
    given.logs.mkdir(parents=True, exist_ok=True)
    folder, tiny = shape_folder(given.model, given.logs), given.model == "tiny"
    args = cpu_args(folder) if tiny else gpu_args(folder, **options)  # type: ignore[arg-type]
    if first in STOCK:
        args += STOCK[first]
    else:
        args += ["--backend", "conflux", "--conflux-state-dir", str(given.logs / "state")]
        args += ["--conflux-record", str(given.logs / "conflux.jsonl.gz")]
    env = cpu_environment(first in STOCK) if tiny else None
    log = given.logs / f"{first}.log"
    return ServerProcess([*args, *given.server_args], log=log, env=env, cwd=ROOT, startup_timeout_s=300.0)
