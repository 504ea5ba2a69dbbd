"""What stock SGLang 0.5.17 lacks to start with ``--enable-pdmux``: its scheduler reads ``self.gpu_id``, which is
``self.ps.gpu_id`` there. A server whose ``PYTHONPATH`` begins with this folder has it, in all of its processes.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE, _CLASS = "sglang.srt.multiplex.multiplexing_mixin", "SchedulerMultiplexMixin"


class _Finder(MetaPathFinder):
    """Adds the attribute when the module is imported, and nothing to any other."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_add(module: ModuleType) -> None:
            load(module)
            cls = getattr(module, _CLASS)
            if not hasattr(cls, "gpu_id"):
                cls.gpu_id = property(lambda self: self.ps.gpu_id)

        spec.loader.exec_module = load_and_add  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
