"""A step part that drafts trees of tokens and keeps the longest path that the model agrees with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from attrs import evolve

from modulm.contracts.attention import AttentionSpec, StepLayout
from modulm.contracts.executor import Plan
from modulm.contracts.model import Batch
from modulm.contracts.step_part import (
    DIRECT,
    BuiltModel,
    PartPlanner,
    PartRunner,
    PlannerContext,
    RunnerContext,
    StepDraft,
    StepPart,
    Verified,
)
from modulm.errors import ConfigError

#: A tree below a row's last known token: each node's token and its parent, 0 for the last known
#: token and i + 1 for node i. Parents come before their children.
Tree = Sequence[tuple[int, int]]


class TreeDrafts(StepPart):
    """most: nodes of a tree. A subclass says how trees are proposed."""

    name = "tree_drafts"
    api = 1
    masks = True
    most: ClassVar[int] = 8

    def planner(self, context: PlannerContext) -> TreePlanner | None:
        return TreePlanner(self, context) if context.values else None

    def runner(self, built: BuiltModel) -> TreeRunner:
        if built.config.parallel.ranks > 1:
            raise ConfigError(self.name, "only the rank that gives results moves accepted tokens")
        return TreeRunner(self.most)

    def propose(self, history: np.ndarray) -> Tree:
        """The tree below the last of these tokens, [tokens] int32."""
        raise NotImplementedError


class TreePlanner(PartPlanner):
    """Gives each decoding row its tree; what travels is row -> the parents of its nodes."""

    one_at_a_time = True

    def __init__(self, part: TreeDrafts, context: PlannerContext) -> None:
        self._part = part
        self._rows, self._cache = context.rows, context.cache

    def plan(self, step: StepDraft, left: int) -> Mapping[int, list[int]] | None:
        table, rows = self._rows, step.rows
        lengths = table.length[rows]
        decodes = (step.counts == 1) & (step.starts + 1 == lengths)
        trees: dict[int, Tree] = {}
        counts = np.zeros_like(step.starts)
        for place in decodes.nonzero()[0].tolist():
            row, end = int(rows[place]), int(lengths[place])
            most = min(left, self._part.most, int(table.limit[row]) - end - 1)
            tree = self._part.propose(table.tokens[row, :end])[: max(most, 0)]
            if tree:
                trees[row], counts[place] = tree, len(tree)
                left -= len(tree)
        if not trees or not self._cache.grow(rows, step.starts + step.counts + counts):
            return None
        for row, tree in trees.items():
            end = table.length[row]
            table.tokens[row, end : end + len(tree)] = [token for token, _ in tree]
        step.drafted, step.one_each = counts, False
        return {row: [parent for _, parent in tree] for row, tree in trees.items()}


class TreeRunner(PartRunner):
    """Lets each node see its ancestors only, and moves what was accepted up in the cache."""

    def __init__(self, most: int) -> None:
        self.drafts = most
        self._context: RunnerContext | None = None

    def capacity(self) -> Mapping[str, Any]:
        return {"most": self.drafts}

    def open(self, context: RunnerContext) -> None:
        self._context = context

    def recording(self, plan: Plan) -> str | None:
        return DIRECT if _trees(plan) else None

    def amend_layout(self, plan: Plan, spec: AttentionSpec, layout: StepLayout) -> StepLayout:
        if not spec.masks or not _trees(plan):
            return layout
        return evolve(layout, masks={place: _ancestors(t) for place, t in _trees(plan).items()})

    def amend_batch(self, plan: Plan, batch: Batch) -> Batch:
        """The position of a node is its depth."""
        if not _trees(plan):
            return batch
        positions = batch.positions.clone()
        firsts = np.cumsum(plan.counts) - plan.counts
        for place, parents in _trees(plan).items():
            depths = _ancestors(parents).sum(1) - 1 + plan.starts[place]
            first = int(firsts[place])
            positions[first : first + len(depths)] = torch.from_numpy(depths)
        return evolve(batch, positions=positions)

    def verify(
        self,
        plan: Plan,
        rows: np.ndarray,
        positions: np.ndarray,
        logits: torch.Tensor,
        drafts: Sequence[np.ndarray],
    ) -> Verified | None:
        """Let the sampler follow its tokens down each tree; move accepted nodes up in the cache."""
        trees = _trees(plan)
        if not trees or self._context is None:
            return None
        order = {row: place for place, row in enumerate(plan.rows.tolist())}
        places = [order[row] for row in rows.tolist()]
        parents = {index: trees[place] for index, place in enumerate(places) if place in trees}
        verified = self._context.sampler.verify(rows, positions, logits, drafts, parents)
        moves, first, begin = [], 0, 0
        for place, position, tokens, count in zip(
            places, positions, drafts, verified.accepted, strict=True
        ):
            nodes = verified.sources[begin : begin + count] - first
            moves += [
                (place, position - 1 + node, position - 1 + depth)
                for depth, node in enumerate(nodes)
                if node != depth
            ]
            first, begin = first + 1 + len(tokens), begin + count
        if moves:
            self._context.model_builder.copy_tokens(plan, *np.array(moves, dtype=np.int64).T)
        return verified


def _trees(plan: Plan) -> Mapping[int, Sequence[int]]:
    """The trees of a step: place of the row -> parents."""
    trees = plan.parts.get(TreeDrafts.name)
    if not trees:
        return {}
    return {place: trees[row] for place, row in enumerate(plan.rows.tolist()) if row in trees}


def _ancestors(parents: Sequence[int]) -> np.ndarray:
    """[1 + nodes, 1 + nodes] bool: which tokens each one sees, the last known one first."""
    sees = np.eye(1 + len(parents), dtype=bool)
    for node, parent in enumerate(parents, 1):
        sees[node] |= sees[parent]
    return sees
