"""The stand-in for SGLang's GPU kernels, imported in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sglang_ext.cpu import STAND_IN


def run(code: str, *paths: Path, env: dict[str, str] | None = None) -> str:
    setup = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}\n"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", setup + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=root,
        env={"PATH": "/usr/bin:/bin", **(env or {})},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "statement",
    [
        "import sgl_kernel",
        "from sgl_kernel import rmsnorm, silu_and_mul as act",
        "from sgl_kernel.flash_attn import flash_attn_varlen_func",
        "import sgl_kernel.deeply.nested.module as m; m.kernel",
        "from sgl_kernel.scalar_type import scalar_types; scalar_types.uint4b8",
        "from sgl_kernel.scalar_type import ScalarType as T\ndef f(t: T | None, u: None | T): ...",
        "import importlib.util; assert importlib.util.find_spec('sgl_kernel').origin",
        "import sgl_kernel; assert sgl_kernel.__version__ and sgl_kernel.__spec__",
        "import sgl_kernel; assert not hasattr(sgl_kernel, '__wrapped__')",
    ],
)
def test_anything_can_be_imported(statement: str) -> None:
    run(statement, STAND_IN)


def test_a_call_says_what_is_missing_and_why() -> None:
    code = """
        from sgl_kernel.quantization import int8_scaled_mm
        try:
            int8_scaled_mm(1, out=2)
        except NotImplementedError as error:
            print(error)
    """
    said = run(code, STAND_IN)
    assert "sgl_kernel.quantization.int8_scaled_mm" in said
    assert "GPU build" in said


PREPARE = """
    import os, sys
    from sglang_ext import cpu
    print(cpu.prepare())
    print(os.environ.get("SGLANG_USE_CPU_ENGINE"), os.environ.get("TRITON_INTERPRET"))
    print(str(cpu.STAND_IN) in sys.path, os.environ.get("OMP_NUM_THREADS"))
    assert not {"torch", "numpy", "sglang"} & sys.modules.keys()
    before = list(sys.path)
    cpu.prepare()
    assert sys.path == before
"""


def test_prepare_on_a_cpu() -> None:
    threads = str(max(1, len(os.sched_getaffinity(0)) - 1))
    assert run(PREPARE, env={"CUDA_VISIBLE_DEVICES": ""}).split() == ["True", "1", "1", "True", threads]


def test_prepare_leaves_what_the_user_chose() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "5"}
    assert run(PREPARE, env=env).split() == ["True", "1", "0", "True", "5"]
    assert run(PREPARE, env={"SGLANG_USE_CPU_ENGINE": "0"}).split() == ["False", "0", "None", "False", "None"]


def test_an_installed_kernel_package_that_loads_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel.py").write_text("REAL = True\n")
    code = "from sglang_ext import cpu; cpu.prepare(); import sgl_kernel; print(sgl_kernel.REAL)"
    assert run(code, tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}) == "True"


def test_an_installed_kernel_package_that_does_not_load_is_replaced(tmp_path: Path) -> None:
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("import sgl_kernel.half\nraise ImportError('libcuda.so.1: cannot open')\n")
    (package / "half.py").write_text("")
    code = "from sglang_ext import cpu; cpu.prepare(); import sgl_kernel; print(sgl_kernel.STAND_IN)"
    assert run(code, tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}) == "True"
