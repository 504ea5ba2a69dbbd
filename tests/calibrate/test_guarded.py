"""Children that end well, crash, fall silent, or talk nonsense."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.guarded import Ended, run_guarded

LONG_S = 60.0


def child(body: str, **limits: Any) -> tuple[Ended, list[dict[str, Any]]]:
    lines: list[dict[str, Any]] = []
    command = [sys.executable, "-c", "import json, os, sys, time, subprocess\n" + body]
    wide = {"first_s": LONG_S, "silence_s": LONG_S, "total_s": LONG_S}
    return run_guarded(command, lines.append, **{**wide, **limits}), lines


def waited_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + LONG_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_objects_are_taken_and_noise_is_not() -> None:
    ended, lines = child(
        "print('a library says'); print('{\"a\": 1}'); print('[1]'); print('{broken'); print('{\"b\": 2}')"
    )
    assert ended == Ended("done")
    assert lines == [{"a": 1}, {"b": 2}]


def test_input_reaches_the_child() -> None:
    text = "x" * 1_000_000
    ended, lines = child("print(json.dumps({'n': len(sys.stdin.read())}))", stdin=text)
    assert (ended.how, lines) == ("done", [{"n": len(text)}])


def test_a_child_that_does_not_read_its_input() -> None:
    ended, lines = child("print('{}')", stdin="x" * 1_000_000)
    assert (ended.how, lines) == ("done", [{}])


def test_a_crash_says_how() -> None:
    ended, lines = child("print('{}', flush=True); sys.stderr.write('first\\nthe reason\\n'); sys.exit(7)")
    assert (ended, lines) == (Ended("crashed", "exit status 7: the reason"), [{}])
    ended, _ = child("os.kill(os.getpid(), 11)")
    assert ended == Ended("crashed", "ended by SIGSEGV")


@pytest.mark.parametrize("limit", ["first_s", "total_s"])
def test_a_child_that_says_nothing_is_killed(limit: str) -> None:
    begin = time.monotonic()
    ended, lines = child("time.sleep(600)", **{limit: 0.3})
    assert (ended.how, lines) == ("silent", [])
    assert time.monotonic() - begin < LONG_S / 2


def test_a_child_that_falls_silent_is_killed_with_all_that_it_started() -> None:
    body = (
        "started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(json.dumps({'pids': [os.getpid(), started.pid]}), flush=True)\n"
        "time.sleep(600)"
    )
    ended, lines = child(body, silence_s=0.3)
    assert ended.how == "silent"
    for pid in lines[0]["pids"]:
        assert waited_for(lambda pid=pid: gone(pid))


def test_talking_on_does_not_lift_the_limit_of_the_whole() -> None:
    ended, lines = child("while True: print('{}', flush=True); time.sleep(0.05)", total_s=3.0)
    assert ended.how == "silent"
    assert lines


def test_the_environment_is_the_one_given(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "print(json.dumps(dict(os.environ)))"
    _, lines = child(body, environment={**os.environ, "ONE": "1"})
    assert lines[0]["ONE"] == "1"
    monkeypatch.setenv("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "1")
    monkeypatch.setenv("TWO", "2")
    _, lines = child(body)
    assert lines[0]["TWO"] == "2"
    assert "CUDA_ENABLE_COREDUMP_ON_EXCEPTION" not in lines[0]


def test_an_error_in_the_parent_leaves_no_child_behind() -> None:
    seen: list[int] = []

    def refuse(line: dict[str, Any]) -> None:
        seen.append(line["pid"])
        raise KeyboardInterrupt

    body = "import json, os, time; print(json.dumps({'pid': os.getpid()}), flush=True); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        run_guarded([sys.executable, "-c", body], refuse)
    assert waited_for(lambda: gone(seen[0]))


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(OSError, match="no-such-program"):
        run_guarded(["/no-such-program"], lambda line: None)
