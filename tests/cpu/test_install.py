"""The installer of SGLang's CPU recipe, without installing anything."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.cpu import install


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    versions = {"torch": "2.13.0+cpu", "aiohttp": "3.9"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


def test_only_what_is_missing_is_installed(installed: dict[str, str]) -> None:
    assert install.missing(["torch==2.13.0", "aiohttp"]) == []
    assert install.missing(["torch==2.12.0", "aiohttp", "tqdm"]) == ["torch==2.12.0", "tqdm"]
    installed["torch"] = "2.13.0"  # a CUDA build serves as well
    assert install.missing(["torch==2.13.0"]) == []


def test_requirements_are_plain_names_or_pins() -> None:
    wanted = install.read_requirements()
    assert "torch==2.13.0" in wanted
    assert all(not set(line) & set(" <>~!;#[") for line in wanted)
    pinned = {line.partition("==")[0] for line in install.WITHOUT_DEPENDENCIES}
    assert not pinned & {line.partition("==")[0] for line in wanted}  # those must not bring dependencies


def test_a_second_run_installs_nothing(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    for line in [*install.read_requirements(), *install.WITHOUT_DEPENDENCIES]:
        name, _, version = line.partition("==")
        installed[name] = version or "1.0"
    monkeypatch.setattr(install, "pip_install", lambda *_: pytest.fail("nothing is missing"))
    monkeypatch.setattr(install, "mend_torchvision", lambda: True)
    assert install.main() == 0


class Torchvision:
    """A torchvision on disk, and an interpreter whose import of it fails as told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "torchvision" / "_meta_registrations.py"
        self.file.parent.mkdir()
        self.file.write_text("register()\n")
        self.stderr = ""
        self.probes = 0
        found = SimpleNamespace(locate_file=lambda name: folder / name)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda _: found)
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, *_: Any, **__: Any) -> SimpleNamespace:
        self.probes += 1
        broken = self.stderr and self.file.read_text() != install.EMPTIED
        return SimpleNamespace(returncode=int(bool(broken)), stderr=self.stderr)


@pytest.fixture
def torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Torchvision:
    return Torchvision(tmp_path, monkeypatch)


def test_a_torchvision_that_imports_is_left_alone(torchvision: Torchvision) -> None:
    assert install.mend_torchvision()
    assert torchvision.file.read_text() == "register()\n"


def test_the_known_breakage_is_mended_once(torchvision: Torchvision) -> None:
    torchvision.stderr = "RuntimeError: operator torchvision::nms does not exist\n"
    assert install.mend_torchvision()
    assert torchvision.file.read_text() == install.EMPTIED
    probes = torchvision.probes
    assert install.mend_torchvision()
    assert torchvision.probes == probes


def test_another_breakage_is_reported_not_mended(torchvision: Torchvision, capsys: pytest.CaptureFixture[str]) -> None:
    torchvision.stderr = "ImportError: libjpeg.so.8 is missing\n"
    assert not install.mend_torchvision()
    assert torchvision.file.read_text() == "register()\n"
    assert "libjpeg" in capsys.readouterr().err
