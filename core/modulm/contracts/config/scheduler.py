"""How many requests and tokens one step takes, and in which order."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["SchedulerConfig"]


@flag_group
class SchedulerConfig(FlagGroup):
    """How many requests and tokens one step takes, and in which order."""

    title = "SchedulerConfig"

    max_num_batched_tokens: int | None = flag(
        None, "Most tokens in one step; None: the platform's.", unit="tokens", least=1, common=True
    )
    max_num_scheduled_tokens: int | None = flag(
        None, "Most tokens the scheduler hands out per step.", unit="tokens", least=1
    )
    max_num_seqs: int | None = flag(
        None,
        "Most sequences running at once; None: the platform's.",
        unit="sequences",
        least=1,
        common=True,
    )
    max_num_queued_reqs: int | None = flag(
        None, "Most waiting requests; more are answered 429.", unit="requests", least=0
    )
    max_num_queued_tokens: int | None = flag(
        None, "Most prompt tokens waiting; more are answered 429.", unit="tokens", least=0
    )
    long_prefill_token_threshold: int = flag(
        0,
        "A longer prompt counts as long and is computed in chunks of this size; 0: none is.",
        unit="tokens",
        least=0,
    )
    max_num_partial_prefills: int = flag(
        1, "Prompts that are partly computed at once, if above 1.", unit="prompts", least=1
    )
    max_long_partial_prefills: int = flag(
        1, "Long ones among --max-num-partial-prefills.", unit="prompts", least=1
    )
    scheduling_policy: str = flag(
        "fcfs", "Order of waiting requests.", kind="schedulers", aliases=("--scheduler-policy",)
    )
    enable_chunked_prefill: bool | None = flag(
        None, "Split long prompts over steps; None: yes where the model allows it."
    )
    mm_encoder_chunk: int = flag(
        8192, "Patches, times layers, of encoders in a step beside other rows; 0: all.", least=0
    )
    disable_chunked_mm_input: bool = flag(False, "Compute the tokens of a media item in one step.")
    scheduler_cls: str | None = flag(None, "A whole scheduler of your own: pkg.mod:Class.")
    scheduler_reserve_full_isl: bool = flag(
        True, "Admit a prompt only when all of it fits into the cache."
    )
    watermark: float = flag(
        0.0, "Share of blocks kept free when a request is admitted.", unit="fraction", least=0.0,
        most=1.0,
    )  # fmt: skip
    async_scheduling: bool | None = flag(
        None, "Plan a step while the one before runs; by default on devices that queue work."
    )
    stream_interval: int = flag(
        1, "Tokens gathered before a streamed answer sends them.", unit="tokens", least=1
    )
