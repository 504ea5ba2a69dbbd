"""All that conflux knows of SGLang's internals, for the versions listed here and no others.

Importing this package imports neither torch nor sglang; its modules do.
"""

from __future__ import annotations

import importlib.metadata

from sglang_ext.config import ConfigError

SUPPORTED_SGLANG = ("0.5.17",)


def sglang_version() -> str | None:
    """Version of the installed SGLang, or None. Does not import it."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def require_supported() -> None:
    """Raise ConfigError unless the installed SGLang is one that conflux was proved on."""
    version = sglang_version()
    if version not in SUPPORTED_SGLANG:
        raise ConfigError(
            f"--backend conflux supports SGLang {', '.join(SUPPORTED_SGLANG)}, and {version or 'none'} is installed: "
            f"`pip install sglang=={SUPPORTED_SGLANG[-1]}`, or serve with --backend sglang"
        )
