"""XP: one prompt's prefill over several ranks, each rank with decodes of its own (ConfluxServe)."""
