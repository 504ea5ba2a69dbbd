"""Asking a running server to serve on in another way, and what it says of itself."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

from sglang_ext.config import MODES


def set_mode(url: str, mode: str, tbt_slo_ms: float) -> None:
    """Have a conflux server go on in ``mode`` with this target. Raises RuntimeError if it refuses."""
    wanted = {"conflux_mode": MODES.index(mode), "conflux_tbt_slo_ms": tbt_slo_ms}
    if _post(f"{url}/set_internal_state", {"server_args": wanted}) != [True]:
        raise RuntimeError(f"the server does not go on in {mode} mode with {tbt_slo_ms} ms: see its log")


def conflux_state(url: str) -> dict[str, Any]:
    """Live state of conflux, from ``/server_info``."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=30) as answer:
        state: dict[str, Any] = json.load(answer)["internal_states"][0]["conflux"]
    return state


def settle(url: str, within_s: float = 15.0) -> bool:
    """Wait until no request is left, and forget all prompts."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if _post(f"{url}/flush_cache", {}) is not None:
                return True
        except OSError:
            pass
        time.sleep(0.2)
    return False


def idle(url: str, within_s: float = 15.0) -> bool:
    """Wait until no request is left. What prompts left in the cache stays there."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        pool = conflux_state(url)["pool"]
        if pool["free_rows"] == pool["rows"] and not pool["protected_slots"]:
            return True
        time.sleep(0.1)
    return False


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
    try:
        return json.loads(text)
    except ValueError:
        return text
