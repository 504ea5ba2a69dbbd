"""Models of which only the shape matters: a folder with ``config.json``, served with random weights.

How long a forward takes does not depend on the weights' values. Requests carry token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.cpu import CPU_ARGS

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
    },
    "Qwen3-14B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 17408,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
    },
    # For a machine without a GPU.
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "torch_dtype": "float32",
    },
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000,
    },
}
_COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}

# SGLang's own list of sizes for prefill graphs takes minutes to capture; these cover the same range. Every system that
# is compared gets them.
PREFILL_GRAPH_TOKENS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)


def shape_folder(name: str, parent: Path) -> Path:
    """Folder ``parent/name`` with the config of a shape. Raises KeyError for a name that is none of SHAPES."""
    folder = parent / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_COMMON, **SHAPES[name]}, indent=1) + "\n")
    return folder


def cpu_args(model: Path) -> list[str]:
    """The same for the tiny shape on a CPU."""
    return [
        *("--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init", "--grammar-backend", "none"),
        *(*CPU_ARGS, "--max-total-tokens", "20000", "--random-seed", "0", "--incremental-streaming-output"),
    ]


def gpu_args(model: Path, *, decode_graph_batch: int = 64, memory: float = 0.8) -> list[str]:
    """Arguments that every system of a comparison on a GPU shares, besides host and port."""
    return [
        *("--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init", "--grammar-backend", "none"),
        *("--attention-backend", "fa3", "--cuda-graph-max-bs-decode", str(decode_graph_batch)),
        *("--cuda-graph-bs-prefill", *map(str, PREFILL_GRAPH_TOKENS)),
        *("--mem-fraction-static", str(memory), "--random-seed", "0"),
        # Else every event of a stream carries the whole answer so far, and the HTTP process is what is measured.
        "--incremental-streaming-output",
    ]
