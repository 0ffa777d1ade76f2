"""The engine's histograms: what they measure, and their buckets.

Imports nothing heavy: flags are checked with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from modulm.errors import ConfigError

__all__ = ["FAMILIES", "HISTOGRAMS", "bucket_bounds"]

_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
_TOKENS = tuple(float(step * 10**power) for power in range(7) for step in (1, 2, 5))
_LIVES = (
    0.001, 0.01, 0.1, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0,
)  # fmt: skip
_FEW = (1.0, 2.0, 5.0, 10.0, 20.0)

#: Name -> what is measured, default buckets.
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Time from arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Time between two tokens of a sequence.", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean time per output token of a request.", _SECONDS),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", _SECONDS),
    "request_queue_time_seconds": ("Time from arrival to the first step.", _SECONDS),
    "request_prefill_time_seconds": ("Time from the first step to the first token.", _SECONDS),
    "request_decode_time_seconds": ("Time from the first token to the last.", _SECONDS),
    "request_inference_time_seconds": ("Time from the first step to the last token.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens per request.", _TOKENS),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens per request that were not cached.", _TOKENS,
    ),
    "request_generation_tokens": ("Generated tokens per request, in all choices.", _TOKENS),
    "request_max_num_generation_tokens": ("Tokens of a request's longest choice.", _TOKENS),
    "request_params_n": ("Number of choices requested.", _FEW),
    "request_params_max_tokens": ("Maximum number of tokens requested.", _TOKENS),
    "request_num_preemptions": ("Preemptions per request, of all its sequences.", (0.0, *_FEW)),
    "iteration_tokens_total": ("Tokens computed in a step.", _TOKENS),
    "kv_block_lifetime_seconds": (
        "Time that a block stayed in the prefix cache; with `--kv-cache-metrics`.", _LIVES,
    ),
    "kv_block_idle_before_evict_seconds": (
        "Time since a block's last use when it was evicted; with `--kv-cache-metrics`.", _LIVES,
    ),
    "kv_block_reuse_gap_seconds": (
        "Time between two uses of a cached block; with `--kv-cache-metrics`.", _LIVES,
    ),
}  # fmt: skip
#: Keys of --custom-histogram-buckets, as in vLLM -> the histograms that they set.
FAMILIES: dict[str, tuple[str, ...]] = {
    "request_latency": (
        "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_inference_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds",
    ),
    "time_to_first_token": ("time_to_first_token_seconds",),
    "inter_token_latency": ("inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    "iteration_tokens": ("iteration_tokens_total",),
    "kv_cache_residency": (
        "kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds",
        "kv_block_reuse_gap_seconds",
    ),
    "request_params_n": ("request_params_n",),
    "request_tokens": (
        "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
        "request_params_max_tokens", "request_prefill_kv_computed_tokens",
    ),
}  # fmt: skip


def bucket_bounds(custom: Mapping[str, object] | None) -> dict[str, Sequence[float]]:
    """Return the upper bounds of each histogram's buckets. custom: by key of `FAMILIES`.

    Raises ConfigError for an unknown key, and for bounds that are not positive, finite and
    increasing.
    """
    bounds = {name: default for name, (_, default) in HISTOGRAMS.items()}
    for key, values in (custom or {}).items():
        if key not in FAMILIES:
            raise ConfigError(
                "custom_histogram_buckets", f"unknown key {key!r}: use {', '.join(FAMILIES)}"
            )
        for name in FAMILIES[key]:
            bounds[name] = _checked(key, values)
    return bounds


def _checked(key: str, values: object) -> tuple[float, ...]:
    numbers = values if isinstance(values, list | tuple) else ()
    if (
        not numbers
        or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers)
        or any(not (0 < n < math.inf) for n in numbers)
        or any(first >= second for first, second in pairwise(numbers))
    ):
        raise ConfigError(
            "custom_histogram_buckets",
            f"{key}: a list of positive, increasing numbers is needed, not {values!r:.80}",
        )
    return tuple(map(float, numbers))
