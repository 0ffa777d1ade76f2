"""What a configuration would hold in memory, from a checkpoint's headers and config.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen

from modulm.config.binding import share_of
from modulm.contracts.attention import AttentionSpec
from modulm.contracts.model import CacheKind, Model
from modulm.contracts.platform import Memory, Platform
from modulm.engine.kv_cache.sizing import Sizing, blocks_needed, cache_budget, share_out
from modulm.engine.parts import open_parts
from modulm.errors import ConfigError
from modulm.loading import resolve_checkpoint
from modulm.loading.cache_groups import group_caches
from modulm.loading.model import build_model, plan_checkpoint, state_block, table_rows
from modulm.loading.weights import expected_tensors
from modulm_distributed.mesh import RankSpec, planned_mesh
from modulm_memory.held import HeldMemory, tensors_of
from modulm_memory.planning import assumed_memory, making_proposals, proposal_estimate
from modulm_memory.rehearsal import rehearse
from modulm_memory.steps import StepWidths, step_bytes, step_widths
from modulm_memory.weights import Weights, weigh
from modulm_weight_offload.planned import planned_offload

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.decision import Decision
    from modulm.loading import CacheGroup, ResolvedCheckpoint
    from modulm.plugins.manager import PluginManager

__all__ = ["CacheUse", "Estimate", "RankEstimate", "estimate", "estimate_opened"]

#: Depth at which an adapter bank's tensors are searched: its layers have tables of slots.
_BANK_DEPTH = 8


@frozen
class CacheUse:
    """One cache group. block: bytes of `block_tokens` tokens of all its layers, for states of the
    slot of one sequence. window: tokens that are kept, None for all.
    """

    kind: str
    layers: int
    dtype: str
    block: int
    block_tokens: int
    window: int | None

    @property
    def per_1k(self) -> float:
        """Bytes per 1,000 tokens of one sequence; 0 for states, which do not grow."""
        return 0.0 if self.kind == "state" else self.block / self.block_tokens * 1000


@frozen
class RankEstimate:
    """What one rank holds, in bytes.

    stored: weights in the files, of all ranks. parameters: how many numbers these are; tied ones
    count once. tables: angles of positions. buffers: constants of the model. step: activations of
    the largest step. widths: what they depend on. adapters: of all adapters at their largest rank.
    memory: of the rank's device, or its share of the machine. budget: what caches may use.
    """

    rank: int
    weights: Weights
    stored: int
    parameters: int
    tables: int
    buffers: int
    step: int
    widths: StepWidths
    adapters: int
    groups: tuple[CacheGroup, ...]
    memory: Memory
    budget: int
    sizing: Sizing | None
    problem: str = ""

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on requests, without the caches."""
        return self.weights.bytes + self.tables + self.buffers + self.adapters

    @property
    def loading(self) -> int:
        """Bytes while the weights are loaded, when the largest module is in memory twice."""
        return self.fixed + self.weights.largest

    @property
    def holds_weights(self) -> bool:
        """Whether the weights fit."""
        return self.loading <= self.memory.free

    @property
    def caches(self) -> tuple[CacheUse, ...]:
        """What each cache group holds."""
        return tuple(_use(group) for group in self.groups)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the allocated caches; 0 if they do not fit."""
        if self.sizing is None:
            return 0
        counts = zip(self.groups, self.sizing.blocks, strict=True)
        return sum(group.block_bytes * blocks for group, blocks in counts)

    def caches_of_one(self, config: EngineConfig, length: int) -> int:
        """Return the bytes of the smallest caches for a sequence of `length` tokens."""
        chunk = min(int(config.scheduler.max_num_batched_tokens or 1), length)
        return sum(
            group.block_bytes * (1 + _blocks_of_one(group, length, chunk)) for group in self.groups
        )


@frozen(eq=False)
class Estimate:
    """What a configuration holds on each rank, and what fits.

    config: resolved. length: requested, or the checkpoint's. decisions: choices of drivers for the
    last rank, and their reasons.
    """

    config: EngineConfig
    platform: str
    architecture: str
    dtype: str
    kv_dtype: str
    quantization: str
    length: int
    ranks: tuple[RankEstimate, ...]
    decisions: tuple[Decision, ...] = ()

    @property
    def problem(self) -> str:
        """Why it does not fit, or ""."""
        return next((rank.problem for rank in self.ranks if rank.problem), "")

    @property
    def context(self) -> int:
        """The longest sequence that fits, at most the requested length; 0 if nothing fits."""
        lengths = [rank.sizing.max_model_len if rank.sizing else 0 for rank in self.ranks]
        return 0 if self.problem else min(lengths)

    @property
    def fits(self) -> bool:
        """Whether weights, a step, and one sequence of the requested length fit."""
        return self.context >= self.length

    @property
    def tightest(self) -> RankEstimate:
        """The rank with the least room."""
        return min(self.ranks, key=lambda rank: (not rank.problem, rank.budget))

    def sequences(self, length: int) -> int:
        """Return how many sequences of `length` tokens fit at once, at most --max-num-seqs."""
        rows = int(self.config.scheduler.max_num_seqs or 1)
        if self.problem or length > self.context:
            return 0
        return min([rows, *(_sequences(self.config, rank, length) for rank in self.ranks)])


def estimate(
    config: EngineConfig,
    plugins: PluginManager,
    explicit: Iterable[str] | None = None,
    memory: Memory | None = None,
    *,
    steps: bool = True,
) -> Estimate:
    """Estimate what serving with `config` holds. Reads config.json and headers of weight files.

    explicit: flags that the user set. memory: of each device, instead of the platform's. steps:
    whether to run a step without memory to find its activations, which takes most of the time.
    Raises the errors that loading would raise before it reads weights.
    """
    inner = making_proposals.get()
    assumed = assumed_memory.set(memory)
    if not inner:
        proposal_estimate.set(None)
    try:
        opened = resolve_checkpoint(config, plugins, "server", explicit)
    finally:
        assumed_memory.reset(assumed)
    known: Estimate | None = None if inner else proposal_estimate.get()
    if known is not None and known.config == opened.resolved.config:
        return known
    found = estimate_opened(opened, plugins, memory, steps=steps)
    if inner:
        proposal_estimate.set(found)
    return found


def estimate_opened(
    opened: ResolvedCheckpoint,
    plugins: PluginManager,
    memory: Memory | None = None,
    *,
    steps: bool = True,
) -> Estimate:
    """Estimate what serving an opened checkpoint holds; see `estimate`."""
    resolved = opened.resolved.config
    parallel = resolved.parallel
    ranks: list[RankEstimate] = []
    built: Any = None
    masks = any(part.masks for part in open_parts(resolved, plugins))
    for spec in RankSpec.all_ranks(parallel, ""):
        built = build_model(
            resolved, opened.checkpoint, opened.platform, plugins, planned_mesh(spec), masks=masks
        )
        _, workers = share_of(parallel, spec.rank)
        device = memory or opened.platform.memory_per_worker(workers)
        ranks.append(_of_rank(opened, built, spec.rank, device, masks=masks, steps=steps))
    winner = next((d.winner for d in built.choices.decisions if d.subject == "quantization"), None)
    return Estimate(
        config=resolved,
        platform=opened.platform.name,
        architecture=opened.checkpoint.architecture,
        dtype=built.dtype,
        kv_dtype=built.shared.kv_dtype,
        quantization=winner or "none",
        length=built.shared.max_length,
        ranks=tuple(ranks),
        decisions=tuple(built.choices.decisions),
    )


def _of_rank(
    opened: ResolvedCheckpoint, built: Any, rank: int, memory: Memory, *, masks: bool, steps: bool
) -> RankEstimate:
    config, shared, model = opened.resolved.config, built.shared, built.model
    caches = model.caches
    decoder = _decoder(caches)
    widths = step_widths(shared, caches, decoder)
    index = built.loader.index() if _loads_itself(model) else {}
    if index:
        weights = _as_stored(index.values(), shared.dtype)
        stored = sum(tensor.bytes for tensor in index.values())
    else:
        plan = plan_checkpoint(built, opened.checkpoint)
        offload = planned_offload(model, shared.units, config, opened.platform)
        weights = weigh(shared.units, shared, decoder, plan, offload)
        stored = plan.total
    counted = (index or expected_tensors(shared.units)).values()
    block = state_block(config, shared.max_length)
    groups = group_caches(caches, built.choices.backends, block)
    rows = table_rows(shared.max_length, groups, memory.total)
    if not index and steps:
        widths, note = _rehearsed(opened.platform, built, groups, widths, masks=masks)
        weights = evolve(weights, notes=(*weights.notes, *note))
    found = RankEstimate(
        rank=rank,
        weights=weights,
        stored=stored,
        parameters=sum(prod(tensor.shape) for tensor in counted),
        tables=sum(rows * rope.size * 4 for rope in shared.ropes),
        buffers=_buffers(model),
        step=step_bytes(widths, config, shared.max_length),
        widths=widths,
        adapters=0 if shared.adapters is None else _adapters(shared.adapters),
        groups=groups,
        memory=memory,
        budget=0,
        sizing=None,
    )
    return _with_sizes(config, opened.platform, found, shared.max_length)


def _rehearsed(
    platform: Platform,
    built: Any,
    groups: Sequence[CacheGroup],
    widths: StepWidths,
    *,
    masks: bool,
) -> tuple[StepWidths, tuple[str, ...]]:
    """Add how a step grows, where the platform does not measure it; else why that is unknown.

    Nothing is rehearsed on devices with a queue, or whose steps are padded: those compile a program
    for each size.
    """
    measured = platform.reset_peak_memory() is not None
    queued = type(platform).queue is not Platform.queue
    padded = platform.step_sizes(1, 1) is not None
    if measured or queued or padded or built.shared.mesh.pipeline.size > 1:
        return widths, ()
    try:
        growth = rehearse(built, groups, platform, masks=masks)
        return evolve(widths, growth=growth), ()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return widths, (f"activations are estimated from the widths of layers: {reason}",)


def _with_sizes(
    config: EngineConfig,
    platform: Platform,
    found: RankEstimate,
    length: int,
) -> RankEstimate:
    """Add the sizes of the caches, by the engine's own rules, or why they do not fit."""
    if not found.holds_weights:
        return evolve(found, problem="the weights do not fit")
    left = evolve(found.memory, free=found.memory.free - found.fixed)
    measured = None if platform.reset_peak_memory() is None else found.step
    budget = cache_budget(config, left, lambda: measured)
    tokens = int(config.scheduler.max_num_batched_tokens or 1)
    try:
        sizing = share_out(
            found.groups,
            budget,
            max_model_len=length,
            chunk=min(tokens, length),
            rows=int(config.scheduler.max_num_seqs or 1),
            override=config.cache.num_gpu_blocks_override,
        )
    except ConfigError as error:
        return evolve(found, budget=budget, problem=error.message)
    return evolve(found, budget=budget, sizing=sizing)


def _sequences(config: EngineConfig, rank: RankEstimate, length: int) -> int:
    """Return how many sequences of `length` tokens a rank's caches hold."""
    chunk = min(int(config.scheduler.max_num_batched_tokens or 1), length)
    fitting = [int(config.scheduler.max_num_seqs or 1)]
    if rank.sizing is None:
        return 0
    for group, blocks in zip(rank.groups, rank.sizing.blocks, strict=True):
        fitting.append((blocks - 1) // max(_blocks_of_one(group, length, chunk), 1))
    return min(fitting)


def _blocks_of_one(group: CacheGroup, length: int, chunk: int) -> int:
    """Return the blocks that one sequence needs of a group."""
    return 1 if group.kind is CacheKind.STATE else blocks_needed(group, length, chunk)


def _loads_itself(model: Any) -> bool:
    """Whether a model reads its weights by itself, so that its parameters are unknown."""
    return type(model).load is not Model.load


def _as_stored(tensors: Iterable[Any], dtype: torch.dtype) -> Weights:
    """Return the bytes of stored tensors, floats in the model's dtype."""
    held, largest = 0, 0
    for tensor in tensors:
        stored: torch.dtype = getattr(torch, tensor.dtype)
        size = prod(tensor.shape) * (dtype if stored.is_floating_point else stored).itemsize
        held, largest = held + size, max(largest, size)
    return Weights({"layers": held}, largest, ("counted as stored: the model loads itself",))


def _decoder(caches: Sequence[Any]) -> str:
    """Return the path of the module that contains the layers with caches, without their list."""
    paths = [cache.layer.split(".") for cache in caches]
    if not paths:
        return ""
    first = paths[0]
    at = next((i for i, word in enumerate(first) if word.isdigit()), len(first))
    return ".".join(first[: max(at - 1, 0)])


def _buffers(model: torch.nn.Module) -> int:
    held = HeldMemory()
    for module in model.modules():
        held.add(tensors_of(module))
    return held.bytes


def _adapters(bank: Any) -> int:
    """Return the bytes of a bank: its tables, and all adapters at their largest rank."""
    held = HeldMemory()
    held.add(tensors_of(bank, _BANK_DEPTH))
    return held.bytes + int(bank.memory())


def _use(group: CacheGroup) -> CacheUse:
    spec = group.spec
    if isinstance(spec, AttentionSpec):
        kind = "latent" if spec.latent else "full"
        kind = "sliding window" if spec.window else kind
        kind = "cross" if group.kind is CacheKind.CROSS else kind
        dtype = spec.kv_dtype
    else:
        kind, dtype = "state", ", ".join(sorted({dtype for _, _, dtype in spec.tensors}))
    return CacheUse(
        kind=kind,
        layers=len(group.layers) + sum(len(layers) for _, layers in group.followers),
        dtype=dtype,
        block=group.block_bytes,
        block_tokens=group.block_size,
        window=group.window,
    )
