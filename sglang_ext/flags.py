"""What each stock SGLang flag that touches scheduling means under conflux: honoured, overridden or refused.

Pure: rules look at resolved or unresolved argument values through ``getattr`` and never import sglang.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable, Iterator
from typing import Any

from sglang_ext.config import Config, ConfigError


class Verdict(enum.Enum):
    HONOURED = "honoured"
    OVERRIDDEN = "overridden"
    REFUSED = "refused"


def _given(value: Any) -> bool:
    return value not in (None, False, 0, "", "null", "none", "off", [], {})


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One stock flag. ``applies`` tells whether a value is one that the verdict is about; ``why`` ends the message.

    An overriding rule carries the value that is set instead.
    """

    field: str
    verdict: Verdict
    why: str
    applies: Callable[[Any], bool] = _given
    value: Any = None
    flag_name: str = ""

    @property
    def flag(self) -> str:
        return self.flag_name or "--" + self.field.replace("_", "-")


def _refuse(field: str, why: str, applies: Callable[[Any], bool] = _given, flag: str = "") -> Rule:
    return Rule(field, Verdict.REFUSED, why, applies, flag_name=flag)


def _honour(field: str, why: str, flag: str = "") -> Rule:
    return Rule(field, Verdict.HONOURED, why, flag_name=flag)


_KV = "conflux's KV accounting does not cover it: leave it out, or serve with --backend sglang"
_LATER = "not supported by conflux yet: leave it out, or serve with --backend sglang"

RULES: tuple[Rule, ...] = (
    # Queue and batch.
    _honour("schedule_policy", "fcfs (the default) lets conflux order the queue by deadline; any other is kept"),
    _honour("chunked_prefill_size", "upper bound of one iteration's prefill"),
    Rule("chunked_prefill_size", Verdict.OVERRIDDEN, "conflux cuts prefills to keep TBT; --max-prefill-tokens bounds "
         "them instead", lambda v: isinstance(v, int) and v <= 0, None),
    _honour("max_prefill_tokens", "upper bound of one iteration's prefill"),
    _honour("prefill_max_requests", "as in stock"),
    _honour("max_running_requests", "as in stock"),
    _honour("max_total_tokens", "as in stock"),
    _honour("mem_fraction_static", "as in stock"),
    _honour("schedule_conservativeness", "as in stock"),
    _honour("page_size", "chunks and look-ahead slots follow it"),
    Rule("enable_mixed_chunk", Verdict.OVERRIDDEN, "conflux mixes prefill and decode by itself, when it pays",
         value=False),
    Rule("enable_dynamic_chunking", Verdict.OVERRIDDEN, "conflux chooses the chunk by the TBT target", value=False),
    _refuse("enable_prefill_delayer", "conflux decides when prefill runs: leave it out"),
    _refuse("min_free_slots_delay", "conflux decides when prefill runs: leave it out"),
    _refuse("enable_priority_scheduling", _LATER),
    _refuse("num_continuous_decode_steps", "conflux looks ahead by itself: use --conflux-max-look-ahead", _above_one),
    _honour("disable_overlap_schedule", "served, but slower: temporal iterations are then not overlapped"),
    _honour("disable_radix_cache", "as in stock"),
    _honour("radix_eviction_policy", "as in stock"),
    _honour("stream_interval", "as in stock"),
    # Kernels and graphs.
    _honour("cuda_graph_max_bs_decode", "as in stock"),
    _honour("cuda_graph_bs_decode", "as in stock"),
    _honour("disable_cuda_graph", "as in stock"),
    _honour("disable_decode_cuda_graph", "as in stock"),
    _honour("disable_prefill_cuda_graph", "as in stock"),
    _honour("attention_backend", "as in stock"),
    _honour("quantization", "weights' byte width enters the latency model"),
    _honour("kv_cache_dtype", "fp8 and 16-bit caches; the byte width enters the latency model"),
    _refuse("kv_cache_dtype", _KV, lambda v: isinstance(v, str) and ("fp4" in v or "mxfp" in v)),
    _refuse("enable_torch_compile", _LATER),
    _refuse("enable_deterministic_inference", "its results depend on batches that conflux changes: leave it out"),
    _refuse("enable_two_batch_overlap", _LATER),
    _refuse("enable_single_batch_overlap", _LATER),
    _refuse("enable_memory_saver", _LATER),
    # Parallelism.
    _honour("tp_size", "every rank takes rank 0's plan; windows need its custom all-reduce", flag="--tp-size"),
    _refuse("pp_size", _LATER, _above_one, "--pp-size"),
    _refuse("dp_size", "start one server per replica behind a router instead", _above_one, "--dp-size"),
    _refuse("ep_size", _LATER, _above_one, "--ep-size"),
    _refuse("dcp_size", _LATER, _above_one),
    _refuse("attn_cp_size", _LATER, _above_one),
    _refuse("moe_dp_size", _LATER, _above_one),
    _refuse("dwdp_size", _LATER, _above_one),
    _refuse("enable_dp_attention", _LATER),
    _refuse("enable_prefill_cp", _LATER),
    _refuse("nnodes", _LATER, _above_one),
    _refuse("use_ray", _LATER),
    # Other ways of serving.
    _refuse("speculative_algorithm", "it drafts tokens in the steps that conflux looks ahead: leave it out, or serve "
            "with --backend sglang"),
    _refuse("enable_lora", _LATER),
    _refuse("lora_paths", _LATER),
    _refuse("disaggregation_mode", "conflux runs prefill and decode on the same GPU: leave it out"),
    _refuse("enable_pdmux", "conflux partitions the SMs itself: leave it out"),
    _refuse("dllm_algorithm", _LATER),
    _refuse("is_embedding", "conflux serves generation: leave it out, or serve with --backend sglang"),
    _refuse("encoder_only", _LATER),
    _refuse("language_only", _LATER),
    _refuse("enable_mis", _LATER),
    _refuse("tokenizer_worker_num", "extra tokenizer workers load no plugins: use one", _above_one),
    _refuse("smg_grpc_mode", _LATER),
    _refuse("grpc_mode", _LATER),
    # Memory.
    _refuse("enable_hierarchical_cache", _KV),
    _refuse("enable_hisparse", _KV),
    _refuse("enable_lmcache", _KV),
    _refuse("enable_flexkv", _KV),
    _refuse("enable_unified_memory", _KV),
    _refuse("prefill_only_disable_kv_cache", _KV),
    _refuse("enable_streaming_session", _KV),
    _refuse("cpu_offload_gb", _LATER),
)  # fmt: skip

# With --conflux-xp above 1, besides.
XP_RULES: tuple[Rule, ...] = (
    Rule("disable_radix_cache", Verdict.OVERRIDDEN, "with --conflux-xp prompts are not cached yet", operator.not_,
         True),
    Rule("disable_overlap_schedule", Verdict.OVERRIDDEN, "with --conflux-xp tokens are taken before the next launch",
         operator.not_, True),
    Rule("page_size", Verdict.OVERRIDDEN, "with --conflux-xp KV slots are handed out one by one", _above_one, 1),
    _refuse("tp_size", "with --conflux-xp each rank is one GPU: leave it out", _above_one, "--tp-size"),
    _refuse("enable_hisparse", _KV),
)  # fmt: skip

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def check(args: Any, xp: int = 1) -> Iterator[tuple[Rule, Any]]:
    """Yield the overriding rules that ``args`` falls under, with the value found; ``xp`` is the number of XP ranks.

    ``args`` is anything with SGLang's argument names as attributes. Raises ConfigError at the first refused flag.
    """
    rules = RULES if xp == 1 else RULES + XP_RULES
    for rule in rules:
        value = getattr(args, rule.field, None)
        if rule.verdict is Verdict.REFUSED and rule.applies(value):
            raise ConfigError(f"{rule.flag} {_shown(value)}with --backend conflux: {rule.why}")
    for rule in rules:
        value = getattr(args, rule.field, None)
        if rule.verdict is Verdict.OVERRIDDEN and rule.applies(value):
            yield rule, value


def _shown(value: Any) -> str:
    return "" if value is True else f"{value} "


def check_architecture(architectures: list[str] | None) -> None:
    """Raise ConfigError unless the model is one whose shape and KV layout conflux knows."""
    if not architectures or architectures[0] not in ARCHITECTURES:
        raise ConfigError(
            f"--model-path: {(architectures or ['an unknown architecture'])[0]} is not supported by --backend conflux "
            f"(supported: {', '.join(ARCHITECTURES)}): serve it with --backend sglang"
        )


def check_heads(xp: int, heads: int, kv_heads: int) -> None:
    """Raise ConfigError unless both kinds of attention heads can be divided evenly over so many XP ranks."""
    if heads % xp or kv_heads % xp:
        raise ConfigError(
            f"--conflux-xp {xp}: the model has {heads} attention heads and {kv_heads} KV heads, and both have to be "
            "divisible by it: use a divisor of both"
        )


def check_gpus(xp: int, found: int, first: int = 0, step: int = 1) -> None:
    """Raise ConfigError unless every XP rank has a GPU: every ``step``-th of ``found`` ones, from ``first`` on."""
    if first + (xp - 1) * step >= found:
        raise ConfigError(
            f"--conflux-xp {xp}: it takes GPUs {first} to {first + (xp - 1) * step}, and {found} are visible: use fewer"
        )


def check_split(config: Config, *, on_cpu: bool) -> None:
    """Raise ConfigError if a fixed split is asked of a device that has no TPCs."""
    if on_cpu and config.fixed_split is not None:
        raise ConfigError("--conflux-fixed-split: a CPU has no TPCs to split: leave it out")
