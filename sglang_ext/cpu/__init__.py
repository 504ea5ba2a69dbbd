"""Serving on a machine without a GPU: what SGLang needs there before it is imported further, and sensible defaults.

Imports the standard library only, since :func:`prepare` runs first in every process.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from sglang_ext.cpu.machine import available_memory_bytes, has_accelerator, usable_cores

logger = logging.getLogger(__name__)

STAND_IN = Path(__file__).with_name("stand_in")
# Set where the user left them unset. The engine flag selects SGLang's CPU platform; the interpreter lets the few Triton
# kernels that SGLang has no CPU form of (page sizes above 1) run at all. Besides, one core is kept free for the HTTP
# side and the learner: when OpenMP's threads have to share cores, each waits at every barrier for one that is not
# running, which was seen to slow a forward pass eightfold.
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1"}
KV_POOL_BYTES = 2 << 30
KV_POOL_SHARE = 0.25  # of the memory that is available at start
FALLBACK_TOTAL_TOKENS = 32_768


def serves_on_cpu() -> bool:
    """Whether SGLang's CPU engine is to be used: ``SGLANG_USE_CPU_ENGINE`` says so, or there is no accelerator."""
    asked = os.environ.get("SGLANG_USE_CPU_ENGINE")
    return asked == "1" if asked is not None else not has_accelerator()


def prepare() -> bool:
    """Make this process ready to serve on a CPU if it is to; return whether it is. Cheap to call again."""
    if not serves_on_cpu():
        return False
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() - 1)))
    _provide_kernels()
    # SGLang caches its answer, and the server's own process asks before plugins load.
    common = sys.modules.get("sglang.srt.utils.common")
    if common is not None:
        common.is_cpu.cache_clear()
    return True


def _provide_kernels() -> None:
    """See to it that ``sgl_kernel`` can be imported: the installed one if it loads here, else the stand-in.

    Spawned processes inherit ``sys.path``, so that those which load no plugins have it too.
    """
    if str(STAND_IN) in sys.path:
        return
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.path.append(str(STAND_IN))
        return
    try:
        importlib.import_module("sgl_kernel")
    except (ImportError, OSError) as error:  # a GPU build without its driver library
        for name in [name for name in sys.modules if name.partition(".")[0] == "sgl_kernel"]:
            del sys.modules[name]
        sys.path.insert(0, str(STAND_IN))
        logger.info("the installed sgl_kernel does not load here (%s); its stand-in is used", error)


def bind_ranks(tp_size: int) -> None:
    """Share the cores out among tensor-parallel ranks, as SGLang demands where they outnumber the NUMA nodes.

    To be called before ranks are spawned; does nothing for one rank or where the user has bound them.
    """
    if tp_size > 1:
        cores = sorted(os.sched_getaffinity(0))
        shares = [cores[rank * len(cores) // tp_size :][: max(1, len(cores) // tp_size)] for rank in range(tp_size)]
        binding = "|".join(",".join(map(str, share)) for share in shares)
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding)


def default_args(model_path: str | None = None) -> dict[str, Any]:
    """SGLang's arguments on a CPU where the user chose none: field of ``ServerArgs`` → value.

    The stock defaults are an attention backend that needs AMX kernels, an idle loop that keeps one core busy, and a KV
    pool of most of the machine's memory.
    """
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sleep_on_idle": True,
        "max_total_tokens": max_total_tokens(model_path),
    }


def max_total_tokens(model_path: str | None, available_bytes: int | None = None) -> int:
    """Tokens whose KV, in fp32, fits :data:`KV_POOL_BYTES` and :data:`KV_POOL_SHARE` of the memory available now."""
    per_token = kv_bytes_per_token(model_path)
    if per_token is None:
        return FALLBACK_TOTAL_TOKENS
    available = available_memory_bytes() if available_bytes is None else available_bytes
    budget = min(KV_POOL_BYTES, int(available * KV_POOL_SHARE))
    return max(1024, budget // per_token // 1024 * 1024)


def kv_bytes_per_token(model_path: str | None, bytes_per_value: int = 4) -> int | None:
    """KV bytes of one token, from the ``config.json`` of a model folder; None if it cannot be told."""
    try:
        config = json.loads((Path(model_path or "") / "config.json").read_text())
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return int(2 * config["num_hidden_layers"] * kv_heads * head_dim * bytes_per_value)
    except (OSError, ValueError, KeyError, TypeError):
        return None
