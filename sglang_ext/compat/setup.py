"""Builds the controller of a scheduler process from what SGLang has set up."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from learner.client import LearnerClient
from learner.latency import LatencyModel
from learner.prior import cold_snapshot
from learner.record_file import RecordWriter
from learner.records import Header
from learner.shape import ModelShape
from sglang_ext.compat import groups
from sglang_ext.compat.graphs import decode_graphs_on, prefill_graph_tokens
from sglang_ext.compat.lanes import ATTENTION_BACKENDS, GpuLanes
from sglang_ext.compat.ranks import all_can, common
from sglang_ext.config import FORCED_WINDOWS, RANDOM, Config
from sglang_ext.controller import Controller
from sglang_ext.device import device_profile
from sglang_ext.lanes import Lanes, OneLane, RandomLane
from sglang_ext.metrics import Metrics
from sglang_ext.policy.types import Settings
from sglang_ext.sm.checks import SHAPES
from sglang_ext.sm.select import Chosen, choose
from sglang_ext.timing import make_clock

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_ext.sm.control import SmControl

logger = logging.getLogger(__name__)

# A mixed batch costs so much whatever its chunk that a smaller one is not worth it; and the last of a prompt's tokens
# alone is taken for a decode, which costs nothing like it: chunks of one would look cheap for ever.
_LEAST_CHUNK = 32


def choose_sm_control(server_args: Any, gpu_id: int) -> Chosen:
    """Before the model is loaded: the GPU is idle then, and has memory for the self-test's process."""
    config = _config(server_args)
    if server_args.device != "cuda":
        return choose(config.sm_control, None, config.state_dir, logger)
    model = server_args.get_model_config()
    shape = _model_shape(model, _name(model.dtype), server_args.tp_size)
    return choose(
        config.sm_control,
        gpu_id,
        config.state_dir,
        logger,
        only=config.fixed_split,
        gemm="require",
        shapes=(*SHAPES, *shape.linear_layers),
    )


@contextmanager
def lanes_for(chosen: Chosen, server_args: Any, gpu_id: int) -> Iterator[Callable[[Scheduler], Lanes]]:
    """Around SGLang's own set-up of a scheduler; gives what makes its lanes once that is done.

    Meanwhile stock's decode graphs are captured at high priority, so that a step beside a prefill is served first.
    """
    obstacle = _one_lane(chosen, server_args)
    if obstacle is not None:
        random = _config(server_args).mode == RANDOM
        yield lambda scheduler: _random_lane(scheduler) if random else _one_of_all(scheduler, obstacle)
        return
    # An eager prefill would else be copied into buffers that the decode graphs read.
    os.environ["SGLANG_EAGER_INPUT_NO_COPY"] = "1"
    torch.cuda.set_device(gpu_id)
    control = chosen.control
    decode = control.reserve(control.levels[0]).decode
    with decode_graphs_on(decode, torch.cuda.Stream(priority=decode.priority)):
        serial, budget_s = os.environ.get("CONFLUX_TESTING") == "serial", _config(server_args).graph_budget_s
        yield lambda scheduler: _gpu_lanes(scheduler, control, budget_s, serial)


def _gpu_lanes(scheduler: Scheduler, control: SmControl, budget_s: float, serial: bool) -> Lanes:
    own = groups.decode_adds_up_itself() if scheduler.ps.tp_size > 1 else True
    if not all_can(scheduler, own):
        return OneLane(
            "another rank's GPU cannot" if own else "SGLang's custom all-reduce does not work between these GPUs"
        )
    return GpuLanes(scheduler, control, budget_s=budget_s, serial=serial)


def _one_of_all(scheduler: Scheduler, obstacle: str) -> OneLane:
    """On a GPU the other ranks may have none and wait for this one's word."""
    if scheduler.device == "cuda":
        all_can(scheduler, False)
    return OneLane(obstacle)


def _random_lane(scheduler: Scheduler) -> RandomLane:
    if scheduler.ps.tp_size == 1:
        return RandomLane(seed=0)
    # One of several ranks may not go on alone after an error.
    return RandomLane(
        scheduler.ps.tp_rank,
        fails=False,
        around_prefill=groups.PrefillGroup(scheduler.tp_worker.model_runner.model).in_use,
    )


def _one_lane(chosen: Chosen, server_args: Any) -> str | None:
    """Why the halves of a window cannot run at once, or None."""
    backends = {
        server_args.attention_backend,
        server_args.prefill_attention_backend or server_args.attention_backend,
        server_args.decode_attention_backend or server_args.attention_backend,
    }
    if server_args.device != "cuda":
        return f"a {server_args.device.upper()} has no SMs to share"
    if not _config(server_args).two_halves:
        return "the mode runs no windows"
    if not chosen.control.levels:
        return "there is no SM control"
    if server_args.tp_size > 1 and (obstacle := groups.obstacle(server_args)) is not None:
        return obstacle
    if not backends <= set(ATTENTION_BACKENDS):
        return f"--attention-backend must be {' or '.join(ATTENTION_BACKENDS)} for that"
    if not _config(server_args).graph_budget_s:
        return "--conflux-graph-budget-s is 0"
    if server_args.disable_cuda_graph or server_args.disable_decode_cuda_graph:
        return "decode steps without CUDA graphs keep the host too busy"
    return None


def make_controller(scheduler: Scheduler) -> Controller:
    """Rank 0 learns, records and counts; the others take its decisions and time nothing for anybody."""
    config, address = _config(scheduler.server_args), scheduler.server_args._conflux.get("learner_address")
    leader = scheduler.ps.tp_rank == 0
    dtype, kv_dtype = _name(scheduler.model_config.dtype), _name(scheduler.tp_worker.model_runner.kv_cache_dtype)
    graph_tokens = prefill_graph_tokens(scheduler.tp_worker.model_runner)
    shape = _model_shape(scheduler.model_config, kv_dtype, scheduler.ps.tp_size, config.xp, graph_tokens)
    profile = device_profile(scheduler.device, dtype, config.state_dir)
    header = Header(
        created_unix_s=time.time(),
        model=shape,
        device=profile,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tp=scheduler.ps.tp_size,
        xp=config.xp,
        mode=config.mode,
        tbt_slo_s=config.tbt_slo_s,
        ttft_slo_s=config.ttft_slo_s,
        versions=_versions(),
    )
    lanes = scheduler.lanes
    levels = common(scheduler, lanes.levels if lanes.concurrent else scheduler.sm_control.control.levels)
    settings = Settings(
        mode="auto" if config.mode == RANDOM else config.mode,
        concurrent=lanes.concurrent and bool(levels),
        levels=levels,
        # What was asked for may not be possible; then the one level is the nearest that is.
        fixed_split=levels[0] if levels and config.fixed_split else config.fixed_split,
        max_look_ahead=config.look_ahead(lanes.concurrent),
        explore=config.explore,
        least_chunk=_LEAST_CHUNK,
        graph_tokens=graph_tokens,
    )
    if config.mode in FORCED_WINDOWS and not settings.concurrent:
        why = lanes.state().get("reason", "no decode graphs could be captured for partitions")
        logger.warning("conflux: in %s mode prefill and decode run one after the other: %s", config.mode, why)
    return Controller(
        config,
        header,
        LatencyModel(shape, profile, cold_snapshot(profile)),
        settings,
        make_clock(scheduler.device),
        client=LearnerClient(address, header) if address and leader else None,
        writer=RecordWriter(config.record, header) if config.record and leader else None,
        metrics=Metrics(scheduler.server_args.served_model_name) if _metrics(scheduler) and leader else None,
        sm=scheduler.sm_control,
        launches_ahead=scheduler.device == "cuda" and scheduler.enable_overlap,
    )


def _config(server_args: Any) -> Config:
    return Config(**{field.name: server_args._conflux[field.name] for field in dataclasses.fields(Config)})


def _model_shape(model: Any, kv_dtype: str, tp: int, xp: int = 1, graph_tokens: tuple[int, ...] = ()) -> ModelShape:
    return ModelShape.from_hf_config(
        model.hf_config.to_dict(),
        name=os.path.basename(os.path.normpath(model.model_path)),
        dtype=_name(model.dtype),
        kv_dtype=kv_dtype,
        tp=tp,
        xp=xp,
        graph_tokens=graph_tokens,
    )


def _metrics(scheduler: Scheduler) -> bool:
    return bool(scheduler.server_args.enable_metrics)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("sglang-conflux", "sglang", "scikit-learn", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
