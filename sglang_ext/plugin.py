"""Entry point of the ``sglang.srt.plugins`` group: called by SGLang at the start of every process that loads plugins.

SGLang only logs what goes wrong in here, so as little as possible happens: the options are added, and what belongs to
a server with ``--backend conflux`` is installed once that was asked for. Whether the scheduler process really runs
conflux is verified by its parent.
"""

from __future__ import annotations

import sys


def register() -> None:
    from sglang_ext.compat import arguments

    arguments.register()
    # Only processes that run an engine or a scheduler have imported it by now; importing it here would cost every
    # `--help` six seconds.
    if "sglang.srt.entrypoints.engine" in sys.modules:
        arguments.register_engine_factory()
    if "sglang.srt.managers.scheduler" in sys.modules:
        from sglang_ext.compat import SUPPORTED_SGLANG, sglang_version

        if sglang_version() in SUPPORTED_SGLANG:
            from sglang.srt.plugins.hook_registry import HookRegistry, HookType

            from sglang_ext.compat.scheduler import ConfluxScheduler

            HookRegistry.register("sglang.srt.managers.scheduler.Scheduler", ConfluxScheduler, HookType.REPLACE)
