"""Model runner: executes plans. It owns the model, its caches and the state of rows.

Code below `run` does not read registries, hooks, the configuration or the environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import evolve

from modulm.contracts.attention import AttentionSpec
from modulm.contracts.executor import (
    Capacity,
    GroupCapacity,
    Plan,
    RowFailure,
    RowStart,
    StepResult,
)
from modulm.contracts.kernels import ForwardWithLogits, RecordedForward
from modulm.contracts.sampling import PoolingParams, SamplingParams
from modulm.contracts.step_part import DIRECT, PartRunner, RanStep, RunnerContext
from modulm.engine.kv_cache.sizing import Sizing, agreed, allocate, cache_budget, share_out
from modulm.engine.sampling.logits_processors import Processors, processor_classes
from modulm.engine.sampling.sampler import Sampler
from modulm.engine.worker.input_batch import BatchBuilder, GroupPlanner, alone
from modulm.engine.worker.launched_step import LaunchedStep
from modulm.engine.worker.profiling import null_plan, record, step_memory
from modulm.engine.worker.prompt_scorer import PromptScorer
from modulm.engine.worker.runner_hooks import RunnerHooks
from modulm.engine.worker.running_step import RunningStep
from modulm.engine.worker.verified import first_of, last_of, verified_of
from modulm.errors import ConfigError, EngineError, ModulmError, RequestError, UnsupportedError
from modulm.loading.cache_groups import CacheGroup, extended
from modulm.parallel import Mesh

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.grammar import Grammar
    from modulm.contracts.kernels import Forward
    from modulm.contracts.model import Batch, CacheSpec, Model
    from modulm.contracts.platform import Platform
    from modulm.loading import Loaded
    from modulm.plugins.manager import PluginManager

__all__ = ["LaunchedStep", "ModelRunner", "build_processors"]


class ModelRunner:
    """Runs plans on a loaded model.

    config: resolved. parts: the runners of step parts, by name. sizing: sizes of the caches; by
    default as much as fits. mesh: the ranks that compute each step together; all get the same plans
    in the same order, which determines the order of their exchanges.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: Loaded,
        platform: Platform,
        plugins: PluginManager,
        *,
        parts: Mapping[str, PartRunner] | None = None,
        sizing: Sizing | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        rows, tokens = _check(config, loaded.model)
        #: Sizes to pad steps to, and the sampler's row for padding.
        self._sizes, self._spare = platform.step_sizes(rows, tokens), rows
        if self._sizes is not None and config.model.batch_invariant:
            raise ConfigError("batch_invariant", f"{platform.name} pads steps to few sizes")
        self.model = loaded.model
        self.parts = dict(parts or {})
        self.hooks = RunnerHooks(self.parts)
        self._direct = _direct(self.model, self.hooks.layers)
        self._record = _recorder(loaded, config, apart=bool(self._sizes or self.hooks.focus))
        self.forget_recordings()
        #: Of the last pass: hidden states of single layers for step parts, and maybe its logits.
        self._layers: tuple[torch.Tensor, ...] = ()
        self._passed_logits: torch.Tensor | None = None
        self.platform, self._staging = platform, platform.staging()
        specs, groups = _with_parts(loaded, self.parts.values())
        kinds = 1 + len(self.hooks.vary)
        measured = loaded, specs, groups, platform, self._forward, rows, tokens, kinds
        measure = partial(step_memory, *measured)
        self._mesh = mesh = mesh or Mesh()
        if sizing is None:
            own = share_out(
                groups,
                cache_budget(config, platform.memory(), measure),
                max_model_len=loaded.max_model_len,
                chunk=min(tokens, loaded.max_model_len),
                rows=rows,
                drafts=self.hooks.drafts,
                override=config.cache.num_gpu_blocks_override,
            )
            sizing = agreed(own, mesh.world)
        self.sizing = sizing
        caches, owners = allocate(specs, groups, sizing.own, platform)
        self.capacity = Capacity(
            groups=tuple(
                GroupCapacity(*shape, blocks)
                for shape, blocks in zip(sizing.groups, sizing.blocks, strict=True)
            ),
            vocabulary=loaded.vocabulary,
            max_model_len=sizing.max_model_len,
            notes=sizing.notes,
            parts=self._values(),
            ranks=mesh.world.size,
        )
        self._block_sizes = [group.block_size for group in self.capacity.groups]
        # Steps may be padded with additional rows.
        most = tokens if self._sizes is None else max(tokens, self._sizes.tokens[-1])
        self.builder = BatchBuilder(
            GroupPlanner.all(groups, sizing.places),
            caches,
            owners,
            rows=rows + most,
            tokens=most,
            platform=platform,
            amend=self.hooks.amend_layout,
        )
        self.sampler = Sampler(
            loaded.ops,
            platform,
            vocabulary=loaded.vocabulary,
            rows=rows + 1,
            mode=config.model.logprobs_mode,
            processors=build_processors(config, loaded.vocabulary, platform.device, plugins),
        )
        self._open_parts(rows)
        self._invariant = config.model.batch_invariant
        # Bidirectional attention, or a model without caches, cannot run token by token.
        self._whole = not all(_forward_only(group) for group in groups or (None,))
        #: Whether only the scorer reads hidden states of tokens that are not sampled.
        ranks = max(mesh.world.size, mesh.expert.size)
        self._narrow = not (self.hooks.reads or self._sizes or self._invariant or ranks > 1)
        self._scorer = PromptScorer(self.sampler, self._logits, self._tensor)
        self._failed: dict[int, RowFailure] = {}
        # The step in which each row was admitted; earlier results belong to other requests.
        self._since = np.zeros(rows, dtype=np.int64)

    def _open_parts(self, rows: int) -> None:
        """Open the parts' runners with their caches.

        Caches of a part with its own backends are not in the model's batches.
        """
        builder, first = self.builder, len(self.model.caches)
        own: dict[str, BatchBuilder] = {}
        for name, part in self.parts.items():
            if part.caches:
                own[name] = builder.part(slice(first, first + len(part.caches)))
                first += len(part.caches)
        if any(part.backends for part in self.parts.values()):
            self.builder = builder.part(slice(len(self.model.caches)), amended=True)
        for name, part in self.parts.items():
            part.open(
                RunnerContext(
                    model=self.model,
                    platform=self.platform,
                    builder=own.get(name),
                    model_builder=self.builder,
                    focus=self._focus,
                    logits=self._logits_of_rows,
                    sampler=self.sampler,
                    rows=rows,
                    rank=self._mesh.world.rank,
                    ranks=self._mesh.world.size,
                    caches=_by_group(builder),
                    groups=self.capacity.groups,
                )
            )

    def close(self) -> None:
        """Close the parts' runners."""
        for part in self.parts.values():
            part.close()

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        """Run one step. Exceptions of the model fail the step; errors of one row fail that row."""
        return self._begin(plan)()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LaunchedStep:
        """Launch a step. On devices that queue work this returns before the step is done.

        It waits if the host needs results: for rows whose sampling `waits`, drafts, pooling rows.
        """
        return LaunchedStep(self._begin(plan))

    def _begin(self, plan: Plan) -> Callable[[], StepResult]:
        step = RunningStep(plan, time.perf_counter())
        with self.platform.queue():
            self._change_rows(step)
            self.builder.share(plan, self._mesh)
            if len(plan.rows):
                self._launch(step)
        return partial(self._result, step)

    def _launch(self, step: RunningStep) -> None:
        """Launch the forward pass, sampling and the work of step parts."""
        plan, ends = step.plan, np.cumsum(step.plan.counts)
        step.sampling = sampling = self._sampling(plan)
        rows, lasts = plan.rows[sampling], ends[sampling] - 1
        drafts = None if plan.drafted is None else plan.drafted[sampling]
        places = lasts if drafts is None else _ranges(lasts - drafts, drafts + 1)
        hidden, batch = self._alone(plan) if self._invariant else self._together(plan, places)
        if not self._mesh.pipeline.last:
            return
        states = hidden
        if self._sizes is not None:
            hidden = hidden[: len(plan.tokens)]
        step.scores = self._scorer.scores(plan, hidden)
        step.report(self.hooks.collect, plan, hidden)
        if len(rows):
            if len(places) != states.shape[0] or self._sizes is not None:
                states = states[self._tensor(places) if batch is None else batch.sample]
            logit_rows = _longer(places, (0, states.shape[0] - len(places)))
            logits = self._passed_logits
            if logits is None:
                logits = self._logits(states, *self._focus_of(plan, logit_rows))
            if not self._mesh.gives:
                step.report(self.hooks.follow, plan, hidden, self._layers)
                return
            self._choose(step, rows, ends, drafts, logits)
        step.gives = True
        if self.hooks.after and (len(rows) or self.hooks.every):
            ran = batch if self._sizes is None else None
            make = partial(self.builder.build, plan, places) if ran is None else lambda: ran
            step.report(self.hooks.after, self._ran(step, ends, make, hidden))

    def _sampling(self, plan: Plan) -> np.ndarray:
        """Return which rows sample tokens: [rows] bool."""
        sampling = plan.samples
        for part in self.hooks.tokenless:
            if part.tokenless:
                gives = [row not in part.tokenless for row in plan.rows.tolist()]
                sampling = sampling & np.array(gives)
        return sampling

    def _choose(
        self,
        step: RunningStep,
        rows: np.ndarray,
        ends: np.ndarray,
        drafts: np.ndarray | None,
        logits: torch.Tensor,
    ) -> None:
        """Sample the tokens of the sampling rows. drafts: [rows], number of drafts of each."""
        plan, sampling, count = step.plan, step.sampling, len(rows)
        positions = (plan.starts + plan.counts)[sampling]
        own = count if drafts is None else count + int(drafts.sum())
        more = (0, logits.shape[0] - own)
        whole = np.pad(rows, more, constant_values=self._spare) if more[1] else rows
        if drafts is None:
            chosen = self.sampler.sample(whole, _longer(positions, more), logits)
            self.builder.keep(whole, chosen)
            step.verified = partial(verified_of, chosen, count)
            return
        runs = _ranges(ends[sampling] - drafts, drafts)
        tokens = np.split(plan.tokens[runs], drafts.cumsum()[:-1])
        first = positions - drafts
        verified = None
        for verify in self.hooks.verify:
            verified = verified or verify(plan, rows, first, logits[:own], tokens)
        if verified is None:
            tokens += [tokens[0][:0]] * more[1]
            verified = self.sampler.verify(whole, _longer(first, more), logits, tokens)
            verified = first_of(verified, count)
        self.builder.keep(rows, last_of(verified))
        step.verified = lambda: verified

    def _ran(
        self, step: RunningStep, ends: np.ndarray, make: Callable[[], Batch], hidden: torch.Tensor
    ) -> RanStep:
        """Build the value for `PartRunner.after`."""
        plan, sampling, verified = step.plan, step.sampling, step.verified()
        step.verified = lambda: verified
        rows, accepted = plan.rows[sampling], verified.accepted
        lasts = ends - 1
        if plan.drafted is not None:
            lasts = lasts - plan.drafted
        lasts[sampling] += np.maximum(accepted - 1, 0)
        counts = accepted.tolist()
        tokens = {
            row: verified.tokens[end - count : end]
            for row, end, count in zip(rows.tolist(), accumulate(counts), counts, strict=True)
            if count and row not in self._failed
        }
        return RanStep(
            plan=plan, tokens=tokens, lasts=lasts, hidden=hidden, layers=self._layers, batch=make
        )

    def _result(self, step: RunningStep) -> StepResult:
        for name, report in self.hooks.report:
            if (value := report()) is not None:
                step.reports[name] = value
        if not step.gives:
            return step.empty_result(self._mesh.world.rank)
        verified, rows = step.verified(), step.plan.rows[step.sampling].tolist()
        for index, failure in verified.errors.items():
            if self._since[rows[index]] <= step.plan.step:
                self._failed.setdefault(rows[index], failure)
        spread = self._mesh.spread
        return step.result(
            verified,
            self._failed,
            rank=self._mesh.world.rank,
            routed=None if spread is None else spread.report(),
        )

    def _together(self, plan: Plan, sample: np.ndarray) -> tuple[torch.Tensor, Batch | None]:
        """Compute hidden states [tokens, hidden] in one forward pass; return the batch as well.

        sample: as in `BatchBuilder.build`.
        """
        forward = self._forward_of(plan)
        for watch in self.hooks.watch:
            forward = watch(forward, plan)
        whole, places = self._padded(plan, sample, forward)
        self._focus(*self._focus_of(whole))
        batch = self.builder.build(whole, places)
        for amend in self.hooks.amend_batch:
            batch = amend(whole, batch)
        skips = self._narrow and whole is plan and not self._scorer.busy
        if skips and len(sample) < len(plan.tokens):
            batch = evolve(batch, only_sampled=True)
        output = self._in_stages(forward, batch)
        hidden, *layers = (output,) if isinstance(output, torch.Tensor) else output
        if whole is not plan:
            layers = [states[: len(plan.tokens)] for states in layers]
        known = len(self.hooks.layers)
        self._layers, (self._passed_logits, *_) = tuple(layers[:known]), (*layers[known:], None)
        if whole is plan or self._sizes is not None:
            return hidden, batch
        batch = evolve(batch, sample=batch.sample[: len(sample)])
        return hidden[: len(plan.tokens)], None if self.hooks.after else batch

    def _padded(self, plan: Plan, sample: np.ndarray, forward: Forward) -> tuple[Plan, np.ndarray]:
        """Pad plan and sample to a size that the device requires or `forward` has recorded."""
        if self._sizes is not None:
            padding = self._sizes.padding(len(plan.rows), len(plan.tokens))
            counts = np.concatenate([plan.counts, np.array(padding, dtype=np.int32)])
            samples = self._sizes.sampled(len(sample))
            return self.builder.padded(plan, sample, counts, samples=samples, reach=self._reach)
        if isinstance(forward, RecordedForward):
            return self.builder.padded(plan, sample, forward.padded(plan.counts))
        return plan, sample

    def _forward_of(self, plan: Plan) -> Forward:
        """Return the forward pass for a plan. Steps with separate recordings have their own."""
        names = {name for recording in self.hooks.recording if (name := recording(plan))}
        name = None if isinstance(self._forward, RecordedForward) else "+".join(sorted(names))
        key = DIRECT if DIRECT in names else name or None
        if key not in self._recordings:
            self._recordings[key] = self._record(self._direct)
        return self._recordings[key]

    def _focus_of(
        self, plan: Plan, places: np.ndarray | None = None
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return rows and positions of the plan's tokens, or of those at `places`.

        Returns None for both if no part needs them.
        """
        if not self.hooks.focus:
            return None, None
        firsts = np.cumsum(plan.counts) - plan.counts
        rows = np.repeat(plan.rows, plan.counts)
        positions = np.arange(len(rows)) + np.repeat(plan.starts - firsts, plan.counts)
        return (rows, positions) if places is None else (rows[places], positions[places])

    def _focus(self, rows: np.ndarray | None, positions: np.ndarray | None) -> None:
        for focus in self.hooks.focus:
            focus(rows, positions)

    def _in_stages(self, forward: Forward, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run this rank's pipeline stage; return hidden states, or what the stage passed on."""
        stages = self._mesh.pipeline
        if stages.size == 1:
            return forward(batch)
        if not stages.first:
            batch = evolve(batch, carried=stages.take_over())
        if stages.last:
            return self._direct(batch)
        carried = self.model.carry(batch)
        stages.pass_on(carried)
        return carried[0]

    def _alone(self, plan: Plan) -> tuple[torch.Tensor, None]:
        """Compute hidden states in forward passes whose shapes depend only on one row."""
        passes = []
        for part in alone(plan, whole=self._whole):
            hidden, _ = self._together(part, part.counts - 1)
            passes.append([tensor.clone() for tensor in (hidden, *self._layers)])
        hidden, *layers = [torch.cat(states) for states in zip(*passes, strict=True)]
        self._layers = tuple(layers)
        return hidden, None

    def _logits(
        self, hidden: torch.Tensor, rows: np.ndarray | None, positions: np.ndarray | None
    ) -> torch.Tensor:
        """Compute logits [n, vocabulary]. hidden: [n, hidden], of rows [n] at positions [n]."""
        if not self._invariant:
            self._focus(rows, positions)
            return self.model.logits(hidden)
        logits = []
        for index in range(len(hidden)):
            one = slice(index, index + 1)
            self._focus(*(None if each is None else each[one] for each in (rows, positions)))
            logits.append(self.model.logits(hidden[one].clone()))
        return torch.cat(logits)

    def _logits_of_rows(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Compute logits of vectors that belong to whole rows: [n], not to a position."""
        positions = np.full(len(rows), np.iinfo(np.int64).max)
        return self._logits(hidden, np.array(rows, dtype=np.int64), positions)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return self._staging.send((array,))[0]

    def forget_recordings(self) -> None:
        """Drop recorded steps, which refer to the addresses of weights; `record` may follow."""
        self._forward = self._record(self._direct)
        direct = self._forward if self._sizes else self._direct
        #: Forward passes by name of `PartRunner.recording`; None is the default.
        self._recordings: dict[str | None, Forward] = {None: self._forward, DIRECT: direct}

    @torch.inference_mode()
    def record(self) -> None:
        """Record the steps of a `RecordedForward`."""
        if isinstance(self._forward, RecordedForward):
            self._focus(None, None)
            where = self.builder, self._block_sizes, self._reach, self.platform
            for vary in (None, *self.hooks.vary):
                record(self._forward, *where, vary=vary)
            self._focus(None, None)
            self.capacity = evolve(self.capacity, parts=self._values())

    @property
    def _reach(self) -> int:
        """The number of tokens that block tables of recorded and padded steps cover."""
        most = 0 if self._sizes is None else self._sizes.tokens[-1]
        return max(self.capacity.max_model_len + self.hooks.ahead, most)

    def _values(self) -> dict[str, Mapping[str, Any]]:
        """Return the values that the parts' runners have for their planners."""
        return {name: value for name, part in self.parts.items() if (value := part.capacity())}

    @torch.inference_mode()
    def check(self) -> int:
        """Run one token in the null block and return the length of embeddings.

        Raises EngineError if the logits are not finite, so that broken weights are detected at
        startup.
        """
        self._focus(None, None)
        plan = null_plan(np.ones(1, dtype=np.int32), self._block_sizes)
        plan, sample = self._padded(plan, np.zeros(1, dtype=np.int64), self._direct)
        with self.platform.queue():
            batch = self.builder.build(plan, sample)
            output = self._in_stages(self._recordings[DIRECT], batch)
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            if not self._mesh.pipeline.last:
                return hidden.shape[-1]
            logits = self.model.logits(hidden[batch.sample])
            finite = self.platform.fetch((logits.isfinite().any(),))
            widths = (width(hidden) for width in self.hooks.width)
            width: int = next((w for w in widths if w is not None), hidden.shape[-1])
        if not finite.wait()[0]:
            raise EngineError(
                "the model returns no finite logits: its weights are broken or the dtype is too "
                "narrow for them (try --dtype float32)"
            )
        return width

    def _change_rows(self, step: RunningStep) -> None:
        """Release and admit rows, and call the parts' hooks before the model runs."""
        plan, values = step.plan, step.plan.parts
        for row in plan.release:
            self._release(row)
        for name in values:
            if name not in self.parts:
                raise EngineError(f"the plan has work for {name!r}, which has no runner here")
        for name, prepare in self.hooks.prepare:
            prepare(plan, values.get(name))
        for start in plan.admit:
            self._admit(start, plan.step)
        for name, begin in self.hooks.begin:
            if (value := begin(plan, values.get(name))) is not None:
                step.reports[name] = value

    def _release(self, row: int) -> None:
        self._failed.pop(row, None)
        self._scorer.release(row)
        self.sampler.release(row)
        for release in self.hooks.release:
            release(row)

    def _admit(self, start: RowStart, step: int) -> None:
        params = start.params
        self._since[start.row] = step
        for name, admit in self.hooks.admit:
            try:
                admit(start, start.parts.get(name))
            except ModulmError as error:
                self._failed.setdefault(start.row, RowFailure(str(error)[:300]))
        if isinstance(params, PoolingParams):
            if not any(start.row in part.tokenless for part in self.hooks.tokenless):
                raise EngineError("this model does not support pooling")
            return
        self._scorer.admit(start, params)
        if not self._mesh.gives:
            return
        try:
            self.sampler.admit(start, params, self._grammar(start, params))
        except Exception as error:
            self.sampler.release(start.row)
            message = f"the request could not be started: {error}"[:300]
            field = (error.param or "") if isinstance(error, RequestError) else None
            self._failed[start.row] = RowFailure(message, field)

    def _grammar(self, start: RowStart, params: SamplingParams) -> Grammar | None:
        """Return the row's grammar. Raises UnsupportedError if a required one is missing."""
        grammars = (grammar(start) for grammar in self.hooks.grammar)
        chosen = next((grammar for grammar in grammars if grammar is not None), None)
        if chosen is None and params.structured_outputs is not None:
            raise UnsupportedError("no step part applies structured_outputs")
        return chosen


def _check(config: EngineConfig, model: Model) -> tuple[int, int]:
    """Return the maximum rows and tokens of a step. Raises ConfigError for conflicting options."""
    rows, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    if rows is None or tokens is None:
        raise EngineError("max_num_seqs and max_num_batched_tokens must be resolved first")
    if config.model.enable_prompt_embeds and not model.takes_embeds:
        who = type(model).__name__
        raise ConfigError("enable_prompt_embeds", f"{who} needs token ids besides embeddings")
    return rows, tokens


def _longer(array: np.ndarray, more: tuple[int, int]) -> np.ndarray:
    """Append zeros to the array."""
    return np.pad(array, more) if more[1] else array


def _direct(model: Model, layers: tuple[int, ...]) -> Forward:
    """Return the model's forward pass, including hidden states of the layers that parts need."""
    return partial(model.states, layers=layers) if layers else model.forward


def _with_parts(
    loaded: Loaded, parts: Iterable[PartRunner]
) -> tuple[tuple[CacheSpec, ...], tuple[CacheGroup, ...]]:
    """Return the caches of the model followed by those of the parts, and their groups."""
    specs, groups = loaded.model.caches, loaded.groups
    for part in parts:
        groups = extended(groups, part.caches, len(specs), part.backends)
        specs = (*specs, *part.caches)
    return specs, groups


def _recorder(loaded: Loaded, config: EngineConfig, *, apart: bool) -> Callable[[Forward], Forward]:
    """Return the function that records a forward pass; with its logits unless they are `apart`.

    Replicas that share experts do not record: their exchanges differ in size from step to step.
    """
    if config.model.enforce_eager or config.parallel.shared_experts:
        return lambda forward: forward
    apart |= config.model.batch_invariant or config.parallel.pipeline_parallel_size > 1

    def record(forward: Forward) -> Forward:
        recorded = loaded.ops.recorded(forward)
        if isinstance(recorded, ForwardWithLogits) and not apart:
            recorded.append_logits(loaded.model.logits)
        return recorded

    return record


def _by_group(builder: BatchBuilder) -> dict[int, list[torch.Tensor]]:
    """Return the cache tensors by index in `Plan.tables`; their first dimension is the block."""
    by_group: dict[int, list[torch.Tensor]] = {}
    for cache, owner in zip(builder.caches, builder.owners, strict=True):
        tensors = cache.values() if isinstance(cache, Mapping) else (cache,)
        by_group.setdefault(builder.groups[owner].table, []).extend(tensors)
    return by_group


def _ranges(firsts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenate ranges [first, first + size): [sum(sizes)] int64."""
    before = np.cumsum(sizes) - sizes
    places: np.ndarray = np.arange(int(sizes.sum())) + np.repeat(firsts - before, sizes)
    return places


def _forward_only(group: CacheGroup | None) -> bool:
    """Whether the group's layers are causal and cache earlier tokens."""
    if group is None:
        return False
    spec = group.spec
    return not isinstance(spec, AttentionSpec) or (spec.causal and not (spec.spans or spec.masks))


def build_processors(
    config: EngineConfig, vocabulary: int, device: torch.device, plugins: PluginManager
) -> Processors:
    """Create the processors of plugins and the configuration, then those that hooks return."""
    classes = processor_classes(config.model.logits_processors, plugins)
    processors = [cls.open(config, vocabulary, device) for cls in classes]
    steps = plugins.gather("modulm_logits_steps", config=config, vocabulary=vocabulary)
    return Processors([*processors, *steps])
