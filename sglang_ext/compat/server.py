"""What conflux does in the server's own process: start the learner, verify the schedulers, check requests."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from learner.supervisor import LearnerProcess
from sglang_ext.config import ConfigError
from sglang_ext.slo import check_custom_params

logger = logging.getLogger(__name__)

_learners: list[LearnerProcess] = []


def register() -> None:
    """Install the hooks; a second call changes nothing."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if _hooked(HookRegistry):
        return
    engine = "sglang.srt.entrypoints.engine.Engine"
    openai = "sglang.srt.entrypoints.openai"
    for target, hook, kind in (
        (f"{engine}._launch_scheduler_processes", _launch_scheduler_processes, HookType.AROUND),
        (f"{engine}.shutdown", _shutdown, HookType.BEFORE),
        ("sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", _check_request, HookType.BEFORE),
        (f"{openai}.serving_chat.OpenAIServingChat._validate_request", _check_openai, HookType.AFTER),
        (f"{openai}.serving_completions.OpenAIServingCompletion._validate_request", _check_openai, HookType.AFTER),
    ):
        HookRegistry.register(target, hook, kind)
    _check_generate_body()
    HookRegistry.apply_hooks()


def _hooked(registry: Any) -> bool:
    return any("_launch_scheduler_processes" in target for target in registry._hooks)


# ---- processes


def _launch_scheduler_processes(
    original: Callable[..., Any], cls: type, server_args: Any, *args: Any, **kw: Any
) -> Any:
    config = getattr(server_args, "_conflux", None)
    if config is None:
        return original(cls, server_args, *args, **kw)
    config["learner_address"] = _learner_address(config)
    if config["xp"] > 1:
        from sglang_ext.compat import xp_launch

        result, processes = xp_launch.launch(original, cls, server_args, *args, **kw)
    else:
        result, processes = original(cls, server_args, *args, **kw)
    wait_for_ready = result.wait_for_ready

    def wait_and_verify() -> None:
        wait_for_ready()
        if not all("conflux" in info for info in result.scheduler_infos):
            _refuse_stock()

    result.wait_for_ready = wait_and_verify
    return result, processes


def _learner_address(config: dict[str, Any]) -> str | None:
    """Where this server's learner listens; None if learning is off or its process cannot be started."""
    if config["learner"] != "on":
        return None if config["learner"] == "off" else config["learner"]
    try:
        learner = LearnerProcess(state_dir=os.path.join(config["state_dir"], "learner"))
    except OSError as error:
        logger.error("conflux: the learner could not be started (%s); serving with the roofline alone", error)
        return None
    _learners.append(learner)
    atexit.register(learner.stop)
    return learner.address


def _refuse_stock() -> None:
    message = (
        "--backend conflux: the scheduler process came up without conflux, so the server does not start. The reason is "
        "in its log above ('Failed to load plugin conflux'); SGLANG_PLUGINS, if set, must name conflux"
    )
    _stop_learners()
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False)
    if (sys.argv and "sglang" in os.path.basename(sys.argv[0])) or sys.argv[0].endswith("launch_server.py"):
        print(f"conflux: error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(2)
    raise RuntimeError(message)


def _stop_learners() -> None:
    while _learners:
        _learners.pop().stop()


def _shutdown(engine: Any, *args: Any, **kwargs: Any) -> None:
    _stop_learners()


# ---- requests


def _check_request(manager: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    """Before anything is queued; the HTTP layer answers a ValueError with 400."""
    _check_sampling(getattr(obj, "sampling_params", None))


def _check_sampling(params: Any) -> None:
    for one in params if isinstance(params, list) else [params]:
        if isinstance(one, dict):
            check_custom_params(one.get("custom_params"))


def _check_openai(error: str | None, serving: Any, request: Any) -> str | None:
    if error is None:
        try:
            check_custom_params(request.custom_params)
        except ConfigError as bad:
            return str(bad)
    return error


def _check_generate_body() -> None:
    """A streamed ``/generate`` answers 200 before its request is looked at, so its body is checked as it is parsed."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    after = getattr(GenerateReqInput, "__post_init__", None)

    def check(self: Any, *args: Any) -> None:
        if after is not None:
            after(self, *args)
        _check_sampling(self.sampling_params)

    GenerateReqInput.__post_init__ = check
