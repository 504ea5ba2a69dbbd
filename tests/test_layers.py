"""Lower layers never import upper ones, and SGLang's internals are known in one place only."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

OURS = {"learner", "sglang_ext", "bench", "native", "tests"}
# Folders that are installed as packages of another name.
PACKAGES = {"native/conflux_native": "conflux_native"}

# Third parties that each layer may import. The standard library and the layer itself are always allowed.
POLICY_MAY = {"numpy", "learner"}
LEARNER_MAY = {"numpy", "sklearn", "zmq", "msgspec", "tqdm", "matplotlib", "threadpoolctl", "setproctitle"}

# SGLang has public entries (`sglang.Engine`, its version, the plugin registry) that any file of sglang_ext may use.
# Everything else below `sglang.srt` may change from version to version and is the business of compat.
PUBLIC_SGLANG = ("sglang.Engine", "sglang.version", "sglang.srt.plugins")


class WithoutTypes(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def imports(path: Path, types: bool = True) -> tuple[str, ...]:
    """Full dotted names of all that a file imports, anywhere in it; relative ones made absolute.

    Without ``types`` what it imports for type checkers alone, under ``if TYPE_CHECKING``, is left out.
    """
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for folder, name in PACKAGES.items():
        if package[:2] == tuple(folder.split("/")):
            package = (name, *package[2:])
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not types:
        tree = WithoutTypes().visit(tree)
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return tuple(names)


def strangers(folder: str, allowed: set[str], own: str) -> list[str]:
    found = []
    for path in sources(folder):
        for name in imports(path):
            top = name.split(".")[0]
            known = top in allowed or top in sys.stdlib_module_names or name == own or name.startswith(own + ".")
            # `from sglang_ext import policy` names the parent first.
            if not known and not own.startswith(name + "."):
                found.append(f"{path.relative_to(ROOT)}: {name}")
    return found


def test_the_layers_are_where_they_are_expected() -> None:
    assert {"shape.py", "latency.py"} <= {path.name for path in sources("learner")}
    assert {"types.py", "decide.py"} <= {path.name for path in sources("sglang_ext/policy")}


def test_learner_imports_nothing_above_it() -> None:
    assert strangers("learner", LEARNER_MAY, "learner") == []


def test_policy_imports_learner_and_numpy_alone() -> None:
    assert strangers("sglang_ext/policy", POLICY_MAY, "sglang_ext.policy") == []


def test_native_imports_the_standard_library_alone() -> None:
    assert "errors.py" in {path.name for path in sources("native/conflux_native")}
    assert strangers("native", set(), "conflux_native") == []


@pytest.mark.parametrize("folder", ["learner", "sglang_ext/policy"])
def test_native_is_for_sglang_ext_alone(folder: str) -> None:
    found = [(path.name, name) for path in sources(folder) for name in imports(path)]
    assert [pair for pair in found if pair[1].split(".")[0] == "conflux_native"] == []


@pytest.mark.parametrize("folder", ["learner", "sglang_ext", "native"])
def test_nothing_installed_imports_the_benchmarks_or_the_tests(folder: str) -> None:
    found = [(path.name, name) for path in sources(folder) for name in imports(path)]
    assert [pair for pair in found if pair[1].split(".")[0] in ("bench", "tests")] == []


def internals(folder: str) -> list[str]:
    """What the files of ``folder``, but for its compat package, import of SGLang beyond its public entries."""
    found = []
    for path in sources(folder):
        if path.relative_to(ROOT / folder).parts[0].startswith("compat"):
            continue
        for name in imports(path, types=False):
            public = any(f"{entry}.".startswith(f"{name}.") or name.startswith(f"{entry}.") for entry in PUBLIC_SGLANG)
            if name.split(".")[0] == "sglang" and not public:
                found.append(f"{path.relative_to(ROOT)}: {name}")
    return found


def test_only_compat_knows_sglangs_internals() -> None:
    assert internals("sglang_ext") == []


def test_the_reader_of_imports_sees_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    module = tmp_path / "sglang_ext" / "policy" / "bad.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "import torch.cuda\n"
        "if TYPE_CHECKING:\n    from sglang.srt.managers import scheduler\n"
        "else:\n    from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "def f():\n    from sglang.srt import managers\n"
        "from .. import config\n"
    )
    assert set(imports(module)) >= {"torch.cuda", "sglang.srt.managers.scheduler", "sglang_ext.config"}
    assert "sglang.srt.managers.scheduler" not in imports(module, types=False)
    names = {line.split(": ")[1] for line in strangers("sglang_ext/policy", POLICY_MAY, "sglang_ext.policy")}
    assert names >= {"torch.cuda", "sglang.srt.managers", "sglang_ext.config"}
    assert "sglang_ext" not in names
    assert [line.split(": ")[1] for line in internals("sglang_ext")] == ["sglang.srt.managers"]
