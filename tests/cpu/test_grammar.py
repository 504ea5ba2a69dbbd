"""Masking by a grammar on the CPU: SGLang's own backend, with the hooks applied."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xgrammar")
pytest.importorskip("sglang")

# In a process of its own: hooks change SGLang's modules for good.
SCRIPT = """
import sys
from sglang_ext import cpu
assert cpu.prepare()
import torch
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_ext.cpu.grammar import patch_xgrammar
patch_xgrammar()
HookRegistry.apply_hooks()
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
vocabulary = len(tokenizer)
backend = XGrammarGrammarBackend(tokenizer, vocabulary, model_eos_token_ids=[tokenizer.eos_token_id])
grammar = backend.dispatch_regex("[0-9]{3}x")
mask = grammar.allocate_vocab_mask(vocabulary, 2, "cpu")
for dtype in (torch.float32, torch.bfloat16):
    for apply in (grammar.apply_vocab_mask, backend.apply_vocab_mask):
        grammar.fill_vocab_mask(mask, 1)  # the first row of the batch has no grammar
        logits = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(0)).to(dtype)
        masked = logits.clone()
        apply(logits=masked, vocab_mask=grammar.move_vocab_mask(mask, "cpu"))
        assert torch.equal(masked[0], logits[0])
        allowed = masked[1] > float("-inf")
        assert torch.equal(masked[1][allowed], logits[1][allowed])
        texts = [tokenizer.decode([i]) for i in allowed.nonzero()[:, 0].tolist()]
        assert texts and all(text.isascii() and text.isdigit() for text in texts), texts
        assert "7" in texts
    assert mask.is_pinned() is False
print("masked")
"""


def test_only_what_the_grammar_allows_is_left() -> None:
    from tests.tiny import make_tiny_model

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(make_tiny_model())],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("masked")
