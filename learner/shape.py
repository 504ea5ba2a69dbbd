"""The shape of a model, as far as its latency depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MODEL_TYPES = ("llama", "qwen2", "qwen3")

# Bytes per element by the names that torch, safetensors and SGLang's options use.
_BYTE_WIDTHS = {
    "float64": 8.0,
    "float32": 4.0,
    "fp32": 4.0,
    "float": 4.0,
    "bfloat16": 2.0,
    "bf16": 2.0,
    "float16": 2.0,
    "fp16": 2.0,
    "half": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "int8": 1.0,
    "w8a8_int8": 1.0,
    "w8a8_fp8": 1.0,
    "int4": 0.5,
    "uint4": 0.5,
    "awq": 0.5,
    "gptq": 0.5,
    "fp4": 0.5,
    "fp4_e2m1": 0.5,
    "mxfp4": 0.5,
    "nvfp4": 0.5,
}
# Kernels for narrower weights compute in 16 bits between the linear layers.
_ACTIVATION_BYTES_OF_QUANTISED = 2.0
_MOE_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def byte_width(dtype: str) -> float:
    """Bytes per element of a dtype name (``bfloat16``, ``torch.float32``, ``fp8_e4m3``, ``int4`` …).

    Raises ValueError for a name it does not know.
    """
    name = dtype.lower().removeprefix("torch.")
    try:
        return _BYTE_WIDTHS[name]
    except KeyError:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(_BYTE_WIDTHS)}") from None


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A dense decoder-only transformer (Llama, Qwen2, Qwen3).

    All counts are those of the whole model; ``tp`` says over how many ranks it is split, ``xp`` over how many (each of
    ``tp``) a prompt's prefill is spread. Byte widths are separate because weights, activations and the KV cache may be
    stored differently. ``graph_tokens``: sizes of CUDA graphs for forwards with a prefill, ascending; such a forward is
    padded to the next size.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool = False
    weight_bytes: float = 2.0
    activation_bytes: float = 2.0
    kv_bytes: float = 2.0
    tp: int = 1
    xp: int = 1
    graph_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "tp", "xp"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")
        for field in ("weight_bytes", "activation_bytes", "kv_bytes"):
            if not 0.0 < getattr(self, field) <= 8.0:
                raise ValueError(f"{field} must lie in (0, 8], not {getattr(self, field)}")
        if any(early >= late for early, late in pairwise((0, *self.graph_tokens))):
            raise ValueError(f"graph_tokens must be positive and ascend, unlike {self.graph_tokens}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot be shared evenly by {self.kv_heads} KV heads")
        if self.heads % self.tp or self.intermediate % self.tp:
            raise ValueError(f"heads ({self.heads}) and intermediate ({self.intermediate}) must divide by tp={self.tp}")
        if self.kv_heads % self.tp and self.tp % self.kv_heads:
            raise ValueError(f"{self.kv_heads} KV heads can be neither split nor replicated over tp={self.tp}")
        if self.heads % (self.tp * self.xp) or (self.kv_heads % (self.tp * self.xp) and self.xp > 1):
            raise ValueError(f"heads ({self.heads}, {self.kv_heads}) must divide by tp={self.tp} times xp={self.xp}")

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any],
        *,
        name: str,
        dtype: str,
        kv_dtype: str = "auto",
        tp: int = 1,
        xp: int = 1,
        graph_tokens: tuple[int, ...] = (),
    ) -> ModelShape:
        """Read the shape from a Hugging Face ``config.json`` of a Llama, Qwen2 or Qwen3 model.

        ``dtype`` is what the model runs in; a ``quantization_config`` in the file, or a ``dtype`` below 16 bits,
        narrows the weights only. ``kv_dtype`` "auto" stores the KV cache as the activations are.
        Raises ValueError, naming the field, for a missing or malformed field, another architecture or a
        mixture of experts.
        """
        _refuse_unsupported(config)
        width = byte_width(dtype)
        activation_bytes = width if width >= 2.0 else _ACTIVATION_BYTES_OF_QUANTISED
        hidden = _count(config, "hidden_size")
        heads = _count(config, "num_attention_heads")
        if config.get("head_dim") is not None:
            head_dim = _count(config, "head_dim")
        elif hidden % heads:
            raise ValueError(f"head_dim is missing and hidden_size={hidden} does not divide by {heads} heads")
        else:
            head_dim = hidden // heads
        kv_heads = heads if config.get("num_key_value_heads") is None else _count(config, "num_key_value_heads")
        return cls(
            name=name,
            layers=_count(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=_count(config, "intermediate_size"),
            vocabulary=_count(config, "vocab_size"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            weight_bytes=min(width, _quantised_bytes(config.get("quantization_config"), default=width)),
            activation_bytes=activation_bytes,
            kv_bytes=activation_bytes if kv_dtype == "auto" else byte_width(kv_dtype),
            tp=tp,
            xp=xp,
            graph_tokens=graph_tokens,
        )

    @property
    def parameters(self) -> int:
        """Number of weights in the linear layers, embeddings and classifier (norms and biases left out)."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * self.block_parameters + embeddings

    @property
    def block_parameters(self) -> int:
        """Number of weights in the linear layers of one block: qkv, o, gate-up and down."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def linear_layers(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each linear layer of one rank: qkv, output, gate and up, down, classifier."""
        heads, kv_heads = self.heads // self.tp, max(self.kv_heads // self.tp, 1)
        intermediate = self.intermediate // self.tp
        return (
            (self.hidden, (heads + 2 * kv_heads) * self.head_dim),
            (heads * self.head_dim, self.hidden),
            (self.hidden, 2 * intermediate),
            (intermediate, self.hidden),
            (self.hidden, -(-self.vocabulary // self.tp)),
        )

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that one token keeps in the KV cache, over all layers and all ranks."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures")
    if architectures:
        if architectures[0] not in ARCHITECTURES:
            raise ValueError(f"architecture {architectures[0]!r} is not supported; one of {', '.join(ARCHITECTURES)}")
    elif config.get("model_type") not in MODEL_TYPES:
        raise ValueError(
            f"config has no architectures and its model_type {config.get('model_type')!r} is none of "
            + ", ".join(MODEL_TYPES)
        )
    for field in _MOE_FIELDS:
        if config.get(field):
            raise ValueError(f"mixture-of-experts models are not supported ({field}={config[field]!r})")


def _count(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if value is None:
        raise ValueError(f"config lacks {field}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config field {field} must be a positive integer, not {value!r}")
    return value


def _quantised_bytes(quantisation: Mapping[str, Any] | None, *, default: float) -> float:
    """Bytes per weight that a ``quantization_config`` states, by its bits or by its method's name."""
    if not quantisation:
        return default
    for field in ("bits", "w_bit", "weight_bits"):
        bits = quantisation.get(field)
        if isinstance(bits, int) and 1 <= bits <= 16:
            return bits / 8.0
    if quantisation.get("load_in_4bit"):
        return 0.5
    if quantisation.get("load_in_8bit"):
        return 1.0
    groups = quantisation.get("config_groups")
    if isinstance(groups, Mapping):
        for group in groups.values():
            bits = (group.get("weights") or {}).get("num_bits")
            if isinstance(bits, int) and 1 <= bits <= 16:
                return bits / 8.0
    method = str(quantisation.get("quant_method", "")).lower()
    if method in _BYTE_WIDTHS:
        return _BYTE_WIDTHS[method]
    raise ValueError(f"quantization_config of method {method!r} does not say how wide its weights are")
