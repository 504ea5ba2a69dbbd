"""Builds the controller of a scheduler process from what SGLang has set up."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import platform
import time
from typing import TYPE_CHECKING, Any

import torch

from learner.client import LearnerClient
from learner.latency import LatencyModel
from learner.record_file import RecordWriter
from learner.records import Header
from learner.shape import ModelShape
from sglang_ext.compat.ranks import common
from sglang_ext.config import RANDOM, Config
from sglang_ext.controller import Controller
from sglang_ext.device import device_profile
from sglang_ext.metrics import Metrics
from sglang_ext.policy.types import Settings
from sglang_ext.sm import TWO_STREAMS
from sglang_ext.sm.select import Chosen, choose
from sglang_ext.timing import make_clock

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


def choose_sm_control(server_args: Any, gpu_id: int) -> Chosen:
    """Before the model is loaded: the GPU is idle then, and has memory for the self-test's process."""
    config = _config(server_args)
    return choose(
        config.sm_control,
        gpu_id if server_args.device == "cuda" else None,
        config.state_dir,
        logger,
        only=config.fixed_split,
        gemm="require",
    )


def make_controller(scheduler: Scheduler) -> Controller:
    """Rank 0 learns, records and counts; the others take its decisions and time nothing for anybody."""
    config, address = _config(scheduler.server_args), scheduler.server_args._conflux.get("learner_address")
    leader = scheduler.ps.tp_rank == 0
    shape = _shape(scheduler)
    dtype = _name(scheduler.model_config.dtype)
    profile = device_profile(scheduler.device, dtype, config.state_dir)
    header = Header(
        created_unix_s=time.time(),
        model=shape,
        device=profile,
        dtype=dtype,
        kv_dtype=_name(scheduler.tp_worker.model_runner.kv_cache_dtype),
        tp=scheduler.ps.tp_size,
        mode=config.mode,
        tbt_slo_s=config.tbt_slo_s,
        ttft_slo_s=config.ttft_slo_s,
        versions=_versions(),
    )
    levels = common(scheduler, scheduler.sm_control.control.levels)
    settings = Settings(
        mode="auto" if config.mode == RANDOM else config.mode,
        concurrent=TWO_STREAMS and bool(levels),
        levels=levels,
        # What was asked for may not be possible; then the one level is the nearest that is.
        fixed_split=levels[0] if levels and config.fixed_split else config.fixed_split,
        max_look_ahead=config.max_look_ahead,
        explore=config.explore,
    )
    if config.mode in ("spatial", "reserved", "duet") and not settings.concurrent:
        logger.warning(
            "conflux: this %s runs one stream at a time: in %s mode prefill and decode run one after the other",
            scheduler.device.upper(),
            config.mode,
        )
    return Controller(
        config,
        header,
        LatencyModel(shape, profile),
        settings,
        make_clock(scheduler.device),
        client=LearnerClient(address, header) if address and leader else None,
        writer=RecordWriter(config.record, header) if config.record and leader else None,
        metrics=Metrics(scheduler.server_args.served_model_name) if _metrics(scheduler) and leader else None,
        sm=scheduler.sm_control,
    )


def _config(server_args: Any) -> Config:
    return Config(**{field.name: server_args._conflux[field.name] for field in dataclasses.fields(Config)})


def _shape(scheduler: Scheduler) -> ModelShape:
    model = scheduler.model_config
    return ModelShape.from_hf_config(
        model.hf_config.to_dict(),
        name=os.path.basename(os.path.normpath(model.model_path)),
        dtype=_name(model.dtype),
        kv_dtype=_name(scheduler.tp_worker.model_runner.kv_cache_dtype),
        tp=scheduler.ps.tp_size,
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
