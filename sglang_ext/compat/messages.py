"""Requests that would end SGLang 0.5.17's scheduler, and how they are answered instead."""

from __future__ import annotations

import copy
from array import array
from typing import Any

import numpy as np
from sglang.srt.sampling.sampling_params import SamplingParams


def unsound(request: Any, vocabulary: int) -> str | None:
    """What is wrong with a tokenized request, or None; SGLang checks none of this before the model does."""
    params = request.sampling_params
    tokens = getattr(params, "max_new_tokens", None)
    if tokens is not None and not isinstance(tokens, int):
        return f"max_new_tokens must be a whole number, got {tokens!r}"
    most = request.top_logprobs_num
    if isinstance(most, int) and most > vocabulary:
        return f"top_logprobs_num is {most}, and the model knows {vocabulary} tokens"
    ids = request.input_ids
    if ids is not None and len(ids):
        known = np.asarray(ids, dtype=np.int64)
        if known.min() < 0 or known.max() >= vocabulary:
            return f"input_ids must lie between 0 and {vocabulary - 1}, the model's largest token id"
    return None


def plain(request: Any) -> Any:
    """The same request asking for nothing special, to be refused."""
    one = copy.copy(request)
    one.sampling_params = SamplingParams(max_new_tokens=1)
    one.sampling_params.normalize(None)
    one.input_ids = array("q", [0])
    one.input_embeds = one.positional_embed_overrides = one.session_params = one.session_id = None
    one.return_logprob = one.return_hidden_states = one.return_routed_experts = False
    return one
