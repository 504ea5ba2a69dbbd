"""Small random models with wide weights: cheap to serve, yet nearly every prompt has a greedy output of its own.

Weights as usually initialised (std 0.02) collapse into short cycles, which hides mistakes. Wide ones spread the logits.
Attention is sharpened and its output raised besides: otherwise it averages over the context, the next token hardly
depends on more than the last one, and a stale KV slot or a wrong position would go unseen.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

RECIPE = 3  # part of the cache key: raise it when the construction changes
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, EOS = SPECIAL_TOKENS[1], SPECIAL_TOKENS[2]
# With these two, 300-token prompts that share only their last token share 1 of 20 next tokens (without: 16 of 20), and
# fp32 rounding moves a logit by 1e-5 where the two largest lie 0.5 apart.
ATTENTION_SHARPNESS = 3.0
ATTENTION_OUTPUT_GAIN = 4.0
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def cache_dir() -> Path:
    """Where test models are kept: ``$CONFLUX_TEST_CACHE``, else ``~/.cache/conflux-tests``."""
    return Path(os.environ.get("CONFLUX_TEST_CACHE", Path.home() / ".cache" / "conflux-tests"))


def make_tiny_model(
    path: Path | None = None,
    *,
    family: Literal["qwen3", "llama"] = "qwen3",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 128,
    vocabulary: int = 1024,
    context: int = 4096,
    eos_token_ids: Sequence[int] | None = None,
    tied_embeddings: bool = False,
    seed: int = 0,
) -> Path:
    """Build a fp32 checkpoint with a working tokenizer and chat template; return its folder.

    The same arguments always give the same weights. Without ``path`` the folder lies in :func:`cache_dir`; a finished
    one is reused. ``eos_token_ids`` replaces the one end token (id 2): since outputs are nearly uniform over the
    vocabulary, 32 end tokens among 1,024 end a greedy output after about 32 tokens.
    """
    options = {
        "recipe": RECIPE,
        "family": family,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate": intermediate,
        "vocabulary": vocabulary,
        "context": context,
        "eos_token_ids": sorted(eos_token_ids) if eos_token_ids is not None else [SPECIAL_TOKENS.index(EOS)],
        "tied_embeddings": tied_embeddings,
        "seed": seed,
    }
    if path is None:
        key = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:10]
        path = cache_dir() / f"tiny-{family}-{layers}x{hidden}-{key}"
    if (path / "config.json").exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=path.name, dir=path.parent))
    try:
        _save(work, options)
        try:
            work.rename(path)
        except OSError:
            if not (path / "config.json").exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path


def _save(folder: Path, options: dict[str, object]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_type, model_type = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[str(options["family"])]
    eos = options["eos_token_ids"]
    config = config_type(
        num_hidden_layers=options["layers"],
        hidden_size=options["hidden"],
        num_attention_heads=options["heads"],
        num_key_value_heads=options["kv_heads"],
        head_dim=options["head_dim"],
        intermediate_size=options["intermediate"],
        vocab_size=options["vocabulary"],
        max_position_embeddings=options["context"],
        tie_word_embeddings=options["tied_embeddings"],
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=eos[0] if isinstance(eos, list) and len(eos) == 1 else eos,
        initializer_range=0.08,
        dtype="float32",
    )
    torch.manual_seed(int(str(options["seed"])))
    model = model_type(config).to(torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0.0, 1.0)
        if not options["tied_embeddings"]:
            model.get_output_embeddings().weight.normal_(0.0, 0.3)
        for layer in model.model.layers:
            attention = layer.self_attn
            if hasattr(attention, "q_norm"):
                attention.q_norm.weight.mul_(ATTENTION_SHARPNESS)
            else:  # unnormalised scores have a standard deviation of 0.08² · hidden
                attention.q_proj.weight.mul_(ATTENTION_SHARPNESS / (0.08**2 * config.hidden_size))
            attention.o_proj.weight.mul_(ATTENTION_OUTPUT_GAIN)
    model.save_pretrained(folder)
    _tokenizer(int(str(options["vocabulary"]))).save_pretrained(folder)


def _tokenizer(vocabulary: int):  # type: ignore[no-untyped-def]
    """Byte-level BPE that can encode any text: 256 bytes, three special tokens, and merges of two printable bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocabulary < len(SPECIAL_TOKENS) + 256:
        raise ValueError(f"a byte-level vocabulary needs at least {len(SPECIAL_TOKENS) + 256} tokens, not {vocabulary}")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet]
    merges = []
    for left, right in _pairs():
        if len(tokens) == vocabulary:
            break
        merges.append((left, right))
        tokens.append(left + right)
    if len(tokens) < vocabulary:
        raise ValueError(f"the tests' tokenizer has at most {len(tokens)} tokens, not {vocabulary}")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=SPECIAL_TOKENS[0],
        chat_template=CHAT_TEMPLATE,
    )


def _pairs() -> Iterator[tuple[str, str]]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    starts = [*("Ġ" + letters), *letters.upper(), *"0123456789"]  # Ġ: how byte-level BPE writes a space
    ends = [*letters, *"0123456789"]
    for left in starts:
        for right in ends:
            yield left, right
