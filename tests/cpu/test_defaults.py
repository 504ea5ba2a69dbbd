"""Where a CPU is chosen, and how large its KV pool becomes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext import cpu
from sglang_ext.cpu.machine import available_memory_bytes, has_accelerator


def write_config(folder: Path, **fields: Any) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


LLAMA = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}


def test_a_device_node_means_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    node = tmp_path / "nvidiactl"
    assert not has_accelerator((str(node),))
    node.touch()
    assert has_accelerator((str(tmp_path / "none"), str(node)))
    for hidden in ("", "-1", " "):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not has_accelerator((str(node),))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert has_accelerator((str(node),))


@pytest.mark.parametrize(
    ("asked", "accelerator", "expected"),
    [(None, False, True), (None, True, False), ("1", True, True), ("0", False, False)],
)
def test_the_engine_flag_outranks_what_is_found(
    asked: str | None, accelerator: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_accelerator", lambda: accelerator)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    if asked is not None:
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", asked)
    assert cpu.serves_on_cpu() is expected


def test_kv_bytes_of_a_token(tmp_path: Path) -> None:
    assert cpu.kv_bytes_per_token(write_config(tmp_path, **LLAMA)) == 2 * 30 * 3 * 64 * 4
    assert cpu.kv_bytes_per_token(write_config(tmp_path, **LLAMA, head_dim=128)) == 2 * 30 * 3 * 128 * 4
    without_gqa = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert cpu.kv_bytes_per_token(write_config(tmp_path, **without_gqa)) == 2 * 30 * 9 * 64 * 4


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"num_attention_heads": "many"}', '{"num_attention_heads": 0}'])
def test_an_odd_config_falls_back(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert cpu.max_total_tokens(str(tmp_path)) == cpu.FALLBACK_TOTAL_TOKENS


@pytest.mark.parametrize("path", [None, "/no/such/folder", "some-org/some-model"])
def test_an_unknown_model_falls_back(path: str | None) -> None:
    assert cpu.max_total_tokens(path) == cpu.FALLBACK_TOTAL_TOKENS


@given(available=st.integers(0, 2**42))
def test_the_pool_stays_within_its_share_of_memory(tmp_path_factory: pytest.TempPathFactory, available: int) -> None:
    path = write_config(tmp_path_factory.getbasetemp(), **LLAMA)
    per_token = cpu.kv_bytes_per_token(path)
    assert per_token is not None
    tokens = cpu.max_total_tokens(path, available)
    assert tokens >= 1024
    assert tokens % 1024 == 0
    assert tokens == 1024 or tokens * per_token <= min(cpu.KV_POOL_BYTES, available * cpu.KV_POOL_SHARE)


def test_available_memory_is_that_of_a_computer() -> None:
    assert 2**26 < available_memory_bytes() < 2**50


@pytest.mark.parametrize(
    ("cores", "ranks", "binding"),
    [({0, 1}, 2, "0|1"), ({4, 5, 6, 7}, 2, "4,5|6,7"), ({0, 1, 2}, 2, "0|1"), ({0}, 1, None), ({3}, 2, "3|3")],
)
def test_ranks_share_the_cores(
    cores: set[int], ranks: int, binding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(os, "environ", {})
    cpu.bind_ranks(ranks)
    assert os.environ.get("SGLANG_CPU_OMP_THREADS_BIND") == binding
    if binding is not None:
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "chosen"
        cpu.bind_ranks(ranks)
        assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == "chosen"
