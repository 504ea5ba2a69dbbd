"""Names of what a forward is described by: roofline terms, other terms of its time, and features of its batch."""

from __future__ import annotations

# Columns whose sum is the roofline of the whole forward, in seconds. Attention is in the article's form: q·(q+c) pairs.
ROOFLINE_COLUMNS = (
    "elementwise_s",  # norms, activations, rope
    "attention_prefill_s",
    "attention_decode_s",
    "qkv_s",  # the linear layers, each over all layers
    "output_s",
    "gate_up_s",
    "down_s",
    "classifier_s",
    "all_reduce_s",
)
LINEAR_COLUMNS = ("qkv_s", "output_s", "gate_up_s", "down_s")
# What may carry a coefficient: the roofline's columns, other decompositions of the same work, and counts.
TERM_COLUMNS = (
    "linear_compute_s",  # F / Π of the linear layers, whether or not it is their maximum
    "attention_padded_s",  # F / Π of extend attention that pads each query to its whole sequence: (q+c)² pairs
    "compute_s",  # all F / Π(S)
    "memory_s",  # all B / 𝓑(S)
    "linear_read_s",  # weights of the linear layers / 𝓑
    "attention_causal_s",  # prefill attention with only the pairs that a causal mask leaves
    *ROOFLINE_COLUMNS,
    "compute_whole_s",  # all F / Π(whole device): work that does not speed up with S
    "memory_whole_s",  # all B / 𝓑(whole device)
    # Work that scales worse than the curves, · (whole / S − 1): all F / Π and all B / 𝓑 of the whole device, and the KV
    # cache that decodes read / 𝓑 of the whole device.
    "compute_partition_s",
    "memory_partition_s",
    "attention_decode_partition_s",
    "prefill_rows",
    "decode_rows",
    "logits_rows",
    "prefill_forward",  # 1 if there is any prefill row
    "forward",  # 1 if there is any token
)
# What describes the batch and carries no coefficient.
FEATURE_COLUMNS = (
    "bandwidth_demand",  # share of the whole device's bandwidth that the roofline would use, in [0, 1]
    "prefill_tokens",
    "padded_tokens",  # all new tokens, and what pads them to a CUDA graph
    "phase",  # PREFILL, DECODE or MIXED
    "log_prefill_tokens",  # the log columns are log2(1 + x)
    "log_prefill_context",  # Σ q + c of prefill rows
    "log_decode_rows",
    "log_decode_context",  # Σ c of decode rows
    "log_longest_context",  # largest c of a decode row
)
COLUMNS = (*TERM_COLUMNS, *FEATURE_COLUMNS)
COLUMN = {name: index for index, name in enumerate(COLUMNS)}
TERMS = len(TERM_COLUMNS)
LOG_COLUMNS = slice(COLUMN["log_prefill_tokens"], COLUMN["log_longest_context"] + 1)
LOG_FEATURES = LOG_COLUMNS.stop - LOG_COLUMNS.start

PREFILL, DECODE, MIXED = 0, 1, 2
PHASES = ("prefill", "decode", "mixed")
