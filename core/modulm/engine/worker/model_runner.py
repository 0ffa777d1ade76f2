"""The runner: one plan in, one result out. It owns the model, its caches and the rows' state.

Nothing below `run` reads a registry, a hook, the configuration or the environment.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import evolve

from modulm.contracts.attention import AttentionSpec
from modulm.contracts.executor import (
    PENDING,
    Capacity,
    Plan,
    RowLogprobs,
    RowStart,
    StepResult,
)
from modulm.contracts.sampling import PoolingParams
from modulm.engine.kv_cache.sizing import Sizing, allocate, cache_budget, share_out
from modulm.engine.pooling.pooler import Pooler, PoolerConfig
from modulm.engine.sampling.logits_processors import Processors, processor_classes
from modulm.engine.sampling.sampler import Sampled, Sampler
from modulm.engine.worker.input_batch import BatchBuilder, GroupPlanner, alone
from modulm.errors import EngineError

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm.contracts.platform import Platform
    from modulm.engine.structured_output.compiler import RequestGrammars
    from modulm.loading import CacheGroup, Loaded
    from modulm.plugins.manager import PluginManager

__all__ = ["ModelRunner", "build_processors"]

#: Prompt positions whose logits are held at once for prompt_logprobs.
_PROMPT_SLICE = 64


class ModelRunner:
    """Runs plans on a loaded model.

    config must have its automatic values resolved; making a runner allocates the caches, of the
    sizes in `sizing` or of those that fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: Loaded,
        platform: Platform,
        plugins: PluginManager,
        grammars: RequestGrammars,
        sizing: Sizing | None = None,
    ) -> None:
        rows, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        if rows is None or tokens is None:
            raise EngineError("max_num_seqs and max_num_batched_tokens must be resolved first")
        self.model = loaded.model
        eager = config.model.enforce_eager
        self._forward = self.model.forward if eager else loaded.ops.recorded(self.model.forward)
        self.platform = platform
        self.device = platform.device
        self.sizing = sizing = sizing or _size(config, loaded, platform, rows, tokens)
        caches, owners = allocate(self.model.caches, loaded.groups, sizing.blocks, platform)
        planners = GroupPlanner.all(loaded.groups)
        self.capacity = Capacity(
            groups=tuple(
                (g.kind, g.block_size, g.window, blocks)
                for g, blocks in zip(loaded.groups, sizing.blocks, strict=True)
            ),
            vocabulary=loaded.vocabulary,
            max_model_len=sizing.max_model_len,
            notes=sizing.notes,
        )
        self.builder = BatchBuilder(
            planners, caches, owners, rows=rows, tokens=tokens, device=platform.device
        )
        self._grammars = grammars
        self.sampler = Sampler(
            loaded.ops,
            vocabulary=loaded.vocabulary,
            rows=rows,
            device=platform.device,
            mode=config.model.logprobs_mode,
            processors=build_processors(config, loaded.vocabulary, platform.device, plugins),
        )
        pooling = PoolerConfig.from_table(loaded.pooling)
        self.pooler = Pooler(pooling, self._logits, loaded.layers)
        self._invariant = config.model.batch_invariant
        # What looks both ways, or keeps nothing between steps, cannot go token by token.
        self._whole = not all(_forward_only(group) for group in loaded.groups or (None,))
        self._pooling: dict[int, int | None] = {}
        self._prompts: dict[int, tuple[np.ndarray, int]] = {}
        self._failed: dict[int, str] = {}

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        """Run one step. What the model raises fails the step; what one row does wrong does not."""
        began = time.perf_counter()
        self._change_rows(plan)
        if not len(plan.rows):
            return StepResult(step=plan.step, tokens=np.zeros(0, dtype=np.int64))
        ends = np.cumsum(plan.counts)
        places = ends[plan.samples] - 1
        hidden = self._alone(plan) if self._invariant else self._together(plan, places)
        prompt_logprobs = self._prompt_logprobs(plan, ends, hidden) if self._prompts else {}
        pooled = self._pool(plan, ends, hidden) if self._pooling else {}
        rows = plan.rows[plan.samples]
        sampled = self._sample(plan, rows, places, hidden)
        self.builder.last[rows] = tokens = sampled.tokens
        errors = self._errors(plan, sampled) if sampled.errors or self._failed else {}
        accepted = None
        if errors or pooled:
            accepted = (tokens >= 0).astype(np.int32)
            tokens = tokens[tokens >= 0]
        return StepResult(
            step=plan.step,
            tokens=tokens,
            accepted=accepted,
            logprobs={row: (entry,) for row, entry in sampled.logprobs.items()},
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
            errors=errors,
            seconds=time.perf_counter() - began,
        )

    def _together(self, plan: Plan, sample: np.ndarray) -> torch.Tensor:
        """Hidden states [tokens, hidden] of a step; sample: as `BatchBuilder.build` has it."""
        batch = self.builder.build(plan, sample)
        if any(self._pooling.values()):
            types = self._token_types(plan, np.cumsum(plan.counts))
            batch = evolve(batch, extras={"token_types": types})
        # The pooler keeps what it is fed, and recorded steps give their result in one place.
        forward = self.model.forward if self._pooling else self._forward
        return forward(batch)

    def _alone(self, plan: Plan) -> torch.Tensor:
        """The same, in forward passes whose shapes depend on nothing but one row."""
        parts = alone(plan, whole=self._whole)
        return torch.cat([self._together(part, part.counts - 1).clone() for part in parts])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden] -> [n, vocabulary]."""
        if not self._invariant:
            return self.model.logits(hidden)
        rows = (hidden[place : place + 1].clone() for place in range(len(hidden)))
        return torch.cat([self.model.logits(row) for row in rows])

    @torch.inference_mode()
    def check(self) -> int:
        """Run one token through the model, into the null block; how wide embeddings are.

        Raises EngineError if its logits are not finite, so that broken weights end the start and
        not the first request.
        """
        one = np.ones(1, dtype=np.int32)
        nulls = tuple(np.zeros((1, 1), dtype=np.int32) for _ in self.capacity.groups)
        plan = Plan(
            step=-1,
            rows=np.zeros(1, dtype=np.int32),
            starts=np.zeros(1, dtype=np.int32),
            counts=one,
            tokens=np.zeros(1, dtype=np.int64),
            tables=nulls,
            samples=one.astype(bool),
        )
        hidden = self.model.forward(self.builder.build(plan, np.zeros(1, dtype=np.int64)))
        if not bool(self.model.logits(hidden).isfinite().any()):
            raise EngineError(
                "the model gives no finite logits: its weights are broken or the dtype is too "
                "narrow for them (try --dtype float32)"
            )
        return self.pooler.width(hidden)

    def _change_rows(self, plan: Plan) -> None:
        for row in plan.release:
            self._release(row)
        for start in plan.admit:
            self._admit(start)

    def _release(self, row: int) -> None:
        self.builder.last[row] = PENDING
        self._failed.pop(row, None)
        if row in self._pooling:
            del self._pooling[row]
            self.pooler.release(row)
            return
        self._prompts.pop(row, None)
        self.sampler.release(row)

    def _admit(self, start: RowStart) -> None:
        params = start.params
        if isinstance(params, PoolingParams):
            self._pooling[start.row] = params.second_text
            self.pooler.admit(start.row, params, start.prompt)
            return
        if params.prompt_logprobs is not None:
            self._prompts[start.row] = (start.prompt, params.prompt_logprobs)
        constraint = params.structured_outputs
        try:
            grammar = None if constraint is None else self._grammars.of(start, constraint)
            self.sampler.admit(start, params, grammar)
        except Exception as error:
            self.sampler.release(start.row)
            self._failed[start.row] = f"the request could not be started: {error}"[:300]

    def _sample(
        self, plan: Plan, rows: np.ndarray, places: np.ndarray, hidden: torch.Tensor
    ) -> Sampled:
        """The next token of each sampling row; -1 for pooling rows."""
        positions = (plan.starts + plan.counts)[plan.samples]
        if not self._pooling:
            return self._choose(rows, positions, places, hidden)
        generating = np.array([row not in self._pooling for row in rows.tolist()], dtype=bool)
        tokens = np.full(len(rows), -1, dtype=np.int64)
        some = self._choose(rows[generating], positions[generating], places[generating], hidden)
        tokens[generating] = some.tokens
        return Sampled(tokens, some.logprobs, some.errors)

    def _choose(
        self, rows: np.ndarray, positions: np.ndarray, places: np.ndarray, hidden: torch.Tensor
    ) -> Sampled:
        if not len(rows):
            return Sampled(np.zeros(0, dtype=np.int64))
        if len(places) != len(hidden):
            hidden = hidden[torch.from_numpy(places).to(self.device)]
        return self.sampler.sample(rows, positions, self._logits(hidden))

    def _errors(self, plan: Plan, sampled: Sampled) -> dict[int, str]:
        """Remember the rows that failed now, and report all that have failed so far."""
        for row, words in sampled.errors.items():
            self._failed.setdefault(row, words)
        sampling = plan.rows[plan.samples].tolist()
        for place, row in enumerate(sampling):
            if row in self._failed:
                sampled.tokens[place] = -1
        return {row: self._failed[row] for row in plan.rows.tolist() if row in self._failed}

    def _prompt_logprobs(
        self, plan: Plan, ends: np.ndarray, hidden: torch.Tensor
    ) -> dict[int, tuple[RowLogprobs, ...]]:
        found: dict[int, tuple[RowLogprobs, ...]] = {}
        for i, row in enumerate(plan.rows.tolist()):
            if row not in self._prompts:
                continue
            prompt, k = self._prompts[row]
            start, count = int(plan.starts[i]), int(plan.counts[i])
            targets = prompt[start + 1 : start + 1 + count]
            if len(targets):
                states = hidden[ends[i] - count :][: len(targets)]
                found[row] = self._score(states, targets, k)
        return found

    def _score(self, hidden: torch.Tensor, targets: np.ndarray, k: int) -> tuple[RowLogprobs, ...]:
        """hidden: [n, hidden] at the positions before `targets`: [n]; k: -1 for all tokens."""
        best = self.capacity.vocabulary if k == -1 else k
        entries: list[RowLogprobs] = []
        for at in range(0, len(targets), _PROMPT_SLICE):
            logits = self._logits(hidden[at : at + _PROMPT_SLICE]).float()
            entries += self.sampler.gather(logits, targets[at : at + _PROMPT_SLICE], best)
        return tuple(entries)

    def _token_types(self, plan: Plan, ends: np.ndarray) -> torch.Tensor:
        """[tokens] int64: 1 for the tokens of a pair's second text, else 0."""
        types = np.zeros(len(plan.tokens), dtype=np.int64)
        for i, row in enumerate(plan.rows.tolist()):
            second = self._pooling.get(row)
            if second is not None:
                first = ends[i] - plan.counts[i]
                types[first + max(second - int(plan.starts[i]), 0) : ends[i]] = 1
        return torch.from_numpy(types).to(self.device)

    def _pool(self, plan: Plan, ends: np.ndarray, hidden: torch.Tensor) -> dict[int, np.ndarray]:
        finished = []
        for i, row in enumerate(plan.rows.tolist()):
            if row in self._pooling:
                self.pooler.feed(row, hidden[ends[i] - plan.counts[i] : ends[i]])
                finished += [row] if plan.samples[i] else []
        return self.pooler.finish(finished)


def _forward_only(group: CacheGroup | None) -> bool:
    """Whether the group's layers keep what they saw and never look ahead."""
    if group is None:
        return False
    return not isinstance(group.spec, AttentionSpec) or group.spec.causal


def _size(
    config: EngineConfig, loaded: Loaded, platform: Platform, rows: int, tokens: int
) -> Sizing:
    return share_out(
        loaded.groups,
        cache_budget(config, platform),
        max_model_len=loaded.max_model_len,
        chunk=min(tokens, loaded.max_model_len),
        rows=rows,
        override=config.cache.num_gpu_blocks_override,
    )


def build_processors(
    config: EngineConfig, vocabulary: int, device: torch.device, plugins: PluginManager
) -> Processors:
    """Processors of plugins and of the configuration, then the steps that hooks return."""
    classes = processor_classes(config.model.logits_processors, plugins)
    processors = [cls(vocabulary, device) for cls in classes]
    steps = plugins.gather("modulm_logits_steps", config=config, vocabulary=vocabulary)
    return Processors([*processors, *steps])
