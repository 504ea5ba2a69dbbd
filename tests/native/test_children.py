"""How the parent deals with its children: real ones, and scripts that misbehave in their stead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("conflux_native._core", reason="the extension is not built")

from conflux_native import child_process
from conflux_native.child import HIT, NO_EFFECT, OTHER_SMS, VERIFIED
from conflux_native.search import NotFound

from .searching import World, make_world, outcomes  # noqa: F401


def silent(tmp_path: Path, body: str) -> tuple[str, ...]:
    script = tmp_path / "child.py"
    script.write_text("import json, os, signal, sys, time\nsay = lambda **m: print(json.dumps(m), flush=True)\n" + body)
    return (sys.executable, str(script))


@pytest.mark.parametrize("how", ["time.sleep(3600)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_child_that_falls_silent_is_killed(world: World, tmp_path: Path, how: str) -> None:
    ignored = "[signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]\n"
    body = ignored + f"say(event='hello')\nsay(event='try', offset=1280)\n{how}\n"
    world.patch.setattr(child_process, "COMMAND", silent(tmp_path, body))
    with pytest.raises(NotFound, match=r"tried offset 0x500 \(hung\)"):
        world.find(offsets=[0x500], probe_timeout_s=0.1)
    assert len(world.pids) == 1


def test_noise_and_half_lines_do_not_confuse_the_parent(world: World, tmp_path: Path) -> None:
    done = '{"event": "done", "offset": 1280, "outcome": "no effect", "before": ""}'
    body = (
        "print('WARNING: a library is chatty'); print('{}'); print('[1]'); print('{\"event\": \"news\"}'); print()\n"
        "sys.stderr.write('x' * 1_000_000)\nsay(event='try', offset=1280)\n"
        f"line = {done!r}\nsys.stdout.write(line[:20]); sys.stdout.flush(); time.sleep(0.2); print(line[20:])\n"
        "say(event='end')\n"
    )
    world.patch.setattr(child_process, "COMMAND", silent(tmp_path, body))
    with pytest.raises(NotFound, match=r"tried offset 0x500 \(no effect\)"):
        world.find(offsets=[0x500])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("sys.exit('no module named so')", "could not start: exit status 1: no module named so"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "could not start: killed by SIGSEGV"),
        ("say(event='error', reason='CUDA_ERROR_NO_DEVICE')", "could not start: CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_a_child_that_cannot_start_says_why(world: World, tmp_path: Path, body: str, reason: str) -> None:
    world.patch.setattr(child_process, "COMMAND", silent(tmp_path, body))
    for offsets in (None, [0x500]):
        with pytest.raises(NotFound) as caught:
            world.find(offsets=offsets)
        assert caught.value.reason.endswith(f"tried no offset; a child process {reason}")


def test_an_interpreter_that_is_gone_is_no_crash(world: World, tmp_path: Path) -> None:
    world.patch.setattr(child_process, "COMMAND", (str(tmp_path / "python"),))
    with pytest.raises(NotFound, match=r"could not start: .*No such file"):
        world.find()


def test_the_time_limit_ends_a_search(world: World, tmp_path: Path) -> None:
    world.patch.setattr(child_process, "COMMAND", silent(tmp_path, "say(event='try', offset=4)\ntime.sleep(3600)"))
    with pytest.raises(NotFound, match="tried no offset; the time limit was reached"):
        world.find(timeout_s=0.5)
    with pytest.raises(NotFound, match="tried no offset; the time limit was reached"):
        world.find(timeout_s=0.0)


def test_a_child_that_reads_beyond_the_structure_may_die_of_it(world: World, tmp_path: Path) -> None:
    body = (
        "if '--scan' in sys.argv:\n    say(event='scan'); os.abort()\n"
        "for offset in map(int, sys.argv[-1].split(',')):\n    say(event='try', offset=offset)\n"
        f"    say(event='done', offset=offset, outcome={OTHER_SMS!r}, before='')\nsay(event='end')\n"
    )
    world.patch.setattr(child_process, "COMMAND", silent(tmp_path, body))
    with pytest.raises(NotFound, match="tried 1023 offsets"):
        world.find(skip_known=True)
    assert len(world.pids) == 2


def test_an_offset_that_suffers_for_another_gets_a_second_chance(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # 0x600 looks harmless, but its child then crashes on whatever comes next.
    script = tmp_path / "child.py"
    script.write_text(
        "import json, os, sys\n"
        "def say(**message): os.write(1, json.dumps(message).encode() + b'\\n')\n"
        "offsets, verify, harmed = sys.argv[-1].split(','), '--verify' in sys.argv, False\n"
        "say(event='hello')\n"
        "for offset in map(int, offsets):\n"
        "    say(event='try', offset=offset)\n"
        "    if harmed: os.abort()\n"
        "    good = offset == 0x51c\n"
        f"    outcome = ('{VERIFIED}' if verify else '{HIT}') if good else '{NO_EFFECT}'\n"
        "    say(event='done', offset=offset, outcome=outcome, before='')\n"
        "    harmed = offset == 0x600\n"
        "    if good: break\n"
        "say(event='end')\n"
    )
    monkeypatch.setattr(child_process, "COMMAND", (sys.executable, str(script)))
    found = world.find(offsets=[0x400, 0x600, 0x51C, 0x404])
    assert outcomes(found.tried) == {0x400: NO_EFFECT, 0x600: NO_EFFECT, 0x404: NO_EFFECT, 0x51C: VERIFIED}


def test_the_parent_may_have_threads_and_a_context_and_children_of_its_own(world: World) -> None:
    from conflux_native import Device, Driver

    device = Device(Driver(world.library.path))
    stream = device.create_stream()
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(32)]
    for thread in threads:
        thread.start()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert world.find(offsets=[0x518, 0x51C]).offset == 0x51C
        assert other.poll() is None
        assert set(device.smid_histogram(stream)) != {0}
    finally:
        stop.set()
        other.communicate(b"\n")
        device.destroy_stream(stream)
    assert other.returncode == 0


def test_children_see_the_devices_that_the_parent_sees(world: World, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    body = f"open({str(seen)!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'] + ' ' + ' '.join(sys.argv))\n"
    world.patch.setattr(child_process, "COMMAND", silent(tmp_path, body))
    world.patch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(NotFound):
        world.find()
    assert seen.read_text().startswith("3 ")
    assert "--ordinal=0" in seen.read_text()


def test_nothing_reaches_the_terminal(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    world.set(CRASH="0x600")
    world.find(offsets=[0x600, 0x51C])
    assert capfd.readouterr() == ("", "")


def command(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "conflux_native.child", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, env={**os.environ, **settings})


def test_the_childs_help_says_that_it_is_internal() -> None:
    shown = command("--help")
    assert shown.returncode == 0
    assert "Internal to conflux" in shown.stdout


def test_an_abandoned_child_ends_by_itself(world: World) -> None:
    arguments = [f"--driver={world.library.path}", "--limit=1", "--probe-timeout=3600", "1536"]
    shown = command(*arguments, STAND_IN_HANG="0x600")
    assert shown.returncode == -signal.SIGALRM
    assert '"try"' in shown.stdout
