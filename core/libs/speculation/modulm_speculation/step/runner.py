"""The worker's half: calls the drafter after each step, and disables it if it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from attrs import evolve

from modulm.contracts.drafter import Drafter, DraftStep, Runs
from modulm.contracts.executor import Plan
from modulm.contracts.sampling import SamplingParams
from modulm.contracts.step_part import PartRunner, RunnerContext
from modulm_speculation.adaptive import Adaptive
from modulm_speculation.chain import ModelSpeculator, allocated_tokens

if TYPE_CHECKING:
    from modulm.contracts.executor import RowStart
    from modulm.contracts.model import Batch
    from modulm.contracts.platform import StepSizes
    from modulm.contracts.step_part import BatchFactory, RanStep
    from modulm_speculation.step.shared import SharedDrafter

__all__ = ["DraftRunner"]

log = logging.getLogger("modulm.engine")

T = TypeVar("T")
_FIRST = 256
_NONE = np.zeros(0, dtype=np.int64)


class DraftRunner(PartRunner):
    """Calls a drafter after each step. A drafter that raises is disabled; requests continue.

    shared: the drafter, if all ranks of the model run it together: those that do not sample get the
    step from the first. If it raises, the step fails. sizes: those that the device pads steps to,
    None: it does not. reach: the tokens that block tables of padded steps cover.
    """

    def __init__(
        self, drafter: Drafter, shared: SharedDrafter | None = None,
        sizes: StepSizes | None = None, reach: int = 0,
    ) -> None:  # fmt: skip
        self._drafter: Drafter | None = drafter
        self._shared = shared
        self._sizes, self._reach = sizes, reach
        self._needs = drafter.needs
        self._adaptive = drafter if isinstance(drafter, Adaptive) else None
        inner = drafter.speculator if isinstance(drafter, Adaptive) else drafter
        self._method = (inner if shared is None else shared.drafter).name
        self.caches, self.backends = drafter.caches, drafter.backends
        self.layers = drafter.needs.layers
        self.drafts = drafter.most
        self.ahead = drafter.most if drafter.caches else 0
        self.every = drafter.needs.every or shared is not None
        self.sampled_only = not (drafter.needs.hidden or drafter.needs.layers or shared)
        #: Builds batches with only the drafter's caches, if it has any.
        self._builder: BatchFactory | None = None
        self._context: RunnerContext | None = None
        self._histories: dict[int, tuple[np.ndarray, int]] = {}
        self._limits: dict[int, int] = {}
        #: Rows whose last drafts came from their grammar: those drafts, and the next limit of such.
        self._forced: dict[int, np.ndarray] = {}
        self._forced_limits: dict[int, int] = {}

    def capacity(self) -> Mapping[str, Any]:
        return {"drafts": self.drafts, "ahead": self.ahead, "method": self._method}

    def open(self, context: RunnerContext) -> None:
        self._context, self._builder = context, context.builder
        inner = self._adaptive.speculator if self._adaptive is not None else self._drafter
        if self._sizes is None or context.builder is None or not isinstance(inner, ModelSpeculator):
            return
        empty = tuple(np.zeros((0, 0), np.int32) for _ in context.groups)
        none = np.zeros(0, np.int32)
        plan = Plan(-1, none, none, none, _NONE, empty, np.zeros(0, dtype=bool))
        build = partial(self._padded, context.builder, plan)
        with torch.inference_mode(), context.platform.queue():
            inner.warm_up(build, context.platform.zeros)

    def admit(self, start: RowStart, value: None) -> None:
        params = start.params
        if not isinstance(params, SamplingParams):
            return
        self._extend(start.row, start.prompt, start.output)
        limit = params.speculative
        self._limits[start.row] = self.drafts if limit is None else min(limit, self.drafts)
        prompt = len(start.prompt)
        self._ask(lambda drafter: drafter.admit(start.row, prompt, start.salt))

    def release(self, row: int) -> None:
        if self._histories.pop(row, None) is not None:
            del self._limits[row]
            self._forced.pop(row, None)
            self._forced_limits.pop(row, None)
            self._ask(lambda drafter: drafter.release(row))

    def after(self, step: RanStep) -> dict[int, np.ndarray] | None:
        """Return row -> drafts for its next step: what its grammar determines, and what the drafter
        proposes if it agrees, up to the first token that the grammar forbids.
        """
        context, plan = self._context, step.plan
        if self._shared is not None and not self._shared.group.first:
            self.follow(plan, step.hidden, step.layers)
            return None
        for row, tokens in step.tokens.items():
            self._extend(row, tokens)
        rows = [row for row in step.tokens if self._limits[row]]
        if self._drafter is None or context is None or not (rows or self.every):
            return None
        rests = bool(rows) and self._adaptive is not None and self._adaptive.rest(len(rows))
        proposals = None if rests else self._propose(context, step, rows)
        drafts = {}
        for row, tokens in zip(rows, proposals or [_NONE] * len(rows), strict=True):
            forced = context.sampler.forced(row)[: self._forced_limit(row, step.tokens[row])]
            if len(forced):
                self._forced[row] = drafts[row] = forced
                if len(tokens) > len(forced) and (tokens[: len(forced)] == forced).all():
                    drafts[row] = context.sampler.legal(row, tokens)
            elif len(tokens) and len(legal := context.sampler.legal(row, tokens)):
                drafts[row] = self._beside(row, legal, len(legal) == len(tokens))
        return drafts or None

    def _beside(self, row: int, tokens: np.ndarray, whole: bool) -> np.ndarray:
        """Return a row's drafts, with branches beside them if it has any. whole: all are legal."""
        return tokens

    def _propose(
        self, context: RunnerContext, step: RanStep, rows: Sequence[int]
    ) -> list[np.ndarray] | None:
        """Return the drafter's proposals for `rows`; None if it failed."""
        context.focus(None, None)
        plan = step.plan
        order = plan.rows.tolist()
        accepted = step.lasts if rows == order else step.lasts[[order.index(row) for row in rows]]
        draft = DraftStep(
            rows=rows,
            histories=[self._history(row) for row in rows] if self._needs.histories else [],
            most=[self._limits[row] for row in rows],
            batch=step.batch(),
            accepted=accepted,
            hidden=step.hidden if self._needs.hidden else None,
            layers=step.layers,
        )
        if self._builder is not None or self._shared is not None:
            draft = self._limited(self._with_own(draft, plan, step.lasts, self._following(step)))
        return self._ask(lambda drafter: self._checked(drafter.propose(draft), draft.most))

    def _forced_limit(self, row: int, tokens: np.ndarray) -> int:
        """Return how many drafts of a row may come from its grammar. tokens: its new tokens.

        A text that the grammar determines may have other tokens than the backend expects. Then
        fewer are drafted until they are right again.
        """
        limit = self._limits[row]
        if (drafts := self._forced.pop(row, None)) is not None:
            count = min(len(drafts), len(tokens))
            right = int((drafts[:count] == tokens[:count]).cumprod().sum())
            wider = min(2 * self._forced_limits.get(row, limit), limit)
            self._forced_limits[row] = wider if right == count else max(1, right)
        return self._forced_limits.get(row, limit)

    def follow(self, plan: Plan, hidden: torch.Tensor, layers: Sequence[torch.Tensor]) -> None:
        """Draft with the first rank, which sends what it knows of the step."""
        context, shared = self._context, self._shared
        if shared is None or context is None:
            return
        context.focus(None, None)
        sent, order = shared.receive(len(plan.rows)), plan.rows.tolist()
        rows = [order[place] for place in sent.places]
        if self._needs.histories:
            for place, row in zip(sent.places, rows, strict=True):
                new = int(sent.lengths[place]) - len(self._history(row))
                self._extend(row, sent.tokens[place][sent.tokens.shape[1] - new :])
        draft = DraftStep(
            rows=rows,
            histories=[self._history(row) for row in rows] if self._needs.histories else [],
            most=sent.most[sent.places].tolist(),
            batch=context.model_builder.build(plan, sent.lasts),
            accepted=sent.lasts[sent.places],
            hidden=hidden if self._needs.hidden else None,
            layers=tuple(layers),
        )
        shared.draft(self._with_own(draft, plan, sent.lasts, sent.following))

    def _following(self, step: RanStep) -> np.ndarray:
        """Return the token after each row's last accepted one, -1 where it is unknown: [rows]."""
        plan = step.plan
        ends = self._ends(plan, step.lasts)
        following = np.full(len(ends), -1, dtype=np.int64)
        for index, (row, end) in enumerate(zip(plan.rows.tolist(), ends.tolist(), strict=True)):
            tokens, count = self._histories.get(row, (plan.tokens, 0))
            if end < count:
                following[index] = tokens[end]
        return following

    def _ends(self, plan: Plan, lasts: np.ndarray) -> np.ndarray:
        """Return how many tokens of each row are computed and accepted: [rows]."""
        ends: np.ndarray = plan.starts + lasts - (plan.counts.cumsum() - plan.counts) + 1
        return ends

    def _with_own(
        self, step: DraftStep, plan: Plan, lasts: np.ndarray, following: np.ndarray
    ) -> DraftStep:
        """Add the fields for drafters that run a model of their own."""
        step = evolve(
            step,
            ran=Runs(plan.rows, plan.starts, plan.counts, plan.tokens),
            lasts=lasts,
            following=following,
        )
        if (builder := self._builder) is None:
            return step
        places = {row: index for index, row in enumerate(plan.rows.tolist())}
        return evolve(
            step,
            build_batch=lambda runs: self._build(builder, _plan_of(runs, plan, places), runs),
            tables=[plan.tables[builder.groups[owner].table] for owner in builder.owners],
            sizes=[builder.groups[owner].block_size for owner in builder.owners],
        )

    def _build(self, builder: BatchFactory, plan: Plan, runs: Runs) -> Batch:
        if self._sizes is None:
            return builder.build(plan, self._sample(runs))
        padding = self._sizes.padding(len(plan.rows), len(plan.tokens))
        return self._padded(builder, plan, np.append(plan.counts, padding).astype(np.int32))

    def _padded(self, builder: Any, plan: Plan, counts: np.ndarray) -> Batch:
        """Build a batch with padding rows. counts: [rows] int32, with those of the padding."""
        padded, sample = builder.padded(plan, _NONE, counts, len(counts), self._reach)
        batch: Batch = builder.build(padded, sample)
        return batch

    def _limited(self, step: DraftStep) -> DraftStep:
        """Limit drafts to the free slots of the rows in the drafter's caches."""
        if not step.tables:
            return step
        order = step.ran.rows.tolist()
        at = [order.index(row) for row in step.rows]
        ends = step.ran.starts + step.lasts - (step.ran.lasts - step.ran.counts)
        room = np.min(
            [
                allocated_tokens(table[at], size)
                for table, size in zip(step.tables, step.sizes, strict=True)
            ],
            axis=0,
        )
        return evolve(step, most=np.clip(room - ends[at], 0, step.most).tolist())

    def _sample(self, runs: Runs) -> np.ndarray:
        """Return `sample` of a drafter's batch: all indices of short runs, which are recorded."""
        short = int(runs.counts.max(initial=0)) <= self.drafts + 1
        return np.arange(len(runs.tokens)) if short else runs.lasts

    def _checked(self, proposed: object, most: Sequence[int]) -> list[np.ndarray]:
        """Convert proposals to arrays. Raises ValueError for invalid ones."""
        arrays = [
            each
            if isinstance(each, np.ndarray) and each.dtype == np.int64
            else np.asarray(each).astype(np.int64, casting="safe")
            for each in proposed  # type: ignore[attr-defined]
        ]
        if len(arrays) != len(most) or any(array.ndim != 1 for array in arrays):
            raise ValueError(f"{len(arrays)} proposals for {len(most)} rows, each of one dimension")
        return [array[:limit] for array, limit in zip(arrays, most, strict=True)]

    def _ask(self, question: Callable[[Drafter], T]) -> T | None:
        if self._drafter is None:
            return None
        try:
            return question(self._drafter)
        except Exception:
            if self._shared is not None:
                raise
            log.exception("drafter %s failed and is disabled", self._drafter.name)
            self._drafter = None
            return None

    def _history(self, row: int) -> np.ndarray:
        tokens, count = self._histories[row]
        return tokens[:count]

    def _extend(self, row: int, *parts: np.ndarray) -> None:
        tokens, count = self._histories.get(row, (np.zeros(_FIRST, dtype=np.int64), 0))
        added = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if count + len(added) > len(tokens):
            wider = np.zeros(2 * (count + len(added)), dtype=np.int64)
            wider[:count] = tokens[:count]
            tokens = wider
        tokens[count : count + len(added)] = added
        self._histories[row] = tokens, count + len(added)


def _plan_of(runs: Runs, plan: Plan, places: Mapping[int, int]) -> Plan:
    """Build a plan that runs other tokens of the rows in `plan`."""
    tables = plan.tables
    if runs.rows is not plan.rows:
        at = [places[row] for row in runs.rows.tolist()]
        tables = tuple(table[at] for table in tables)
    return evolve(
        plan,
        rows=runs.rows,
        starts=runs.starts,
        counts=runs.counts,
        tokens=runs.tokens,
        tables=tables,
        drafted=None,
        state_slots=(),
    )
