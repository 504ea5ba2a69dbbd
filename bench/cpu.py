"""Servers without a GPU: their flags, and the environment in which stock SGLang runs on a CPU.

conflux sets a CPU up by itself; stock loads no plugin, so it gets the same set-up from here.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = ROOT / "sglang_ext" / "cpu" / "stand_in"
NO_PLUGIN = "none"  # SGLANG_PLUGINS names the plugins to load; no plugin has this name
# SGLang would serve an fp32 checkpoint in fp16, where near ties flip with the composition of batches.
CPU_ARGS = ("--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle", "--dtype", "float32")


def cpu_environment(stock: bool, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server on a CPU.

    One thread per process: tiny models gain nothing from more, and several servers may share the machine.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    paths = [str(ROOT), env.get("PYTHONPATH", "")]
    if stock:
        env |= {"SGLANG_PLUGINS": NO_PLUGIN, "SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1"}
        paths.append(str(STAND_IN))
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    env["SGLANG_DISABLED_MODEL_ARCHS"] = _other_models()
    return env | dict(extra or {})


@cache
def _other_models() -> str:
    """SGLang imports every model that it knows when it starts; leaving out what is not served here halves that time."""
    spec = importlib.util.find_spec("sglang")
    folders = spec.submodule_search_locations if spec is not None else []
    models = {path.stem for folder in folders or () for path in Path(folder, "srt", "models").glob("*.py")}
    return ",".join(sorted(models - {"__init__", "registry", "utils", "llama", "qwen2", "qwen3"}))
