"""Flags of prefix retention."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["PrefixRetentionConfig"]


@flag_group
class PrefixRetentionConfig(FlagGroup):
    """Prefixes that requests ask to hold: `cache_control`, `prompt_cache_key` and others."""

    title = "PrefixRetentionConfig"

    prefix_retention: float = flag(
        0.25,
        "Fraction of the KV cache, and of each store of --kv-transfer-config, that may be held for "
        "requests that ask for it (cache_control, "
        "prompt_cache_key, prompt_cache_retention); 0: none. Room for one sequence of "
        "max_model_len is never held.",
        least=0,
        most=1,
    )
    prefix_retention_per_key: float = flag(
        0.5,
        "Fraction of that memory that one key may hold: an API key with limits, or a "
        "prompt_cache_key. The key's least recently used prefixes are released beyond it.",
        least=0,
        most=1,
    )
