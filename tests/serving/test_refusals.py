"""What cannot be served is refused at start: one line on stderr that names the flag and the remedy, exit code 2."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from unittest import mock

import pytest

from tests.servers import ROOT, server_environment
from tests.tiny import make_tiny_model

OTHER_SGLANG = ROOT / ".venv" / "other"

WRONG = {
    "bad SLO": (["--conflux-tbt-slo-ms", "-5"], "--conflux-tbt-slo-ms"),
    "bad TTFT": (["--conflux-ttft-slo-ms", "soon"], "--conflux-ttft-slo-ms"),
    "unknown mode": (["--conflux-mode", "turbo"], "--conflux-mode"),
    "spatial with speculative decoding": (
        ["--conflux-mode", "spatial", "--speculative-algorithm", "EAGLE"],
        "--speculative-algorithm",
    ),
    "LoRA": (["--enable-lora"], "--enable-lora"),
    "PD disaggregation": (["--disaggregation-mode", "prefill"], "--disaggregation-mode"),
    "pdmux": (["--enable-pdmux"], "--enable-pdmux"),
    "two tokenizer workers": (["--tokenizer-worker-num", "2"], "--tokenizer-worker-num"),
    "missing record directory": (["--conflux-record", "/no/such/place/r.jsonl"], "--conflux-record"),
    "pipeline parallel": (["--pp-size", "2"], "--pp-size"),
    "data parallel": (["--dp-size", "2"], "--dp-size"),
    "split without spatial": (["--conflux-fixed-split", "8"], "--conflux-fixed-split"),
    "split on a CPU": (["--conflux-mode", "spatial", "--conflux-fixed-split", "8"], "--conflux-fixed-split"),
    "learner address": (["--conflux-learner", "example.org:1"], "--conflux-learner"),
    "state dir": (["--conflux-state-dir", "/dev/null/x"], "--conflux-state-dir"),
    "preferred target": (
        ["--preferred-sampling-params", '{"custom_params": {"tbt_slo_ms": "x"}}'],
        "--preferred-sampling-params",
    ),
    "unknown backend": (["--backend", "confluxx"], "--backend"),
}
ON_GPU = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="asks for a CPU")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """SGLang's own parser with the plugin loaded, as ``launch_server`` has it."""
    server_args = pytest.importorskip("sglang.srt.server_args")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    model = make_tiny_model()
    common = ["--model-path", str(model), "--conflux-state-dir", str(tmp_path_factory.mktemp("state"))]

    def resolve(*argv: str):
        backend = [] if "--backend" in argv else ["--backend", "conflux"]
        with mock.patch.dict(os.environ):
            return server_args.ServerArgs.from_cli_args(parser.parse_args([*common, *backend, *argv]))

    return resolve


@ON_GPU
@pytest.mark.parametrize(("argv", "flag"), WRONG.values(), ids=WRONG)
def test_wrong_invocations_end_in_one_line_and_code_2(arguments, argv, flag, capsys):
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        arguments(*argv)
    assert ended.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("conflux: error:")]
    assert len(lines) == 1
    assert flag in lines[0]


@ON_GPU
def test_right_invocations_carry_their_settings(arguments):
    resolved = arguments("--conflux-mode", "chunked", "--conflux-tbt-slo-ms", "50", "--enable-mixed-chunk")
    assert resolved._conflux["mode"] == "chunked"
    assert resolved._conflux["tbt_slo_s"] == 0.05
    assert not resolved.enable_mixed_chunk
    assert resolved.attention_backend == "torch_native"
    assert resolved.max_total_tokens


def test_the_stock_backend_is_left_alone(arguments):
    resolved = arguments("--backend", "sglang", "--enable-mixed-chunk", "--device", "cpu")
    assert not hasattr(resolved, "_conflux")
    assert resolved.enable_mixed_chunk


@ON_GPU
def test_an_unsupported_architecture_is_refused(arguments, tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1}'
    )
    with pytest.raises(SystemExit):
        arguments("--model-path", str(tmp_path), "--skip-tokenizer-init")
    assert "GPT2LMHeadModel is not supported" in capsys.readouterr().err


@ON_GPU
@pytest.mark.server
@pytest.mark.parametrize("name", ["bad SLO", "pdmux", "missing record directory"])
def test_real_processes_are_refused(name):
    argv, flag = WRONG[name]
    done = _launch(["--model-path", str(make_tiny_model()), "--backend", "conflux", *argv])
    assert done.returncode == 2
    assert _error_line(done).count(flag) == 1


@pytest.mark.server
def test_a_scheduler_without_conflux_is_not_served(tmp_path):
    """The plugin fails to load in the scheduler process only, where SGLang just logs it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import multiprocessing, sys\n"
        "if any('spawn_main' in a for a in sys.orig_argv):\n"
        "    sys.modules['sglang_ext.plugin'] = None\n"
    )
    env = server_environment("conflux")
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    args = ["--model-path", str(make_tiny_model()), "--backend", "conflux", "--max-total-tokens", "2000"]
    done = _launch([*args, "--conflux-state-dir", str(tmp_path)], env=env)
    assert done.returncode == 2
    assert "came up without conflux" in _error_line(done)


@pytest.mark.server
def test_a_newer_sglang_shows_the_options_and_is_refused():
    newer = OTHER_SGLANG / "sglang-0.5.23"
    if not newer.is_dir():
        pytest.skip("`make test` installs SGLang 0.5.23 beside the supported one")
    env = server_environment("conflux")
    env["PYTHONPATH"] = os.pathsep.join([str(newer), env["PYTHONPATH"]])
    shown = _launch(["--help"], env=env)
    assert shown.returncode == 0
    assert "--conflux-tbt-slo-ms" in shown.stdout
    done = _launch(["--model-path", "anything", "--backend", "conflux"], env=env)
    assert done.returncode == 2
    assert "supports SGLang 0.5.17, and 0.5.23 is installed" in _error_line(done)


def _launch(argv: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang.launch_server", *argv]
    return subprocess.run(
        command, env=env or server_environment("conflux"), cwd="/", capture_output=True, text=True, timeout=180
    )


def _error_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.startswith("conflux: error:")]
    assert len(lines) == 1, done.stderr[-2000:]
    return lines[0]
