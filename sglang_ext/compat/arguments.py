"""conflux's options on SGLang's command line and in its Python API.

Works on every SGLang that has plugins, so that ``--help`` shows the options there and an unsupported version is
refused by name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from sglang_ext import compat, cpu, flags
from sglang_ext.config import Config, ConfigError, add_arguments, raw_values
from sglang_ext.slo import check_custom_params

logger = logging.getLogger(__name__)

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_SERVER_ARGS}.add_cli_args", _add_cli_args, HookType.AFTER)
    HookRegistry.register(f"{_SERVER_ARGS}.from_cli_args", _from_cli_args, HookType.AROUND)


def register_engine_factory() -> None:
    """Let ``sglang.Engine(backend="conflux", conflux_mode=..., ...)`` build its arguments."""
    from sglang.srt.entrypoints.engine import Engine

    Engine.server_args_class = staticmethod(_engine_server_args(Engine.server_args_class))


def exit_with(error: ConfigError) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(f"conflux: error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


def _add_cli_args(result: Any, parser: argparse.ArgumentParser) -> Any:
    add_arguments(parser)
    return result


def _from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    try:
        if not _wants_conflux(getattr(args, "backend", "sglang")):
            return original(cls, args)
        return _resolve(args, lambda: original(cls, args))
    except ConfigError as error:
        exit_with(error)


def _engine_server_args(stock: Callable[..., Any]) -> Callable[..., Any]:
    def build(**kwargs: Any) -> Any:
        backend = kwargs.pop("backend", "sglang")
        options = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith("conflux_")}
        if not _wants_conflux(backend):
            return stock(**kwargs)
        namespace = types.SimpleNamespace(**kwargs, **options)
        fields = set(kwargs)

        def resolve() -> Any:
            chosen = {n: v for n, v in vars(namespace).items() if n in fields or not n.startswith("conflux_")}
            return stock(**chosen)

        return _resolve(namespace, resolve)

    return build


def _wants_conflux(backend: object) -> bool:
    if backend not in ("sglang", "conflux"):
        raise ConfigError(f"--backend must be sglang or conflux, got {backend!r}")
    return backend == "conflux"


def _resolve(args: Any, resolve: Callable[[], Any]) -> Any:
    """Check ``args``, set what conflux overrides, let SGLang resolve the rest, check again."""
    compat.require_supported()
    config = Config.parse(raw_values(vars(args)))
    for rule, value in flags.check(args, config.xp):
        logger.warning("conflux: %s %s is overridden: %s", rule.flag, "" if value is True else value, rule.why)
        setattr(args, rule.field, rule.value)
    _check_preferred(getattr(args, "preferred_sampling_params", None))
    on_cpu = cpu.prepare()
    if on_cpu:
        _default(args, cpu.default_args(getattr(args, "model_path", None)))
        cpu.bind_ranks(getattr(args, "tp_size", None) or 1)
    server_args = resolve()
    for rule, _ in flags.check(server_args, config.xp):
        server_args.override("conflux", **{rule.field: rule.value})
    model = server_args.get_model_config()
    flags.check_architecture(getattr(model.hf_config, "architectures", None))
    flags.check_heads(config.xp, model.num_attention_heads, model.get_total_num_kv_heads())
    if config.xp > 1 and server_args.device == "cuda":
        import torch

        flags.check_gpus(config.xp, torch.cuda.device_count(), server_args.base_gpu_id, server_args.gpu_id_step)
    flags.check_split(config, on_cpu=server_args.device == "cpu")
    server_args._conflux = config.to_dict()

    from sglang_ext.compat import server

    server.register()
    return server_args


def _check_preferred(given: Any) -> None:
    """SGLang merges these into requests after those were checked."""
    with contextlib.suppress(json.JSONDecodeError):  # SGLang's to complain about
        given = json.loads(given) if isinstance(given, str) else given
    if isinstance(given, dict):
        try:
            check_custom_params(given.get("custom_params"))
        except ConfigError as error:
            raise ConfigError(f"--preferred-sampling-params: {error}") from None


def _default(args: Any, values: dict[str, Any]) -> None:
    for field, value in values.items():
        if getattr(args, field, None) in (None, False):
            logger.info("conflux: --%s %s, since this machine has no GPU", field.replace("_", "-"), value)
            setattr(args, field, value)
