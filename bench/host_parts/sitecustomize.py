"""Times the parts of an iteration on the scheduler's main thread. A server whose ``PYTHONPATH`` begins with this folder
writes, with every twentieth forward, the sums so far as a JSON line to the file named in ``CONFLUX_HOST_PARTS``:
``{part: [calls, CPU seconds, seconds]}``. Parts lie within each other; ``total`` is the whole thread.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FORWARD, EVERY = "forward", 20
# By module: class, method, part. Stock SGLang 0.5.17's, then conflux's own within them.
PARTS = {
    "torch.cuda.streams": (("Event", "synchronize", "waiting for the device"),),
    "sglang.srt.managers.tp_worker": (("TpModelWorker", "forward_batch_generation", FORWARD),),
    "sglang.srt.managers.scheduler": (
        ("Scheduler", "process_input_requests", "requests come in"),
        ("Scheduler", "get_next_batch_to_run", "next batch"),
        ("Scheduler", "get_new_batch_prefill", "next batch: stock's prefill"),
        ("Scheduler", "process_batch_result", "results"),
    ),
    "sglang_ext.compat.planner": (
        ("Planner", "order_waiting", "conflux: queue's order"),
        ("Planner", "situation", "conflux: situation"),
    ),
    "sglang_ext.compat.scheduler": (
        ("ConfluxScheduler", "_mix", "conflux: mixing"),
        ("ConfluxScheduler", "begin", "conflux: record begun"),
    ),
    "sglang_ext.controller": (
        ("Controller", "decide", "conflux: decision"),
        ("Controller", "poll", "conflux: taking in"),
        ("Controller", "_finish", "conflux: taking in: times"),
    ),
    "learner.latency": (("LatencyModel", "with_snapshot", "conflux: taking in: snapshot"),),
}


def _timed(cls: type, name: str, part: str, sums: dict[str, list[float]], path: str) -> None:
    original: Callable[..., Any] = getattr(cls, name)

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return original(*args, **kwargs)
        cpu_s, begin_s = time.thread_time(), time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            of = sums.setdefault(part, [0, 0.0, 0.0])
            of[0] += 1
            of[1] += time.thread_time() - cpu_s
            of[2] += time.perf_counter() - begin_s
            if part == FORWARD and of[0] % EVERY == 0:
                total = {"total": [of[0], time.thread_time(), time.perf_counter()]}
                with open(path, "a") as out:
                    out.write(json.dumps(total | sums) + "\n")

    setattr(cls, name, timed)


class _Finder(MetaPathFinder):
    """Wraps the methods when their modules are imported."""

    def __init__(self, path: str) -> None:
        self._path, self._left = path, dict(PARTS)
        self._sums: dict[str, list[float]] = {}

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        parts = self._left.pop(name, None)
        spec = importlib.util.find_spec(name) if parts is not None else None
        if parts is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_wrap(module: ModuleType) -> None:
            load(module)
            for cls, method, part in parts:
                _timed(getattr(module, cls), method, part, self._sums, self._path)

        spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


if _path := os.environ.get("CONFLUX_HOST_PARTS"):
    sys.meta_path.insert(0, _Finder(_path))
