"""What SGLang 0.5.17's messages mean where several XP ranks serve as one."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers import io_struct as messages

# For every rank; rank 0 follows them first and answers.
SHARED = (
    messages.FlushCacheReqInput,
    messages.SetInternalStateReq,
    messages.PauseGenerationReqInput,
    messages.ContinueGenerationReqInput,
    messages.UpdateWeightFromDiskReqInput,
    messages.FreezeGCReq,
    messages.ConfigureLoggingReq,
)

_REASON = "not supported with --conflux-xp yet: serve without it"
# Answered at once: they would reach one rank's weights or memory only.
_REFUSED = {
    messages.InitWeightsUpdateGroupReqInput: lambda: messages.InitWeightsUpdateGroupReqOutput(
        success=False, message=_REASON
    ),
    messages.UpdateWeightsFromDistributedReqInput: lambda: messages.UpdateWeightsFromDistributedReqOutput(
        success=False, message=_REASON
    ),
    messages.UpdateWeightsFromTensorReqInput: lambda: messages.UpdateWeightsFromTensorReqOutput(
        success=False, message=_REASON
    ),
    messages.UpdateWeightsFromIPCReqInput: lambda: messages.UpdateWeightsFromIPCReqOutput(
        success=False, message=_REASON
    ),
}


def refusal(message: Any) -> Any | None:
    """The answer to a message that cannot be followed, or None."""
    answer = _REFUSED.get(type(message))
    return None if answer is None else answer()


def unsupported(request: Any) -> str | None:
    """What of a request cannot be served, as the beginning of a sentence, or None."""
    if request.return_logprob and request.logprob_start_len not in (None, -1):
        return "log probabilities of the prompt are not supported"
    for name, what in (
        ("return_hidden_states", "hidden states are"),
        ("input_embeds", "input embeddings are"),
        ("positional_embed_overrides", "input embeddings are"),
        ("session_params", "sessions are"),
        ("session_id", "sessions are"),
        ("return_routed_experts", "routed experts are"),
    ):
        value = getattr(request, name, None)
        if value is not None and value is not False:
            return f"{what} not supported"
    return None
