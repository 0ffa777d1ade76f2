"""Engine core: builds and owns scheduler, executor and engine loop.

It runs in the caller's thread (`LLM`), in a background thread, or in a separate process. Front ends
exchange requests and events with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from modulm.config.resolve import Use
from modulm.contracts.checkpoint import Checkpoint
from modulm.contracts.engine_info import EngineInfo
from modulm.contracts.executor import Capacity, Executor
from modulm.contracts.policy import Policy, Scheduler
from modulm.contracts.requests import Request
from modulm.engine.core.loop import EngineLoop, Listener
from modulm.engine.parts import open_parts
from modulm.engine.sampling.end_ids import end_ids
from modulm.engine.sampling.logits_processors import class_at
from modulm.engine.scheduling.limits import Limits
from modulm.engine.scheduling.scheduler import BudgetScheduler
from modulm.errors import ConfigError, EngineAsleep, RequestError, UnsupportedError
from modulm.loading import resolve_checkpoint

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.plugins.manager import PluginManager

__all__ = ["Defaults", "EngineCore", "limits_of"]

log = logging.getLogger("modulm.engine")

#: (configuration, generation_config.json) -> default sampling parameters.
Defaults = Callable[["EngineConfig", Mapping[str, Any]], Mapping[str, Any]]


def limits_of(config: EngineConfig, use: Use) -> Limits:
    """Return the scheduler's limits. The queue of an offline engine is not limited."""
    scheduler, cache = config.scheduler, config.cache
    rows, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if rows is None or tokens is None:
        raise ConfigError("max_num_seqs", "is not resolved")
    chunks = max(1, int(0.04 * (config.model.max_model_len or 0)))
    several = scheduler.max_num_partial_prefills > 1
    return Limits(
        rows=rows,
        tokens=min(tokens, scheduler.max_num_scheduled_tokens or tokens),
        chunked=scheduler.enable_chunked_prefill is not False,
        long=scheduler.long_prefill_token_threshold or (chunks if several else 0),
        partial=scheduler.max_num_partial_prefills if several else None,
        long_partial=scheduler.max_long_partial_prefills if several else None,
        spare=scheduler.watermark,
        reserve=scheduler.scheduler_reserve_full_isl,
        prefixes=cache.enable_prefix_caching is not False,
        hash=cache.prefix_caching_hash_algo,
        queued_requests=scheduler.max_num_queued_reqs if use == "server" else None,
        queued_tokens=scheduler.max_num_queued_tokens if use == "server" else None,
        stages=config.parallel.pipeline_parallel_size,
    )


class EngineCore:
    """An engine that is ready to run: scheduler, executor, loop and description.

    defaults: computes `EngineInfo.defaults`; its exceptions propagate.
    """

    def __init__(
        self,
        config: EngineConfig,
        plugins: PluginManager,
        listener: Listener,
        use: Use = "offline",
        defaults: Defaults | None = None,
    ) -> None:
        plugins.load_hooks()
        opened = resolve_checkpoint(config, plugins, use)
        checkpoint, resolved = opened.checkpoint, opened.resolved
        self.config = resolved.config
        sampling = {} if defaults is None else defaults(self.config, checkpoint.generation_config)
        plugins.config_final(self.config)
        name = self.config.parallel.distributed_executor_backend or "uni"
        self.executor: Executor = plugins.load("executors", name)()
        if use == "server" and self.executor.offline_only:
            raise ConfigError("distributed_executor_backend", f"{name} is for LLM, not servers")
        capacity = self.executor.start(self.config)
        policy: Policy = plugins.load("schedulers", self.config.scheduler.scheduling_policy)()
        made: Any = BudgetScheduler
        if (path := self.config.scheduler.scheduler_cls) is not None:
            made = class_at(path, Scheduler, "scheduler_cls")
        limits = _limits(self.config, use, capacity, self.executor.describe().tasks)
        self._parts = open_parts(self.config, plugins)
        scheduler: Scheduler = made(limits, capacity, policy, self._parts)
        _check_length(config.model.max_model_len, capacity, scheduler.max_len)
        depth = 2 if self.config.scheduler.async_scheduling and limits.stages == 1 else 1
        depth = max(depth, limits.stages)
        self.loop = EngineLoop(scheduler, self.executor, listener, plugins.notify, depth)
        notes = (*map(str, resolved.notices), *capacity.notes)
        info = _info(self.config, checkpoint, capacity, scheduler, self.executor, notes)
        self.info = evolve(info, texts=opened.recipe.texts, defaults=sampling)
        self._asleep = False
        self._notify = plugins.notify
        for note in notes:
            log.info("%s", note)
        self._notify("modulm_engine_started", config=self.config)

    def submit(self, *requests: Request) -> None:
        """Submit requests. Raises QueueFull, EngineAsleep while the engine sleeps."""
        if self._asleep:
            raise EngineAsleep("the engine is asleep; wake it up first")
        self.loop.submit(*requests)

    # Call these between steps, through `EngineLoop.call`.

    def reset_prefix_cache(self, root: bytes | None = None) -> None:
        """Empty the prefix cache; see `Scheduler.forget_prefixes`."""
        self.loop.scheduler.forget_prefixes(root)

    def sleep(self, level: int) -> None:
        """Free the caches (level 1), or the caches and the weights (level 2)."""
        if not self.config.model.enable_sleep_mode:
            raise UnsupportedError("this engine cannot sleep: start it with --enable-sleep-mode")
        if level not in (1, 2):
            raise RequestError("level must be 1 (caches) or 2 (weights as well)", "level")
        if self.loop.busy:
            raise RequestError("requests are running: wait for them or abort them before sleeping")
        if not self._asleep:
            self.loop.scheduler.forget_prefixes()
            self.executor.sleep(level)
            self._asleep = True

    def wake_up(self) -> None:
        """Restore what `sleep` freed."""
        if self._asleep:
            self.executor.wake_up()
            self._asleep = False

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps and cannot run requests."""
        return self._asleep

    def stop(self) -> None:
        """Stop the loop and release the model; may be called twice."""
        if self.loop.dead is None:
            self._notify("modulm_engine_stopping")
        self.loop.stop()
        self.executor.stop()
        for part in self._parts:
            part.close()


def _check_length(length: int | None, capacity: Capacity, most: int) -> None:
    """Raise ConfigError if the requested length does not fit."""
    if length is None or most >= length:
        return
    lacks = [
        f"{needed - group.blocks + 1} of {needed} blocks of {group.block_size} tokens"
        for group in capacity.groups
        if group.kind == "attention" and (group.window is None or len(capacity.groups) == 1)
        for needed in (-(-length // group.block_size),)
    ]
    raise ConfigError(
        "max_model_len",
        f"one sequence of {length} tokens does not fit into the KV cache: "
        f"{' and '.join(lacks) or 'memory'} are missing. Set --max-model-len {most} or auto, or "
        "raise --gpu-memory-utilization, --kv-cache-memory-bytes or --num-gpu-blocks-override",
    )


def _limits(config: EngineConfig, use: Use, capacity: Capacity, tasks: Sequence[str]) -> Limits:
    limits = limits_of(config, use)
    if not capacity.groups and "generate" not in tasks:
        # An encoder has no cache: its prompts cannot be split over steps.
        limits = evolve(limits, chunked=False)
    return limits


def _info(
    config: EngineConfig,
    checkpoint: Checkpoint,
    capacity: Capacity,
    scheduler: Scheduler,
    executor: Executor,
    notes: tuple[str, ...],
) -> EngineInfo:
    description = executor.describe()
    whole = [group for group in capacity.groups if group.kind == "attention" and not group.window]
    return EngineInfo(
        config=config,
        models=config.model.served_model_name or (config.model.model,),
        path=str(checkpoint.path),
        architecture=checkpoint.architecture,
        max_model_len=scheduler.max_len,
        vocabulary=capacity.vocabulary,
        hidden=description.width or int(checkpoint.config.get("hidden_size", 0)),
        dtype=description.dtype or config.model.dtype,
        eos=end_ids(config, checkpoint.generation_config, checkpoint.config),
        tasks=description.tasks,
        notes=notes,
        description=description,
        block_size=max((group.block_size for group in whole), default=0),
        cache_tokens=max((group.block_size * group.blocks for group in whole), default=0),
        parts=capacity.parts,
    )
