"""What is made of a self-test that passes, fails, crashes, hangs or talks nonsense."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path

import pytest

from sglang_ext.sm.watched import Limits, Report, run_self_test

LIMITS = Limits(start_s=20.0, level_s=20.0, total_s=60.0)

# A child that plans 8, 16 and 24 TPCs and then does as it is told on each: MISHAPS maps a level to a statement.
CHILD = """
import json, os, signal, sys, time
def say(**message): print(json.dumps(message), flush=True)
def done(tpcs, verdict="ok", reason=""): say(event="done", tpcs=tpcs, verdict=verdict, reason=reason, seconds=0.1)
options = dict(argument.lstrip("-").split("=", 1) for argument in sys.argv[2:])
MISHAPS = {mishaps}
{before}
levels = [int(level) for level in options.get("levels", "8,16,24").split(",")]
say(event="plan", levels=levels, gemm="checked", topology='{{"tpcs": 66}}')
for level in levels:
    say(event="level", tpcs=level)
    if level in MISHAPS:
        exec(MISHAPS[level])
        break
    done(level)
say(event="end")
"""


def run(tmp_path: Path, mishaps: dict[int, str] | None = None, before: str = "", limits: Limits = LIMITS) -> Report:
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(mishaps=mishaps or {}, before=before))
    return run_self_test("smctrl", ["--driver=x"], limits, [sys.executable, str(script)])


def test_all_levels_pass(tmp_path: Path) -> None:
    report = run(tmp_path)
    assert report.ok
    assert report.levels == (8, 16, 24)
    assert report.lost == {}
    assert (report.gemm, report.topology) == ("checked", '{"tpcs": 66}')
    assert report.seconds > 0


@pytest.mark.parametrize(
    ("mishap", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("sys.exit('device lost')", "exit status 1: device lost"),
        ("done(level, 'hung', 'GEMMs on the decode stream did not end')", "GEMMs on the decode stream did not end"),
        ("say(event='error', reason='CUDA_ERROR_LAUNCH_FAILED')", "CUDA_ERROR_LAUNCH_FAILED"),
        ("time.sleep(1000)", "it hung: nothing was heard of it for 4 s"),
    ],
)
def test_a_level_that_hangs_or_crashes_is_lost_and_the_rest_is_tested(tmp_path: Path, mishap: str, why: str) -> None:
    report = run(tmp_path, {16: mishap}, limits=dataclasses.replace(LIMITS, level_s=4.0))
    assert report.ok
    assert report.levels == (8, 24)
    assert list(report.lost) == [16]
    assert why in report.lost[16]


def test_a_level_on_the_wrong_sms_refuses_the_whole_way(tmp_path: Path) -> None:
    report = run(tmp_path, {16: "done(level, 'wrong', 'ran on SM 5')"})
    assert not report.ok
    assert report.reason == "ran on SM 5"


def test_too_many_lost_levels_refuse_the_whole_way(tmp_path: Path) -> None:
    crash = "os._exit(7)"
    report = run(tmp_path, {8: crash, 16: crash}, limits=dataclasses.replace(LIMITS, most_lost=1))
    assert not report.ok
    assert "with decode on 8 TPCs: its process ended: exit status 7; with decode on 16" in report.reason


def test_with_every_level_lost_there_is_a_reason(tmp_path: Path) -> None:
    report = run(tmp_path, dict.fromkeys((8, 16, 24), "os._exit(7)"), limits=dataclasses.replace(LIMITS, most_lost=9))
    assert not report.ok
    assert report.levels == ()
    assert "exit status 7" in report.reason


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("say(event='error', reason='no GPU'); sys.exit(1)", "no GPU"),
        ("sys.exit(3)", "its process ended: exit status 3"),
        ("say(event='end'); sys.exit(0)", "tested nothing"),
        ("print('noise'); print('[1]'); print('{\"event\": '); sys.exit(3)", "exit status 3"),
    ],
)
def test_a_test_that_does_not_begin_refuses_the_way(tmp_path: Path, before: str, why: str) -> None:
    report = run(tmp_path, before=before)
    assert not report.ok
    assert why in report.reason


def test_noise_between_the_lines_is_ignored(tmp_path: Path) -> None:
    assert run(tmp_path, before="print('warning: x'); print('{}'); print('[1]')").ok


def test_a_hung_child_is_killed_with_what_it_started_within_its_limit(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    before = (
        "import subprocess\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{other.pid}}')\n"
        "time.sleep(1000)\n"
    )
    begin_s = time.monotonic()
    report = run(tmp_path, before=before, limits=dataclasses.replace(LIMITS, start_s=5.0))
    assert time.monotonic() - begin_s < 30
    assert report.reason == "it hung: nothing was heard of it for 5 s"
    child, other = map(int, pids.read_text().split())
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    deadline_s = time.monotonic() + 10
    while not _ended(other) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert _ended(other)


def _ended(pid: int) -> bool:
    """Gone, or a zombie that whoever inherited it has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_the_whole_has_a_limit(tmp_path: Path) -> None:
    slow = dict.fromkeys((8, 16, 24), "time.sleep(1000)")
    limits = Limits(start_s=20.0, level_s=1.5, total_s=4.0, most_lost=99)
    begin_s = time.monotonic()
    report = run(tmp_path, slow, limits=limits)
    assert time.monotonic() - begin_s < 30
    assert not report.ok


def test_a_report_is_remembered_as_it_was() -> None:
    report = Report(levels=(8, 24), lost={16: "hung"}, topology="{}", gemm="checked", seconds=1.5)
    assert Report.from_dict(report.to_dict()) == report


@pytest.mark.parametrize(
    "damaged",
    [{}, {"levels": 3}, {"levels": [], "lost": []}, {"levels": ["x"], "lost": []}, {"levels": [8], "lost": [[1]]},
     {"levels": [8], "lost": [], "reason": "failed"}, {"levels": [8], "lost": [], "extra": 1}],
)  # fmt: skip
def test_a_damaged_report_is_none(damaged: dict) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Report.from_dict(damaged)
