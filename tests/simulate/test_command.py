from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.shapes import shape_folder
from sglang_ext.cli import main

CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{at:02d}.0000000,{100 + 300 * at},{1 + at}\n" for at in range(12)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(CSV)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shape_folder("Qwen3-8B", tmp_path)


def replay(*arguments: object) -> int:
    return main(["replay", "--quiet", *map(str, arguments)])


def test_systems_are_compared_in_text_json_and_a_page(trace, model, tmp_path, capsys) -> None:
    names = ["stock", "conflux-auto"]
    files = ["--html", tmp_path / "t.html", "--json", tmp_path / "t.json"]
    assert replay("--trace", trace, "--model", model, "--device", "h200", "--systems", *names, *files) == 0
    out = capsys.readouterr().out
    assert "12 requests, 1 requests/s on average" in out
    assert all(re.search(rf"^{name} ", out, re.MULTILINE) for name in names)
    figures = json.loads((tmp_path / "t.json").read_text())
    assert figures["simulated"] is True
    assert list(figures["systems"]) == names
    for of in figures["systems"].values():
        assert of["completed"] == 12
        assert of["total_output_tokens"] == sum(range(1, 13))
        assert 0.0 < of["mean_ttft_ms"] <= of["p99_ttft_ms"]
        assert 0.0 < of["mean_itl_ms"] <= of["p99_itl_ms"] <= of["max_itl_ms"]
    html = (tmp_path / "t.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", html)
    assert html.count("<img") == 3


def test_the_trace_can_be_cut_and_stretched(trace, model, capsys) -> None:
    assert replay("--trace", trace, "--model", model, "--limit", 5, "--rate", 8, "--systems", "stock") == 0
    assert "5 requests, 8 requests/s" in capsys.readouterr().out


def test_a_record_teaches_the_device(trace, capsys) -> None:
    path = Path(__file__).parents[2] / "bench" / "results" / "h200-qwen3-8b-spatial.jsonl.gz"
    assert replay("--trace", trace, "--record", path, "--systems", "stock-mixed-512", "conflux-duet") == 0
    out = capsys.readouterr().out
    assert re.search(r"learnt from [\d,]+ iterations of h200-qwen3-8b-spatial", out)
    assert "device: NVIDIA H200" in out
    assert replay("--trace", trace, "--record", path, "--device", "h200") == 2
    assert "leave out --model and --device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--systems", "vllm"), "unknown system 'vllm'"),
        (("--systems", "stock-mixed-0"), "at least one token"),
        (("--rate", 1, "--scale", 2), "--rate and --scale exclude each other"),
        (("--device", "abacus"), "abacus"),
        (("--kv-tokens", 100), "request 0 needs 101 KV slots"),
        (("--html", "/nowhere/at/all.html"), "there is no directory /nowhere/at"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, trace, model, capsys) -> None:
    assert replay("--trace", trace, "--model", model, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("conflux replay: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_what_is_no_trace_is_refused_with_its_line(trace, model, tmp_path, capsys) -> None:
    trace.write_text(CSV + "2023-11-16 18:16:00.0,many,3\n")
    assert replay("--trace", trace, "--model", model) == 2
    assert "line 14" in capsys.readouterr().err
    assert replay("--trace", tmp_path / "none.csv", "--model", model) == 2
    assert replay("--trace", trace) == 2
    (tmp_path / "config.json").write_text("[]")
    trace.write_text(CSV)
    assert replay("--trace", trace, "--model", tmp_path) == 2
    assert "not a model's config" in capsys.readouterr().err


def test_options_that_are_no_numbers_are_refused(trace, capsys) -> None:
    for option, value in (("--limit", "0"), ("--rate", "nan"), ("--tbt-slo-ms", "-1")):
        with pytest.raises(SystemExit):
            replay("--trace", trace, option, value)
        assert option in capsys.readouterr().err


def test_it_needs_neither_torch_nor_sglang() -> None:
    code = "import sys, sglang_ext.simulate.command; print({name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "learner" in done.stdout
    assert not {"torch", "sglang"} & ast.literal_eval(done.stdout)
