from __future__ import annotations

from typing import Any

import msgspec
import pytest

from learner.shape import ModelShape, byte_width

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN2_0_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


def read(config: dict[str, Any], **options: Any) -> ModelShape:
    return ModelShape.from_hf_config(config, **{"name": "model", "dtype": "bfloat16", "kv_dtype": "auto", **options})


# Counts of the published checkpoints, less their norms and biases.
@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_3_1_8B, 8_030_261_248 - 65 * 4096),
        (QWEN2_0_5B, 494_032_768 - 49 * 896 - 24 * (896 + 2 * 128)),
        (QWEN3_0_6B, 596_049_920 - 57 * 1024 - 28 * 2 * 128),
    ],
)
def test_parameter_count_is_that_of_the_checkpoint(config: dict[str, Any], parameters: int) -> None:
    assert read(config).parameters == parameters


def test_reads_every_field() -> None:
    shape = read(QWEN3_0_6B, name="qwen3", tp=2)
    assert (shape.name, shape.layers, shape.hidden, shape.heads, shape.kv_heads) == ("qwen3", 28, 1024, 16, 8)
    assert (shape.intermediate, shape.vocabulary, shape.tied_embeddings, shape.tp) == (3072, 151936, True, 2)
    assert shape.head_dim == 128  # explicit, not hidden / heads
    assert read(LLAMA_3_1_8B).head_dim == 128
    assert read(QWEN2_0_5B).head_dim == 64
    assert shape.kv_bytes_per_token == 2 * 28 * 8 * 128 * 2


def test_no_kv_heads_means_one_per_head() -> None:
    config = {key: value for key, value in LLAMA_3_1_8B.items() if key != "num_key_value_heads"}
    assert read(config).kv_heads == 32
    assert read({**config, "num_key_value_heads": None}).kv_heads == 32


@pytest.mark.parametrize(
    ("options", "quantisation", "widths"),
    [
        ({}, None, (2.0, 2.0, 2.0)),
        ({"dtype": "float32"}, None, (4.0, 4.0, 4.0)),
        ({"dtype": "torch.float16", "kv_dtype": "fp8_e5m2"}, None, (2.0, 2.0, 1.0)),
        ({"dtype": "fp8"}, None, (1.0, 2.0, 2.0)),
        ({"dtype": "int8"}, None, (1.0, 2.0, 2.0)),
        ({"dtype": "int4", "kv_dtype": "fp8_e4m3"}, None, (0.5, 2.0, 1.0)),
        ({}, {"quant_method": "fp8"}, (1.0, 2.0, 2.0)),
        ({}, {"quant_method": "awq", "bits": 4}, (0.5, 2.0, 2.0)),
        ({}, {"quant_method": "gptq", "bits": 8}, (1.0, 2.0, 2.0)),
        ({}, {"quant_method": "bitsandbytes", "load_in_4bit": True}, (0.5, 2.0, 2.0)),
        (
            {},
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
            (1.0, 2.0, 2.0),
        ),
    ],
)
def test_byte_widths(
    options: dict[str, str], quantisation: dict[str, Any] | None, widths: tuple[float, float, float]
) -> None:
    shape = read({**LLAMA_3_1_8B, "quantization_config": quantisation}, **options)
    assert (shape.weight_bytes, shape.activation_bytes, shape.kv_bytes) == widths


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"hidden_size": None}, {}, "lacks hidden_size"),
        ({"num_hidden_layers": 0}, {}, "num_hidden_layers must be a positive integer"),
        ({"vocab_size": "many"}, {}, "vocab_size must be a positive integer"),
        ({"num_attention_heads": True}, {}, "num_attention_heads must be a positive integer"),
        ({"hidden_size": 4097}, {}, "head_dim is missing"),
        ({"num_key_value_heads": 5}, {}, "5 KV heads"),
        ({"architectures": ["MixtralForCausalLM"]}, {}, "'MixtralForCausalLM' is not supported"),
        ({"architectures": None, "model_type": "gpt2"}, {}, "'gpt2' is none of"),
        ({"num_experts": 128}, {}, "mixture-of-experts models are not supported .num_experts=128"),
        ({"quantization_config": {"quant_method": "riddle"}}, {}, "'riddle' does not say"),
        ({}, {"dtype": "bf17"}, "unknown dtype 'bf17'"),
        ({}, {"kv_dtype": "fp3"}, "unknown dtype 'fp3'"),
        ({}, {"tp": 3}, "must divide by tp=3"),
        ({}, {"graph_tokens": (64, 64)}, "graph_tokens must be positive and ascend"),
        ({}, {"graph_tokens": (0, 64)}, "graph_tokens must be positive and ascend"),
        ({"num_attention_heads": 48, "num_key_value_heads": 12, "head_dim": 64}, {"tp": 8}, "12 KV heads can be"),
    ],
)
def test_says_what_is_wrong(change: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read({**LLAMA_3_1_8B, **change}, **options)


def test_an_absurd_shape_is_refused_from_a_message_too() -> None:
    data = msgspec.json.encode({**msgspec.to_builtins(read(LLAMA_3_1_8B)), "layers": -1})
    with pytest.raises(msgspec.ValidationError, match="layers must be at least 1"):
        msgspec.json.decode(data, type=ModelShape)


def test_byte_width_knows_torch_names() -> None:
    assert byte_width("torch.bfloat16") == byte_width("bf16") == 2.0


def test_a_ranks_linear_layers() -> None:
    """Qwen3-0.6B's, as its checkpoint has them, whole and for one of two ranks."""
    shape = ModelShape.from_hf_config(QWEN3_0_6B, name="q", dtype="bfloat16")
    assert shape.linear_layers == ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936))
    half = ModelShape.from_hf_config(QWEN3_0_6B, name="q", dtype="bfloat16", tp=2)
    assert half.linear_layers == ((1024, 2048), (1024, 1024), (1024, 3072), (1536, 1024), (1024, 75968))
