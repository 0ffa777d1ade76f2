"""How many requests and tokens one step takes, and in which order."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["SchedulerConfig"]


@flag_group
class SchedulerConfig(FlagGroup):
    """How many requests and tokens one step takes, and in which order."""

    title = "SchedulerConfig"

    max_num_batched_tokens: int | None = flag(
        None,
        "Maximum tokens per step. Default: the platform's.",
        unit="tokens",
        least=1,
        common=True,
    )
    max_num_scheduled_tokens: int | None = flag(
        None, "Maximum tokens that the scheduler assigns per step.", unit="tokens", least=1
    )
    max_num_seqs: int | None = flag(
        None,
        "Maximum running sequences. Default: the platform's.",
        unit="sequences",
        least=1,
        common=True,
    )
    max_num_queued_reqs: int | None = flag(
        None, "Maximum waiting requests; more are rejected with 429.", unit="requests", least=0
    )
    max_num_queued_tokens: int | None = flag(
        None, "Maximum waiting prompt tokens; more are rejected with 429.", unit="tokens", least=0
    )
    long_prefill_token_threshold: int = flag(
        0,
        "Longer prompts count as long and are computed in chunks of this size; 0: disabled.",
        unit="tokens",
        least=0,
    )
    max_num_partial_prefills: int = flag(
        1, "Maximum prompts in chunked prefill at once; 1: no limit.", unit="prompts", least=1
    )
    max_long_partial_prefills: int = flag(
        1, "Maximum long prompts among --max-num-partial-prefills.", unit="prompts", least=1
    )
    scheduling_policy: str = flag(
        "fcfs", "Order of waiting requests.", kind="schedulers", aliases=("--scheduler-policy",)
    )
    enable_chunked_prefill: bool | None = flag(
        None, "Split long prompts over steps. Default: if the model supports it."
    )
    mm_encoder_chunk: int = flag(
        8192, "Encoder budget per step, in patches times layers; 0: no limit.", least=0
    )
    disable_chunked_mm_input: bool = flag(False, "Compute the tokens of a media item in one step.")
    scheduler_cls: str | None = flag(None, "Scheduler class: pkg.mod:Class.")
    scheduler_reserve_full_isl: bool = flag(
        True, "Admit a prompt only if all of it fits into the KV cache."
    )
    watermark: float = flag(
        0.0, "Fraction of blocks to leave free on admission.", unit="fraction", least=0.0,
        most=1.0,
    )  # fmt: skip
    async_scheduling: bool | None = flag(
        None, "Plan a step while the previous one runs. Default: on devices that queue work."
    )
    stream_interval: int = flag(
        1, "Number of tokens in each chunk of a stream.", unit="tokens", least=1
    )
