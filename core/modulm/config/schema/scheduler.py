"""How many requests and tokens one step takes, and in which order."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from modulm.config.schema.flags import equip, flag, later, no_effect, refused

__all__ = ["SchedulerConfig"]


@frozen(kw_only=True, field_transformer=equip)
class SchedulerConfig:
    """How many requests and tokens one step takes, and in which order."""

    TITLE: ClassVar[str] = "SchedulerConfig"
    TABLE: ClassVar[str | None] = None

    max_num_batched_tokens: int | None = flag(
        None, "Most tokens in one step; None: the platform's.", unit="tokens", least=1
    )
    max_num_scheduled_tokens: int | None = flag(
        None, "Most tokens the scheduler hands out per step.", unit="tokens", least=1
    )
    max_num_seqs: int | None = flag(
        None, "Most sequences running at once; None: the platform's.", unit="sequences", least=1
    )
    max_num_active_seqs: int | None = flag(
        None,
        "Most sequences admitted at once.",
        least=1,
        state=no_effect("--max-num-seqs bounds both"),
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
    long_prefill_token_threshold_adaptive: bool = flag(
        False, "Find that threshold while running.", state=later("an adaptive threshold")
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
    disable_chunked_mm_input: bool = flag(
        False,
        "Never split one image over steps.",
        state=later("multimodal models"),
    )
    scheduler_cls: str | None = flag(None, "A whole scheduler of your own: pkg.mod:Class.")
    scheduler_reserve_full_isl: bool = flag(
        True, "Admit a prompt only when all of it fits into the cache."
    )
    watermark: float = flag(
        0.0, "Share of blocks kept free when a request is admitted.", unit="fraction", least=0.0,
        most=1.0,
    )  # fmt: skip
    prefill_schedule_interval: int = flag(
        1, "Steps between two that start prompts.", least=1, state=later("spaced prompt steps")
    )
    disable_hybrid_kv_cache_manager: bool | None = flag(
        None,
        "Give every layer the same cache, windowed or not.",
        state=later("one cache for windowed and full layers"),
    )
    async_scheduling: bool | None = flag(None, "Plan a step while the one before runs.")
    stream_interval: int = flag(
        1, "Tokens gathered before a streamed answer sends them.", unit="tokens", least=1
    )
    scheduler_delay_factor: float = flag(
        0.0, "Wait before a prompt.", state=refused("prompts and answers share steps; leave it out")
    )
    preemption_mode: str | None = flag(
        None,
        "What happens to a sequence when memory runs out.",
        choices=("recompute", "swap"),
        state=no_effect("a preempted sequence is always recomputed"),
    )
    num_scheduler_steps: int = flag(
        1, "Steps per scheduling.", state=refused("every step is scheduled; leave it out")
    )
    multi_step_stream_outputs: bool = flag(
        True,
        "Stream after each of several steps.",
        deprecated="there are no multi-step runs",
        state=no_effect("every step streams"),
    )
    num_lookahead_slots: int = flag(
        0, "Slots for guessed tokens.", state=refused("use --speculative-config")
    )
    disable_async_output_proc: bool = flag(
        False,
        "Process outputs between steps.",
        deprecated="outputs are processed by the front end",
        state=no_effect("outputs are processed by the front end"),
    )
    performance_mode: str = flag(
        "balanced",
        "Defaults that favour short waits or many tokens.",
        choices=("balanced", "latency", "throughput"),
        state=later("performance modes"),
    )
