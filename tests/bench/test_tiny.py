"""The tests' own tiny models: a weak oracle would let mistakes through unseen."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from tests.tiny import make_tiny_model

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def network(request: pytest.FixtureRequest) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(make_tiny_model(family=request.param)).eval()


def test_the_next_token_depends_on_the_whole_context(network: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 1024, (64, 300), generator=generator)
    others = torch.randint(3, 1024, (64, 300), generator=generator)
    others[:, -1] = prompts[:, -1]
    with torch.inference_mode():
        same = network(prompts).logits[:, -1].argmax(-1) == network(others).logits[:, -1].argmax(-1)
        skewed = network(prompts, position_ids=torch.arange(300)[None] * 3 // 2).logits[:, -1].argmax(-1)
        moved = network(prompts).logits[:, -1].argmax(-1) != skewed
    assert same.float().mean() <= 0.1  # with weights as drawn it is 0.8
    assert moved.float().mean() >= 0.3  # wrong positions show


def test_greedy_output_does_not_fall_into_a_cycle(network: Any) -> None:
    with torch.inference_mode():
        output = network.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=150, do_sample=False, pad_token_id=0)
    assert len(set(output[0, 3:].tolist())) > 75


def test_rounding_stays_far_below_the_gap_between_the_best_two(network: Any) -> None:
    prompts = torch.randint(3, 1024, (16, 200), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        logits = network(prompts).logits[:, -1]
        exact = network.double()(prompts).logits[:, -1]
        network.float()
    best = logits.topk(2).values
    assert (exact - logits).abs().max() < 1e-4
    assert (best[:, 0] - best[:, 1]).median() > 0.1


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_models_are_the_same_every_time_and_differ_by_seed(tmp_path: Path, family: Literal["qwen3", "llama"]) -> None:
    first, again, other = (
        make_tiny_model(tmp_path / name, family=family, seed=seed) / "model.safetensors"
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]  # no unfinished folder is left


def test_many_end_tokens_end_outputs_early(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", eos_token_ids=range(3, 67))
    network = transformers.AutoModelForCausalLM.from_pretrained(path)
    lengths = []
    for start in range(100, 108):
        output = network.generate(torch.tensor([[start, start + 1]]), max_new_tokens=200, do_sample=False)
        lengths.append(output.shape[1] - 2)
    assert min(lengths) < 30
    assert len(set(lengths)) > 3
    assert sum(lengths) / len(lengths) < 80


def test_the_tokenizer_encodes_any_text() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_tiny_model())
    assert len(tokenizer) == 1024
    for text in ("Hello wörld 123", "日本\n\tx", "", " a  b "):
        assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 259"):
        make_tiny_model(tmp_path / "m", vocabulary=128)
    assert list(tmp_path.iterdir()) == []
