"""The worker's half of drafts in trees (SpecInfer, arXiv 2305.09781; Medusa, arXiv 2401.10774).

A row's drafts lie behind its last known token in the cache: a chain of drafts, then branches that
leave it. Each sees its ancestors only. Those that are accepted are moved up, so that they are
consecutive, like single steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import evolve

from modulm.contracts.attention import AttentionSpec, StepLayout
from modulm.contracts.step_part import RunnerContext, Verified
from modulm_speculation.adaptive import Adaptive
from modulm_speculation.speculator import Branch, Speculator
from modulm_speculation.step.runner import DraftRunner

if TYPE_CHECKING:
    from modulm.contracts.executor import Plan
    from modulm.contracts.model import Batch
    from modulm.contracts.step_part import RanStep

__all__ = ["TreeRunner"]

#: Name of the step part, whose values in a plan are row -> parents of its drafts.
_PART = "drafts"


class TreeRunner(DraftRunner):
    """Verifies trees. A parent is 0 for the last known token and i + 1 for draft i."""

    def __init__(self, drafter: Adaptive | Speculator) -> None:
        super().__init__(drafter)
        #: The last plan, and what the tokens of its trees see, by place of the row.
        self._seen: tuple[Plan | None, Mapping[int, np.ndarray]] = (None, {})
        self._beside_of: dict[int, Sequence[Branch]] = {}
        self._trees = drafter
        #: Of the last step: indices in the batch of accepted nodes of branches, and those that
        #: they would have in a chain.
        self._moved: tuple[np.ndarray, np.ndarray] | None = None

    def after(self, step: RanStep) -> dict[int, np.ndarray] | None:
        moved, self._moved = self._moved, None
        if moved is not None and (self.caches or self.layers or self._needs.hidden):
            step = _in_chains(step, *moved)
        return super().after(step)

    def _propose(
        self, context: RunnerContext, step: RanStep, rows: Sequence[int]
    ) -> list[np.ndarray] | None:
        proposed = super()._propose(context, step, rows)
        found = self._trees.branches() if proposed is not None else ()
        self._beside_of = dict(zip(rows, found, strict=False))
        return proposed

    def _beside(self, row: int, tokens: np.ndarray, whole: bool) -> np.ndarray:
        branches = self._beside_of.get(row, ()) if whole else ()
        left = self._limits[row] - len(tokens)
        tree = [tokens]
        parents = [np.arange(len(tokens))]
        for depth, others in branches:
            count = min(len(others), left)
            if count > 0 and depth <= len(tokens):
                first = sum(map(len, tree))
                tree.append(others[:count])
                parents.append(np.append(depth, np.arange(first + 1, first + count)))
                left -= count
        if len(tree) == 1:
            return tokens
        return np.stack([np.concatenate(tree), np.concatenate(parents)])

    def amend_layout(self, plan: Plan, spec: AttentionSpec, layout: StepLayout) -> StepLayout:
        masks = self._masks(plan)
        return evolve(layout, masks=masks) if masks and spec.masks else layout

    def amend_batch(self, plan: Plan, batch: Batch) -> Batch:
        """Give each draft the position of its depth."""
        masks = self._masks(plan)
        if not masks:
            return batch
        positions = batch.positions.clone()
        firsts = np.cumsum(plan.counts) - plan.counts
        for place, sees in masks.items():
            depths = sees.sum(1) - 1 + plan.starts[place]
            first = int(firsts[place])
            positions[first : first + len(depths)] = batch.positions.new_tensor(depths)
        return evolve(batch, positions=positions)

    def _masks(self, plan: Plan) -> Mapping[int, np.ndarray]:
        """Return place of a row with a tree -> which of its tokens each one sees."""
        if self._seen[0] is not plan:
            seen = {place: _ancestors(tree) for place, tree in _trees(plan).items()}
            self._seen = plan, seen
        return self._seen[1]

    def verify(
        self,
        plan: Plan,
        rows: np.ndarray,
        positions: np.ndarray,
        logits: torch.Tensor,
        drafts: Sequence[np.ndarray],
    ) -> Verified | None:
        """Let the sampler follow its tokens down each tree; move accepted nodes up in the cache."""
        self._moved = None
        trees, context = _trees(plan), self._context
        if not trees or context is None:
            return None
        order = {row: place for place, row in enumerate(plan.rows.tolist())}
        places = np.array([order[row] for row in rows.tolist()], dtype=np.int64)
        parents = {
            index: trees[place] for index, place in enumerate(places.tolist()) if place in trees
        }
        verified = context.sampler.verify(rows, positions, logits, drafts, parents)
        if verified.sources is None:
            raise TypeError("trees of drafts need a sampler that says where it chose each token")
        counts, sizes = verified.accepted, np.array([1 + len(tokens) for tokens in drafts])
        owners = np.repeat(np.arange(len(rows)), counts)
        nodes = verified.sources - (sizes.cumsum() - sizes)[owners]
        depths = np.arange(len(owners)) - (counts.cumsum() - counts)[owners]
        moved = nodes != depths
        if moved.any():
            at = owners[moved]
            known = positions[at].astype(np.int64) - 1
            sources, targets = known + nodes[moved], known + depths[moved]
            context.model_builder.copy_tokens(plan, places[at], sources, targets)
            firsts = (np.cumsum(plan.counts) - plan.counts - plan.starts)[places[at]]
            self._moved = firsts + sources, firsts + targets
        return verified


def _in_chains(step: RanStep, sources: np.ndarray, targets: np.ndarray) -> RanStep:
    """Return a step in which accepted nodes of branches follow those before them, as in a chain.

    sources, targets: indices in the batch.
    """
    order = np.arange(len(step.plan.tokens))
    order[targets] = sources
    index = torch.from_numpy(order).to(step.hidden.device)
    return evolve(
        step,
        plan=evolve(step.plan, tokens=step.plan.tokens[order]),
        hidden=step.hidden[index],
        layers=tuple(states[index] for states in step.layers),
    )


def _trees(plan: Plan) -> Mapping[int, Sequence[int]]:
    """Return place of a row in the step -> the parents of its drafts."""
    trees = plan.parts.get(_PART)
    if not trees:
        return {}
    return {place: trees[row] for place, row in enumerate(plan.rows.tolist()) if row in trees}


def _ancestors(parents: Sequence[int]) -> np.ndarray:
    """Return which tokens each one sees, the last known one first: [1 + n, 1 + n] bool."""
    sees = np.eye(1 + len(parents), dtype=bool)
    for node, parent in enumerate(parents, 1):
        sees[node] |= sees[parent]
    return sees
