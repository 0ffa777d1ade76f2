"""The worker's half of drafts in trees (SpecInfer, arXiv 2305.09781; Medusa, arXiv 2401.10774).

A row's drafts lie behind its last known token in the cache: a chain of drafts, then branches that
leave it. Each sees its ancestors only. Those that are accepted are moved up, so that they are
consecutive, like single steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """Verifies trees. A parent is 0 for the last known token and i + 1 for draft i.

    argmax: the op, since torch's takes a tenth of a step.
    """

    def __init__(
        self, drafter: Adaptive | Speculator, argmax: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__(drafter)
        self._argmax = argmax
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
        """Follow the most likely tokens down each tree; the sampler decides about that path."""
        self._moved = None
        trees, context = _trees(plan), self._context
        if not trees or context is None:
            return None
        best = self._argmax(logits).tolist()
        order = {row: place for place, row in enumerate(plan.rows.tolist())}
        places = [order[row] for row in rows.tolist()]
        paths, kept, chosen, first = [], [], [], 0
        for place, tokens in zip(places, drafts, strict=True):
            path = _path(best[first:], tokens, trees.get(place))
            paths.append(path)
            kept += [first + node for node in path]
            chosen.append(tokens[np.array(path[1:], dtype=np.int64) - 1])
            first += 1 + len(tokens)
        own = logits if len(kept) == len(logits) else logits[kept]
        verified = context.sampler.verify(rows, positions, own, chosen)
        moves = [
            (place, position - 1 + node, position + depth)
            for place, position, path, count in zip(
                places, positions.tolist(), paths, verified.accepted.tolist(), strict=True
            )
            for depth, node in enumerate(path[1:count])
            if node != depth + 1
        ]
        if moves:
            rows_of, sources, targets = np.array(moves, dtype=np.int64).T
            context.model_builder.copy_tokens(plan, rows_of, sources, targets)
            firsts = (np.cumsum(plan.counts) - plan.counts - plan.starts)[rows_of]
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


def _path(best: Sequence[int], tokens: np.ndarray, parents: Sequence[int] | None) -> list[int]:
    """Return the nodes from the last known token on, each the most likely one after the one before
    it. Rows without a tree keep all drafts: the sampler compares them.
    """
    if parents is None:
        return list(range(1 + len(tokens)))
    children = {(parent, int(tokens[node - 1])): node for node, parent in enumerate(parents, 1)}
    path = [0]
    while (node := children.get((path[-1], best[path[-1]]))) is not None:
        path.append(node)
    return path
