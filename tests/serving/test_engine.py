"""The Python API: ``sglang.Engine(backend="conflux", …)``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import CPU_ARGS, server_environment
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.server

PROGRAM = r"""
import json, sys
import psutil, sglang

def learners():
    alive = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return [p.pid for p in alive if "learner" in " ".join(p.cmdline())]

def main():
    model, state = sys.argv[1:3]
    common = dict(model_path=model, dtype="float32", max_total_tokens=2000, backend="conflux", conflux_state_dir=state)
    found = {}
    try:
        sglang.Engine(**common, conflux_mode="turbo")
    except ValueError as error:
        found["error"] = str(error)
    try:
        sglang.Engine(**common, enable_pdmux=True)
    except ValueError as error:
        found["refused"] = str(error)
    engine = sglang.Engine(**common, conflux_mode="chunked", conflux_tbt_slo_ms=50)
    answer = engine.generate(input_ids=[5, 6, 7], sampling_params={"temperature": 0, "max_new_tokens": 4})
    found["tokens"] = len(answer["output_ids"])
    found["state"] = engine.get_server_info()["internal_states"][0]["conflux"]["mode"]
    try:
        engine.generate(input_ids=[5], sampling_params={"custom_params": {"tbt_slo_ms": "no"}})
    except ValueError as error:
        found["request"] = str(error)
    found["learners"] = len(learners())
    engine.shutdown()
    found["left"] = len(learners())
    print("RESULT" + json.dumps(found))

if __name__ == "__main__":
    main()
"""


def test_engine(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(script), str(make_tiny_model()), str(tmp_path / "state")],
        env=server_environment("conflux"),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout.split("RESULT", 1)[1].splitlines()[0])
    assert "--conflux-mode must be one of" in found["error"]
    assert found["refused"].startswith("--enable-pdmux")
    assert found["tokens"] == 4
    assert found["state"] == "chunked"
    assert "tbt_slo_ms" in found["request"]
    assert found["learners"] == 1
    assert found["left"] == 0


def test_sglang_serve_takes_the_options_too():
    sglang = str(Path(sys.executable).with_name("sglang"))
    command = [sglang, "serve", str(make_tiny_model()), "--backend", "conflux"]
    done = subprocess.run(
        [*command, *CPU_ARGS, "--conflux-mode", "turbo"],
        env=server_environment("conflux"),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "conflux: error: --conflux-mode must be one of" in done.stderr
