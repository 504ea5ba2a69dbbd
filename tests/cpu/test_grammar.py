"""Masking by a grammar on the CPU: SGLang's own backend, with the hooks applied."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from sglang_ext import cpu
from sglang_ext.cpu.grammar import serve_grammars_on_cpu
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def environment():
    """A CPU's, as a scheduler process has it."""
    with mock.patch.dict(os.environ, {"SGLANG_USE_CPU_ENGINE": "1"}):
        assert cpu.prepare()
        yield


@pytest.mark.usefixtures("environment")
def test_only_what_the_grammar_allows_is_left() -> None:
    pytest.importorskip("xgrammar")
    backends = pytest.importorskip("sglang.srt.constrained.xgrammar_backend")
    import torch
    from transformers import AutoTokenizer

    serve_grammars_on_cpu()  # for good, but nothing else in this process masks
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model())
    vocabulary = len(tokenizer)
    backend = backends.XGrammarGrammarBackend(tokenizer, vocabulary, model_eos_token_ids=[tokenizer.eos_token_id])
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
            assert texts
            assert all(text.isascii() and text.isdigit() for text in texts)
            assert "7" in texts
        assert mask.is_pinned() is False
