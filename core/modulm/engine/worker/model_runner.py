"""The runner: one plan in, one result out. It owns the model, its caches and the rows' state.

Nothing below `run` reads a registry, a hook, the configuration or the environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import evolve

from modulm.contracts.attention import AttentionSpec
from modulm.contracts.executor import Capacity, Plan, RowStart, StepResult
from modulm.contracts.kernels import RecordedForward
from modulm.contracts.sampling import PoolingParams
from modulm.engine.kv_cache.sizing import Sizing, agreed, allocate, cache_budget, share_out
from modulm.engine.sampling.logits_processors import Processors, processor_classes
from modulm.engine.sampling.sampler import Best, Refusal, Sampler, Verified
from modulm.engine.worker.adapters import RowAdapters
from modulm.engine.worker.drafting import Drafting
from modulm.engine.worker.input_batch import BatchBuilder, GroupPlanner, alone
from modulm.engine.worker.launched_step import LaunchedStep
from modulm.engine.worker.media import PromptInputs
from modulm.engine.worker.profiling import null_plan, record, step_memory
from modulm.engine.worker.verified import last_of, verified_of
from modulm.errors import ConfigError, EngineError, ModulmError, RequestError
from modulm.loading.cache_groups import CacheGroup, extended
from modulm.parallel import Mesh

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.connector import KVMover
    from modulm.contracts.drafter import Drafter
    from modulm.contracts.kernels import Forward
    from modulm.contracts.model import Batch, CacheSpec, Model
    from modulm.contracts.platform import Platform
    from modulm.contracts.pooler import RowPooler
    from modulm.engine.structured_output.compiler import RequestGrammars
    from modulm.loading import Loaded
    from modulm.plugins.manager import PluginManager

__all__ = ["LaunchedStep", "ModelRunner", "build_processors"]

#: Prompt positions whose logits are held at once for prompt_logprobs.
_PROMPT_SLICE = 64


class ModelRunner:
    """Runs plans on a loaded model.

    config must have its automatic values resolved; making a runner allocates the caches, of the
    sizes in `sizing` or of those that fit. mesh: the ranks that compute each step together; all are
    given the same plans, and what they exchange is ordered by that alone.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: Loaded,
        platform: Platform,
        plugins: PluginManager,
        grammars: RequestGrammars,
        *,
        drafter: Drafter | None = None,
        mover: KVMover | None = None,
        sizing: Sizing | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        rows, tokens = _check(config, loaded.model, drafter)
        self.model = loaded.model
        self._direct = _direct(self.model, drafter)
        self._forward, self._adapted = _recorded(loaded, self._direct, config)
        #: What the drafter wants of single layers, of the step that ran last.
        self._layers: tuple[torch.Tensor, ...] = ()
        self.platform = platform
        self._staging = platform.staging()
        specs, groups = _kept(loaded, drafter)
        drafts = 0 if drafter is None else drafter.most
        measure = partial(step_memory, loaded, specs, groups, platform, self._forward, rows, tokens)
        self._mesh = mesh = mesh or Mesh()
        if sizing is None:
            own = share_out(
                groups,
                cache_budget(config, platform, measure),
                max_model_len=loaded.max_model_len,
                chunk=min(tokens, loaded.max_model_len),
                rows=rows,
                drafts=drafts,
                override=config.cache.num_gpu_blocks_override,
            )
            sizing = agreed(own, mesh.world)
        self.sizing = sizing
        caches, owners = allocate(specs, groups, sizing.own, platform)
        self.capacity = Capacity(
            groups=tuple(
                (*shape, blocks) for shape, blocks in zip(sizing.groups, sizing.blocks, strict=True)
            ),
            vocabulary=loaded.vocabulary,
            max_model_len=sizing.max_model_len,
            notes=sizing.notes,
            drafts=drafts,
            ahead=drafts if len(specs) > len(self.model.caches) else 0,
            adapters=0 if loaded.adapters is None else loaded.adapters.slots,
            # An item is encoded whole, so what one step takes is also what has to be kept.
            encoder_tokens=(encoded := _encoded(self.model, groups, tokens)),
            encoder_cache=encoded,
        )
        planners = GroupPlanner.all(groups, sizing.places)
        # A recorded step may be filled up with rows of padding.
        self.builder = BatchBuilder(
            planners, caches, owners, rows=rows + tokens, tokens=tokens, platform=platform
        )
        self._grammars = grammars
        self.sampler = Sampler(
            loaded.ops,
            platform,
            vocabulary=loaded.vocabulary,
            rows=rows,
            mode=config.model.logprobs_mode,
            processors=build_processors(config, loaded.vocabulary, platform.device, plugins),
        )
        self._drafting = None if drafter is None else self._open_drafting(drafter)
        self._inputs = PromptInputs(self.model, platform.device)
        self.adapters = RowAdapters(loaded.adapters, self._staging)
        self._mover = mover
        if mover is not None:
            mover.open(_by_group(caches, owners))
        self.pooler: RowPooler | None = None
        if loaded.pooler is not None:
            self.pooler = loaded.pooler.rows(loaded.pooling, self._pooled_logits, loaded.layers)
        self._invariant = config.model.batch_invariant
        # What looks both ways, or keeps nothing between steps, cannot go token by token.
        self._whole = not all(_forward_only(group) for group in groups or (None,))
        self._pooling: dict[int, int | None] = {}
        self._prompts: dict[int, tuple[np.ndarray, int]] = {}
        self._failed: dict[int, str] = {}
        # The step in which a row was admitted: results of earlier ones are about others.
        self._since = np.zeros(rows, dtype=np.int64)

    def _open_drafting(self, drafter: Drafter) -> Drafting:
        """Batches of a drafter that has backends of its own are no part of the model's."""
        count = len(self.model.caches)
        own = self.builder.part(slice(count, None)) if drafter.caches else None
        if drafter.backends:
            self.builder = self.builder.part(slice(count))
        return Drafting(drafter, own)

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        """Run one step. What the model raises fails the step; what one row does wrong does not."""
        return self._begin(plan)()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LaunchedStep:
        """Begin a step. Where work is queued this returns before it is done, so that the next step
        can be launched behind it, unless what follows depends on what the host makes of this one:
        rows whose sampling `waits`, drafts, pooled rows.
        """
        return LaunchedStep(self._begin(plan))

    def _begin(self, plan: Plan) -> Callable[[], StepResult]:
        began = time.perf_counter()
        with self.platform.queue():
            encoded = self._change_rows(plan)
            self.builder.share(plan, self._mesh)
            nothing = partial(self._nothing_run, plan)
            work = self._launched(plan, began) if len(plan.rows) else nothing
            return work if not encoded else lambda: evolve(work(), encoded=encoded)

    def _nothing_run(self, plan: Plan) -> StepResult:
        moved = None if self._mover is None else self._mover.ended()
        return StepResult(plan.step, np.zeros(0, dtype=np.int64), transfers=moved)

    def _launched(self, plan: Plan, began: float) -> Callable[[], StepResult]:
        """Launch everything that rows are run for; what gives the result."""
        ends = np.cumsum(plan.counts)
        sampling = plan.samples
        if self._pooling:
            sampling = sampling & np.array([row not in self._pooling for row in plan.rows.tolist()])
        rows, lasts = plan.rows[sampling], ends[sampling] - 1
        drafts = None if plan.drafted is None else plan.drafted[sampling]
        places = lasts if drafts is None else _ranges(lasts - drafts, drafts + 1)
        hidden, batch = self._hidden(plan, places)
        if not self._mesh.pipeline.last:
            return partial(self._nothing_run, plan)
        slots = self.adapters.of_tokens(plan)
        slots = None if slots is None else slots[places]
        scores = self._prompt_logprobs(plan, ends, hidden) if self._prompts else {}
        pooled = self._pool(plan, ends, hidden) if self._pooling else {}
        positions = (plan.starts + plan.counts)[sampling]
        verified = chosen = None
        proposed: dict[int, np.ndarray] = {}
        if len(rows):
            states = hidden
            if len(places) != len(hidden):
                states = hidden[self._tensor(places) if batch is None else batch.sample]
            logits = self._logits(states, slots)
            if not self._mesh.gives:
                return partial(self._nothing_run, plan)
            if drafts is None:
                chosen = self.sampler.sample(rows, positions, logits)
                self.builder.keep(rows, chosen)
            else:
                runs = _ranges(lasts - drafts + 1, drafts)
                tokens = np.split(plan.tokens[runs], drafts.cumsum()[:-1])
                verified = self.sampler.verify(rows, positions - drafts, logits, tokens)
                self.builder.keep(rows, last_of(verified))
        if self._drafting is not None and (len(rows) or self._drafting.every):
            verified = verified or verified_of(chosen)
            make = partial(self.builder.build, plan, places) if batch is None else lambda: batch
            proposed = self._propose(plan, sampling, verified, make, hidden)
        return lambda: self._result(
            plan, sampling, verified or verified_of(chosen), scores, pooled, proposed, began
        )

    def _propose(
        self,
        plan: Plan,
        sampling: np.ndarray,
        verified: Verified,
        batch: Callable[[], Batch],
        hidden: torch.Tensor,
    ) -> dict[int, np.ndarray]:
        """Ask the drafter. sampling: [rows of the plan] bool, those that were to give tokens."""
        rows, accepted = plan.rows[sampling], verified.accepted
        lasts = np.cumsum(plan.counts) - 1
        if plan.drafted is not None:
            lasts -= plan.drafted
        lasts[sampling] += np.maximum(accepted - 1, 0)
        runs = np.split(verified.tokens, accepted.cumsum()[:-1]) if len(rows) else ()
        given = {
            row: tokens for row, tokens, alive in zip(rows.tolist(), runs, accepted, strict=True)
            if alive and row not in self._failed
        }  # fmt: skip
        self.adapters.begin(None)
        drafting = self._drafting
        if drafting is None:
            return {}
        drafts = drafting.propose(plan, given, batch, lasts, hidden, self._layers)
        return {row: self.sampler.legal(row, tokens) for row, tokens in drafts.items()}

    def _result(
        self,
        plan: Plan,
        sampling: np.ndarray,
        verified: Verified,
        scores: Mapping[int, Sequence[Best]],
        pooled: Mapping[int, np.ndarray],
        proposed: Mapping[int, np.ndarray],
        began: float,
    ) -> StepResult:
        rows = plan.rows[sampling].tolist()
        for place, words in verified.errors.items():
            if self._since[rows[place]] <= plan.step:
                self._failed.setdefault(rows[place], words)
        tokens, accepted = verified.tokens, verified.accepted
        errors = {}
        if self._failed:
            errors = {row: self._failed[row] for row in plan.rows.tolist() if row in self._failed}
            alive = np.array([row not in errors for row in rows], dtype=bool)
            tokens, accepted = tokens[np.repeat(alive, accepted)], accepted * alive
        each = not errors and plan.drafted is None
        if sampling is not plan.samples:
            runs, accepted, each = accepted, np.zeros_like(plan.counts), False
            accepted[sampling] = runs
            accepted = accepted[plan.samples]
        return StepResult(
            step=plan.step,
            tokens=tokens,
            accepted=None if each else accepted,
            logprobs={
                rows[place]: some
                for place, some in verified.logprobs.items()
                if rows[place] not in errors
            },
            prompt_logprobs={
                row: tuple(entry for best in some for _, entry in best.entries())
                for row, some in scores.items()
            },
            pooled=pooled,
            errors={row: str(words) for row, words in errors.items()},
            refused={row: w.field for row, w in errors.items() if isinstance(w, Refusal)},
            drafts=proposed,
            transfers=None if self._mover is None else self._mover.ended(),
            routed=None if self._mesh.spread is None else self._mesh.spread.report(),
            seconds=time.perf_counter() - began,
        )

    def _hidden(self, plan: Plan, sample: np.ndarray) -> tuple[torch.Tensor, Batch | None]:
        """Hidden states [tokens, hidden] of a step, and its batch if there was one for all."""
        if self._invariant:
            return self._alone(plan), None
        return self._together(plan, sample)

    def _together(self, plan: Plan, sample: np.ndarray) -> tuple[torch.Tensor, Batch | None]:
        """In one forward pass; sample: as `BatchBuilder.build` has it. Drafters see no padding."""
        slots = self.adapters.of_tokens(plan)
        # The pooler keeps what it is fed, and recorded steps give their result in one place. Steps
        # with adapters are recorded apart: what bars them from it bars no others.
        forward = self._forward if slots is None else self._adapted
        if self._pooling or (slots is not None and not self.adapters.recordable):
            forward = self._direct
        if self._pooling and self.pooler is not None:
            forward = self.pooler.watched(self.model, forward, plan)
        whole, places = plan, sample
        if isinstance(forward, RecordedForward):
            whole, places = self.builder.padded(plan, sample, forward.padded(plan.counts))
            slots = slots if slots is None else self.adapters.of_tokens(whole)
        adapters = self.adapters.begin(slots)
        inputs = self._inputs
        batch = self.builder.build(whole, places, inputs.spans(whole), inputs.crossed(whole))
        if adapters is not None:
            batch = evolve(batch, adapters=adapters)
        if any(self._pooling.values()):
            types = self._token_types(plan, np.cumsum(plan.counts))
            batch = evolve(batch, extras={"token_types": types})
        batch = self._inputs.put(batch, whole)
        found = self._in_stages(forward, batch)
        hidden, *layers = (found,) if isinstance(found, torch.Tensor) else found
        if whole is not plan:
            hidden, *layers = (states[: len(plan.tokens)] for states in (hidden, *layers))
            batch = evolve(batch, sample=batch.sample[: len(sample)])
        self._layers = tuple(layers)
        return hidden, None if whole is not plan and self._drafting is not None else batch

    def _in_stages(self, forward: Forward, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What `forward` gives; of another stage than the last one, what it passed on."""
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

    def _alone(self, plan: Plan) -> torch.Tensor:
        """The same, in forward passes whose shapes depend on nothing but one row."""
        found = []
        for part in alone(plan, whole=self._whole):
            hidden, _ = self._together(part, part.counts - 1)
            found.append([tensor.clone() for tensor in (hidden, *self._layers)])
        hidden, *layers = [torch.cat(some) for some in zip(*found, strict=True)]
        self._layers = tuple(layers)
        return hidden

    def _logits(self, hidden: torch.Tensor, slots: np.ndarray | None = None) -> torch.Tensor:
        """hidden: [n, hidden] -> [n, vocabulary]; slots: [n] of their adapters, if any."""
        if not self._invariant:
            self.adapters.begin(slots)
            return self.model.logits(hidden)
        found = []
        for place in range(len(hidden)):
            self.adapters.begin(None if slots is None else slots[place : place + 1])
            found.append(self.model.logits(hidden[place : place + 1].clone()))
        return torch.cat(found)

    def _pooled_logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Of pooled vectors; rows: [n], whose they are."""
        return self._logits(hidden, self.adapters.of_rows(rows))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return self._staging.send((array,))[0]

    @torch.inference_mode()
    def record(self) -> None:
        """Record the steps that are recorded ahead, if any; called once, before the first step."""
        if isinstance(self._forward, RecordedForward):
            sizes = [size for _, size, *_ in self.capacity.groups]
            reach = self.capacity.max_model_len + self.capacity.ahead
            record(self._forward, self.builder, sizes, reach, self.platform)

    @torch.inference_mode()
    def check(self) -> int:
        """Run one token through the model, into the null block; how wide embeddings are.

        Raises EngineError if its logits are not finite, so that broken weights end the start and
        not the first request.
        """
        self.adapters.begin(None)
        plan = null_plan(np.ones(1, dtype=np.int32), [size for _, size, *_ in self.capacity.groups])
        with self.platform.queue():
            batch = self.builder.build(plan, np.zeros(1, dtype=np.int64))
            found = self._in_stages(self._direct, batch)
            hidden = found if isinstance(found, torch.Tensor) else found[0]
            if not self._mesh.pipeline.last:
                return hidden.shape[-1]
            finite = self.platform.fetch((self.model.logits(hidden).isfinite().any(),))
            width = hidden.shape[-1] if self.pooler is None else self.pooler.width(hidden)
        if not finite.wait()[0]:
            raise EngineError(
                "the model gives no finite logits: its weights are broken or the dtype is too "
                "narrow for them (try --dtype float32)"
            )
        return width

    def _change_rows(self, plan: Plan) -> tuple[bytes, ...]:
        """Do what comes before the rows run; `StepResult.encoded`."""
        for row in plan.release:
            self._release(row)
        self.adapters.fill(plan)
        for start in plan.admit:
            self._admit(start, plan.step)
        if plan.encode or self._inputs.begun:
            self.adapters.begin(None)
        encoded = self._inputs.encode(plan)
        if plan.transfers is not None:
            if self._mover is None:
                raise EngineError("the plan moves blocks and there is no KV connector")
            self._mover.begin(plan.transfers)
        return encoded

    def _release(self, row: int) -> None:
        self._failed.pop(row, None)
        self._inputs.release(row)
        self.adapters.release(row)
        if self.pooler is not None and row in self._pooling:
            del self._pooling[row]
            self.pooler.release(row)
            return
        self._prompts.pop(row, None)
        self.sampler.release(row)
        if self._drafting is not None:
            self._drafting.release(row)

    def _admit(self, start: RowStart, step: int) -> None:
        params = start.params
        self._since[start.row] = step
        self._inputs.admit(start)
        try:
            self.adapters.admit(start)
        except ModulmError as error:
            self._failed[start.row] = str(error)[:300]
        if isinstance(params, PoolingParams):
            if self.pooler is None:
                raise EngineError("this model does not pool")
            self._pooling[start.row] = params.second_text
            self.pooler.admit(start.row, params, start.prompt)
            return
        if params.prompt_logprobs is not None:
            self._prompts[start.row] = (start.prompt, params.prompt_logprobs)
        if not self._mesh.gives:
            return
        if self._drafting is not None:
            self._drafting.admit(start)
        constraint = params.structured_outputs
        try:
            grammar = None if constraint is None else self._grammars.of(start, constraint)
            self.sampler.admit(start, params, grammar)
        except Exception as error:
            self.sampler.release(start.row)
            words = f"the request could not be started: {error}"[:300]
            if isinstance(error, RequestError):
                words = Refusal(words, error.param or "")
            self._failed[start.row] = words

    def _prompt_logprobs(
        self, plan: Plan, ends: np.ndarray, hidden: torch.Tensor
    ) -> dict[int, list[Best]]:
        found: dict[int, list[Best]] = {}
        for i, row in enumerate(plan.rows.tolist()):
            if row not in self._prompts:
                continue
            prompt, k = self._prompts[row]
            start, count = int(plan.starts[i]), int(plan.counts[i])
            targets = prompt[start + 1 : start + 1 + count]
            if len(targets):
                states = hidden[ends[i] - count :][: len(targets)]
                own = self.adapters.of_span(row, start, len(targets))
                found[row] = self._score(states, targets, k, own)
        return found

    def _score(
        self, hidden: torch.Tensor, targets: np.ndarray, k: int, own: np.ndarray | None
    ) -> list[Best]:
        """hidden: [n, hidden] at the positions before `targets`: [n]; k: -1 for all tokens; own: as
        `slots` of `_logits`.
        """
        count = self.capacity.vocabulary if k == -1 else k
        tokens = self._tensor(np.array(targets))
        slices = [slice(at, at + _PROMPT_SLICE) for at in range(0, len(targets), _PROMPT_SLICE)]
        return [
            self.sampler.best(
                self._logits(hidden[some], None if own is None else own[some]).float(),
                tokens[some],
                count,
            )
            for some in slices
        ]

    def _token_types(self, plan: Plan, ends: np.ndarray) -> torch.Tensor:
        """[tokens] int64: 1 for the tokens of a pair's second text, else 0."""
        types = np.zeros(len(plan.tokens), dtype=np.int64)
        for i, row in enumerate(plan.rows.tolist()):
            second = self._pooling.get(row)
            if second is not None:
                first = ends[i] - plan.counts[i]
                types[first + max(second - int(plan.starts[i]), 0) : ends[i]] = 1
        return self._tensor(types)

    def _pool(self, plan: Plan, ends: np.ndarray, hidden: torch.Tensor) -> dict[int, np.ndarray]:
        finished = []
        pooler = self.pooler
        if pooler is None:
            return {}
        for i, row in enumerate(plan.rows.tolist()):
            if row in self._pooling:
                pooler.feed(row, hidden[ends[i] - plan.counts[i] : ends[i]])
                finished += [row] if plan.samples[i] else []
        return pooler.finish(finished)


def _check(config: EngineConfig, model: Model, drafter: Drafter | None) -> tuple[int, int]:
    """Most rows and tokens of a step. Raises ConfigError for what these do not do together."""
    rows, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    if rows is None or tokens is None:
        raise EngineError("max_num_seqs and max_num_batched_tokens must be resolved first")
    if config.model.enable_prompt_embeds and not model.takes_embeds:
        who = type(model).__name__
        raise ConfigError("enable_prompt_embeds", f"{who} needs more of tokens than embeddings")
    parallel = config.parallel
    several = parallel.ranks > 1 or parallel.shared_experts
    if drafter is not None and several and (drafter.caches or parallel.pipeline_parallel_size > 1):
        what = "with caches of its own, or over pipeline stages"
        raise ConfigError("speculative_config", f"a drafter {what}, on several ranks: not yet")
    return rows, tokens


def _encoded(model: Model, groups: Sequence[CacheGroup], tokens: int) -> int:
    """Outputs that encoders may give in a step of at most `tokens` tokens."""
    longest = max((group.window or 0 for group in groups if group.kind == "cross"), default=0)
    return max(tokens, longest) if model.media else 0


def _direct(model: Model, drafter: Drafter | None) -> Forward:
    """The model's forward pass, with the layers that the drafter wants to see."""
    if drafter is None or not drafter.needs.layers:
        return model.forward
    return partial(model.states, layers=drafter.needs.layers)


def _kept(
    loaded: Loaded, drafter: Drafter | None
) -> tuple[tuple[CacheSpec, ...], tuple[CacheGroup, ...]]:
    """The caches of the model, then the drafter's, and their groups."""
    specs, groups = loaded.model.caches, loaded.groups
    if drafter is None:
        return specs, groups
    groups = extended(groups, drafter.caches, len(specs), drafter.backends)
    return (*specs, *drafter.caches), groups


def _recorded(loaded: Loaded, forward: Forward, config: EngineConfig) -> tuple[Forward, Forward]:
    """The model for plain steps, and for steps with adapters. Steps of replicas that share experts
    are not recorded: how much they exchange differs from one to the next.
    """
    recorded = loaded.ops.recorded
    if config.model.enforce_eager or config.parallel.shared_experts:
        return forward, forward
    return recorded(forward), forward if loaded.adapters is None else recorded(forward)


def _by_group(
    caches: Sequence[torch.Tensor | Mapping[str, torch.Tensor]], owners: Sequence[int]
) -> dict[int, list[torch.Tensor]]:
    """The tensors of each group whose first dimension is the block."""
    found: dict[int, list[torch.Tensor]] = {}
    for cache, group in zip(caches, owners, strict=True):
        tensors = cache.values() if isinstance(cache, Mapping) else (cache,)
        found.setdefault(group, []).extend(tensors)
    return found


def _ranges(firsts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[sum(sizes)] int64: first, first + 1, ... of each, `sizes` many."""
    before = np.cumsum(sizes) - sizes
    places: np.ndarray = np.arange(int(sizes.sum())) + np.repeat(firsts - before, sizes)
    return places


def _forward_only(group: CacheGroup | None) -> bool:
    """Whether the group's layers keep what they saw and never look ahead."""
    if group is None:
        return False
    spec = group.spec
    return not isinstance(spec, AttentionSpec) or (spec.causal and not spec.spans)


def build_processors(
    config: EngineConfig, vocabulary: int, device: torch.device, plugins: PluginManager
) -> Processors:
    """Processors of plugins and of the configuration, then the steps that hooks return."""
    classes = processor_classes(config.model.logits_processors, plugins)
    processors = [cls.open(config, vocabulary, device) for cls in classes]
    steps = plugins.gather("modulm_logits_steps", config=config, vocabulary=vocabulary)
    return Processors([*processors, *steps])
