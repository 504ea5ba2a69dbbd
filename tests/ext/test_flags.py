"""The table of stock flags: one verdict for each value, and messages that help."""

from __future__ import annotations

import types

import pytest

from sglang_ext import flags
from sglang_ext.config import Config, ConfigError
from sglang_ext.flags import RULES, Verdict

REFUSED = {
    "speculative_algorithm": "EAGLE",
    "enable_lora": True,
    "lora_paths": ["a=b"],
    "disaggregation_mode": "prefill",
    "enable_pdmux": True,
    "tokenizer_worker_num": 2,
    "pp_size": 2,
    "dp_size": 2,
    "ep_size": 4,
    "enable_dp_attention": True,
    "enable_priority_scheduling": True,
    "enable_prefill_delayer": True,
    "num_continuous_decode_steps": 4,
    "enable_hierarchical_cache": True,
    "kv_cache_dtype": "fp4_e2m1",
    "enable_torch_compile": True,
    "enable_deterministic_inference": True,
    "enable_memory_saver": True,
    "is_embedding": True,
    "use_ray": True,
    "nnodes": 2,
}
# ServerArgs' own defaults of the fields that rules look at, where they are not None or False.
DEFAULTS = {
    "disaggregation_mode": "null",
    "tokenizer_worker_num": 1,
    "pp_size": 1,
    "tp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
    "dcp_size": 1,
    "nnodes": 1,
    "attn_cp_size": 1,
    "moe_dp_size": 1,
    "dwdp_size": 1,
    "num_continuous_decode_steps": 1,
    "kv_cache_dtype": "auto",
    "schedule_policy": "fcfs",
    "max_prefill_tokens": 16384,
    "stream_interval": 1,
    "cpu_offload_gb": 0,
    "chunked_prefill_size": 8192,
}


def overridden(**values):
    return [(rule.field, rule.value) for rule, _ in flags.check(types.SimpleNamespace(**DEFAULTS | values))]


def test_defaults_are_served_as_they_are():
    assert overridden() == []


@pytest.mark.parametrize(("field", "value"), REFUSED.items())
def test_refused_flags_are_named_in_one_line(field, value):
    with pytest.raises(ConfigError) as caught:
        overridden(**{field: value})
    message = str(caught.value)
    assert message.startswith("--" + field.replace("_", "-"))
    assert "conflux" in message
    assert "\n" not in message


def test_every_refusing_rule_can_refuse():
    for rule in RULES:
        if rule.verdict is Verdict.REFUSED:
            value = next(v for v in (REFUSED.get(rule.field), True, 2, "x", ["x"]) if v is not None and rule.applies(v))
            with pytest.raises(ConfigError, match=rule.flag):
                overridden(**{rule.field: value})


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [("enable_mixed_chunk", True, False), ("enable_dynamic_chunking", True, False), ("chunked_prefill_size", -1, None)],
)
def test_overridden_flags(field, given, kept):
    assert overridden(**{field: given}) == [(field, kept)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schedule_policy", "lpm"),
        ("chunked_prefill_size", 512),
        ("page_size", 16),
        ("quantization", "fp8"),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("disable_overlap_schedule", True),
        ("cuda_graph_max_bs_decode", 64),
        ("tp_size", 2),
    ],
)
def test_honoured_flags_pass(field, value):
    assert overridden(**{field: value}) == []
    assert any(rule.field == field and rule.verdict is Verdict.HONOURED for rule in RULES)


def test_every_rule_names_a_real_argument_of_the_supported_sglang():
    server_args = pytest.importorskip("sglang.srt.server_args")
    fields = server_args.ServerArgs.__dataclass_fields__
    assert [rule.field for rule in RULES if rule.field not in fields] == []


@pytest.mark.parametrize("architecture", flags.ARCHITECTURES)
def test_supported_architectures(architecture):
    flags.check_architecture([architecture])


@pytest.mark.parametrize("architectures", [None, [], ["MixtralForCausalLM"], ["DeepseekV3ForCausalLM"]])
def test_other_architectures_are_refused(architectures):
    with pytest.raises(ConfigError, match="--model-path"):
        flags.check_architecture(architectures)


def test_a_cpu_has_nothing_to_split():
    with pytest.raises(ConfigError, match="--conflux-fixed-split"):
        flags.check_split(Config(mode="spatial", fixed_split=8), on_cpu=True)
    flags.check_split(Config(mode="spatial", fixed_split=8), on_cpu=False)


def test_xp_sets_what_its_ranks_need_and_refuses_more_ranks_within():
    args = types.SimpleNamespace(**DEFAULTS, disable_radix_cache=False, disable_overlap_schedule=False, page_size=16)
    assert not list(flags.check(args))
    overridden = {rule.field: rule.value for rule, _ in flags.check(args, xp=2)}
    assert overridden == {"disable_radix_cache": True, "disable_overlap_schedule": True, "page_size": 1}
    already = types.SimpleNamespace(**DEFAULTS, disable_radix_cache=True, disable_overlap_schedule=True, page_size=1)
    assert not list(flags.check(already, xp=2))
    args.tp_size = 2
    assert not list(flags.check(args))
    with pytest.raises(ConfigError, match="--tp-size 2 with --backend conflux: with --conflux-xp"):
        list(flags.check(args, xp=2))


def test_every_rank_needs_a_gpu():
    flags.check_gpus(2, 2)
    flags.check_gpus(2, 4, first=1, step=2)
    for first, step, said in ((0, 1, "GPUs 0 to 1, and 1 are visible"), (0, 2, "GPUs 0 to 2")):
        with pytest.raises(ConfigError, match=f"--conflux-xp 2: it takes {said}"):
            flags.check_gpus(2, 1, first, step)


def test_heads_must_divide_by_the_number_of_ranks():
    flags.check_heads(2, 32, 8)
    flags.check_heads(1, 9, 3)
    for xp, heads, kv_heads in ((3, 32, 8), (16, 32, 8), (4, 30, 10)):
        with pytest.raises(ConfigError, match=f"--conflux-xp {xp}: the model has {heads} attention heads"):
            flags.check_heads(xp, heads, kv_heads)
