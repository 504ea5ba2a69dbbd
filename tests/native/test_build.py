"""What a user installs: from a source distribution, with a compiler alone, and without one."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import conflux_native

from .standin import compiler

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("scikit_build_core")
pytest.importorskip("nanobind")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    program = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(folder)], cwd=ROOT, check=True, timeout=300)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


def wheel(source: Path, folder: Path, **environment: str) -> Path:
    """Builds a wheel as pip does, with no trace of a CUDA toolkit, and unpacks it."""
    without = {name: value for name, value in os.environ.items() if "CUDA" not in name and name not in ("CXX", "CC")}
    tools = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    environment = {**without, "PATH": os.pathsep.join(tools), **environment}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*command, "-w", str(folder), str(source)], env=environment, cwd=folder, check=True, timeout=1200)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as packed:
        packed.extractall(folder / "unpacked")
    return folder / "unpacked"


def seen_from(wheel: Path, program: str) -> str:
    """What ``program`` prints with that wheel on the path, and not the checkout."""
    begin = f"import sys; sys.path.insert(0, {str(wheel)!r}); "
    command = [sys.executable, "-I", "-S", "-c", begin + program]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.strip()


@pytest.mark.timeout(1800)
def test_the_wheel_needs_a_compiler_and_nothing_else(source: Path, tmp_path: Path) -> None:
    unpacked = wheel(source, tmp_path, CXX=compiler())
    assert {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")} == {
        "conflux_native",
        "learner",
        "sglang_ext",
    }
    packages = {"conflux_native": ROOT / "native" / "conflux_native", "learner": ROOT / "learner"}
    for name, folder in {**packages, "sglang_ext": ROOT / "sglang_ext"}.items():
        ours = {path.relative_to(folder) for path in folder.rglob("*") if path.suffix in (".py", ".pyi", ".json")}
        assert ours <= {path.relative_to(unpacked / name) for path in (unpacked / name).rglob("*")}
    native = {path.name for path in (unpacked / "conflux_native").iterdir()}
    assert {"py.typed", "_core.pyi"} <= native
    assert not {name for name in native if name.endswith((".cpp", ".h", ".txt")) or name == "_not_built.py"}
    (extension,) = (unpacked / "conflux_native").glob("_core*.so")
    assert b"libcuda.so.1" in extension.read_bytes()  # by name: nothing is linked
    program = "import json, conflux_native as c; print(json.dumps([c.AVAILABLE, c.WHY_NOT, c.Mask([1]).tpcs]))"
    assert json.loads(seen_from(unpacked, program)) == [True, "", [1]]
    needed = subprocess.run(["readelf", "-d", str(extension)], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"NEEDED.*\[(.*)\]", needed)
    assert not [name for name in re.findall(r"NEEDED.*\[(.*)\]", needed) if "cuda" in name]


def test_without_a_compiler_all_but_the_extension_is_installed(source: Path, tmp_path: Path) -> None:
    unpacked = wheel(source, tmp_path, CXX="/nowhere/c++")
    program = "import json, conflux_native as c; print(json.dumps([c.AVAILABLE, c.WHY_NOT]))"
    available, why_not = json.loads(seen_from(unpacked, program))
    assert not available
    assert why_not == (
        "conflux_native has no extension: no working C++ compiler was found (install g++, then install conflux again)"
    )
    program = "from conflux_native import CudaError, DriverMissing, AVAILABLE; print(AVAILABLE)"
    assert seen_from(unpacked, program) == "False"
    program = "\ntry:\n    from conflux_native import Driver\nexcept ImportError as error: print(error)"
    assert "install g++" in seen_from(unpacked, program)


def test_without_pythons_headers_too(source: Path, tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    unpacked = wheel(source, tmp_path, SKBUILD_CMAKE_ARGS=f"-DPython_INCLUDE_DIR={tmp_path / 'include'}")
    program = "import conflux_native as c; print(c.WHY_NOT)"
    assert "Python's headers were not found (install python3-dev" in seen_from(unpacked, program)


def test_every_name_is_there_or_says_why_not() -> None:
    assert conflux_native.AVAILABLE
    for name in conflux_native.__all__:
        assert getattr(conflux_native, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = conflux_native.Nothing
    tree = ast.parse(Path(conflux_native.__file__).read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)


def test_make_installs_again_when_a_native_source_has_changed(tmp_path: Path) -> None:
    """By make's own account (--dry-run) of a copy with every stamp in place."""
    (tmp_path / "native" / "src").mkdir(parents=True)
    (tmp_path / ".venv").mkdir()
    (tmp_path / "sglang_ext" / "cpu").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "native/CMakeLists.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in ("native/src/module.cpp", "sglang_ext/cpu/requirements.txt", "sglang_ext/cpu/install.py"):
        (tmp_path / name).touch()
    for stamp in ("created", "sglang", "model", "conflux", "demo", "test"):
        (tmp_path / ".venv" / f".{stamp}").touch()

    def plan(target: str) -> str:
        command = ["make", "--dry-run", target]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "--editable" not in plan("install")
    installed = (tmp_path / ".venv" / ".test").stat().st_mtime
    for name in ("native/src/module.cpp", "native/CMakeLists.txt"):
        os.utime(tmp_path / name, (installed + 100, installed + 100))
        assert ["--editable" in plan(target) for target in ("install", "demo", "test")] == [True] * 3
        os.utime(tmp_path / name, (installed - 100, installed - 100))
    assert "--editable" not in plan("install")
