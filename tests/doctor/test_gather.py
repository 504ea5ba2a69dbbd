"""Facts that are read from files and from the environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_ext.doctor import gather
from sglang_ext.doctor.gather import driver_version

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version: 12.3.0\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder)\n"


@pytest.mark.parametrize(("text", "version"), [(CLOSED, "535.183.01"), (OPEN, "580.159.04"), ("nothing of it\n", None)])
def test_driver_version_of_the_kernel_module(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version").write_text(text)
    assert driver_version(None, tmp_path) == version


def test_driver_version_of_the_library(tmp_path: Path) -> None:
    assert driver_version("/usr/lib/libcuda.so.580.159.04", tmp_path) == "580.159.04"
    assert driver_version("/usr/lib/libcuda.so.1", tmp_path) is None
    assert driver_version(None, tmp_path) is None
    (tmp_path / "version").write_text(OPEN)
    assert driver_version("/usr/lib/libcuda.so.535.1.2", tmp_path) == "580.159.04"


def test_names_of_gpus_from_the_kernel_module(tmp_path: Path) -> None:
    for bus, text in (("0000:01", "Model: \t\t NVIDIA H200\nIRQ: 7\n"), ("0000:02", "IRQ: 8\n")):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
        (tmp_path / "gpus" / bus / "information").write_text(text)
    assert gather._module_names(tmp_path) == ["NVIDIA H200", "unknown GPU"]


def test_state_directory(tmp_path: Path) -> None:
    (tmp_path / "learner").mkdir()
    (tmp_path / "learner" / "learner-0123.state").touch()
    (tmp_path / "learner" / "learner-0123.lock").touch()
    found = gather._state_dir(tmp_path)
    assert (found.writable, found.learnt_models, found.problem) == (True, 1, None)
    absent = tmp_path / "not" / "yet"
    assert gather._state_dir(absent).writable
    assert not absent.exists()
    (tmp_path / "file").touch()
    found = gather._state_dir(tmp_path / "file" / "below")
    assert not found.writable
    assert found.problem == f"{tmp_path / 'file'} is not a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_state_directory_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "may not be written" in str(gather._state_dir(tmp_path).problem)
    tmp_path.chmod(0o700)


def test_a_plugin_list_that_leaves_conflux_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert gather._sglang().plugin_problem == "SGLANG_PLUGINS=other leaves conflux out"
    monkeypatch.setenv("SGLANG_PLUGINS", "other, conflux")
    assert gather._sglang().plugin


def test_hidden_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "nvidia0"
    node.touch()
    monkeypatch.setattr(gather, "ACCELERATOR_NODES", (str(node),))
    monkeypatch.setattr(gather, "has_accelerator", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gather._hidden() == "CUDA_VISIBLE_DEVICES is empty"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert gather._hidden() == "CUDA_VISIBLE_DEVICES is -1"
    monkeypatch.setattr(gather, "has_accelerator", lambda: True)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert gather._hidden() == "SGLANG_USE_CPU_ENGINE is 1"
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    assert gather._hidden() is None
    node.unlink()
    monkeypatch.setattr(gather, "has_accelerator", lambda: False)
    assert gather._hidden() is None
