"""Stands in for SGLang's GPU kernels where there is no GPU, so that modules which import them can be imported.

Any attribute and any submodule can be imported; what is imported raises NotImplementedError when it is called.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

__version__ = "0.0.0+cpu.stand.in"
STAND_IN = True


class MissingKernel:
    """A kernel that this machine lacks. Its attributes are missing kernels too; a call raises NotImplementedError."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__, _, _ = name.rpartition(".")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(
            f"{self.__name__} needs a GPU build of sgl_kernel, and this machine runs SGLang on its CPU without one"
        )

    def __getattr__(self, name: str) -> MissingKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingKernel(f"{self.__name__}.{name}")

    # Annotations such as ``ScalarType | None`` are evaluated when the importing module is.
    def __or__(self, other: object) -> Any:
        return Any

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<missing kernel {self.__name__}>"


class _StandInModule(types.ModuleType):
    def __getattr__(self, name: str) -> MissingKernel:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return MissingKernel(f"{self.__name__}.{name}")


class _SubmoduleFinder:
    """Finds every submodule of the stand-in, at any depth."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> Any:
        if not name.startswith(__name__ + "."):
            return None
        return importlib.machinery.ModuleSpec(name, _SubmoduleFinder, origin=__file__, is_package=True)

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandInModule(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _StandInModule
sys.meta_path.append(_SubmoduleFinder)  # type: ignore[arg-type]
