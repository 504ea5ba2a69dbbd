"""Grammar-constrained requests (regex, JSON schema, EBNF) on a CPU.

SGLang's xgrammar backend pins its bitmask for a copy to a GPU and knows masking kernels for accelerators only; without
these hooks the first constrained request ends the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MODULE = "sglang.srt.constrained.xgrammar_backend"


def serve_grammars_on_cpu() -> None:
    """Install the hooks in this process, now. Needs nothing if xgrammar is absent."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    patch_xgrammar()
    HookRegistry.apply_hooks()


def patch_xgrammar() -> None:
    """Register the hooks. Logits on an accelerator still take SGLang's own path."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_MODULE}._allocate_token_bitmask", _allocate, HookType.AROUND)
    HookRegistry.register(f"{_MODULE}.XGrammarGrammar.apply_vocab_mask", _apply_of_grammar, HookType.AROUND)
    HookRegistry.register(f"{_MODULE}.XGrammarGrammarBackend.apply_vocab_mask", _apply_of_backend, HookType.AROUND)


def _allocate(original: Callable[..., Any], vocab_size: int, batch_size: int) -> Any:
    import torch
    from xgrammar import allocate_token_bitmask

    if torch.cuda.is_available():
        return original(vocab_size, batch_size)
    return allocate_token_bitmask(batch_size, vocab_size)


def _apply_of_grammar(original: Callable[..., Any], grammar: Any, logits: Any, vocab_mask: Any) -> None:
    if logits.device.type != "cpu":
        original(grammar, logits, vocab_mask)
        return
    _mask_on_cpu(logits, vocab_mask)


def _apply_of_backend(original: Callable[..., Any], logits: Any, vocab_mask: Any) -> None:
    if logits.device.type != "cpu":
        original(logits, vocab_mask)
        return
    _mask_on_cpu(logits, vocab_mask)


def _mask_on_cpu(logits: Any, vocab_mask: Any) -> None:
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)
