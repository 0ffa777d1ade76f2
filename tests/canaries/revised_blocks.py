"""A step part that writes text in blocks: all tokens of a block at once, revised in place until the
model is sure of each (block diffusion as in LLaDA, arXiv 2502.09992, and BD3-LM, arXiv 2503.09573).

Blocks begin at multiples of their size. A token sees its whole block and all before it, so what the
cache holds of a block depends on nothing behind it, and prefixes can be found again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from attrs import evolve

from modulm.contracts.attention import AttentionSpec, StepLayout
from modulm.contracts.executor import PartReport, Plan
from modulm.contracts.requests import Request
from modulm.contracts.step_part import (
    BuiltModel,
    PartPlanner,
    PartRunner,
    PlannerContext,
    StepDraft,
    StepPart,
    Verified,
    WaitingRequest,
)
from modulm.errors import ConfigError, RequestError


class RevisedBlocks(StepPart):
    """size: tokens of a block; sure: how many tokens each pass fixes; mask: the token that stands
    for one that is not fixed.
    """

    name = "revised_blocks"
    api = 1
    masks = True
    size: ClassVar[int] = 8
    sure: ClassVar[int] = 3
    mask: ClassVar[int] = 1

    def planner(self, context: PlannerContext) -> BlockPlanner | None:
        return BlockPlanner(self, context) if context.values else None

    def runner(self, built: BuiltModel) -> BlockRunner:
        return BlockRunner(self)


class BlockPlanner(PartPlanner):
    """Runs each row's block until the runner says that it is complete.

    Rows get memory for all of their tokens before they start, so that none is preempted inside a
    block.
    """

    one_at_a_time = True

    def __init__(self, part: RevisedBlocks, context: PlannerContext) -> None:
        (group,) = context.capacity.groups
        rows, self._size, self._mask = context.rows.rows, part.size, part.mask
        if group.block_size % part.size or context.limits.tokens < (2 * rows + 1) * part.size:
            raise ConfigError(
                "max_num_batched_tokens",
                f"blocks of {part.size} tokens need room for two of each row and one more in a "
                "step, and a block size that is a multiple of theirs",
            )
        self._rows, self._cache = context.rows, context.cache
        self._prefill = context.limits.tokens - 2 * rows * part.size
        self._left = self._prefill
        self._longest = context.capacity.max_model_len
        self._unit, self._free = group.block_size, group.blocks - 1
        self._reserved: dict[str, int] = {}
        #: What the blocks of rows hold now, from the row's last known token on.
        self._blocks: dict[int, np.ndarray] = {}
        self._revised: Mapping[int, np.ndarray] = {}

    # Memory.

    def check(self, request: Request) -> None:
        if self._memory(request) > self._free:
            raise RequestError("the cache is too small for this request", "max_tokens")

    def defers(self, waiting: WaitingRequest, before: Sequence[WaitingRequest]) -> bool:
        return sum(self._reserved.values()) + self._memory(waiting.request) > self._free

    def admit(self, waiting: WaitingRequest, row: int) -> None:
        self._reserved[waiting.request.id] = self._memory(waiting.request)

    def finished(self, request: str) -> None:
        self._reserved.pop(request, None)

    def release(self, request: Request, row: int) -> None:
        self._blocks.pop(row, None)

    def _memory(self, request: Request) -> int:
        return -(-request.limit(self._longest) // self._unit)

    # Prompts end a step with a whole block, and the last tokens of one wait for the masks.

    def begin(self, decoding: bool) -> None:
        self._left = self._prefill

    def cut(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        lengths = self._rows.length[rows]
        for place, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            if count:
                counts[place] = self._whole(start, count, int(lengths[place]))

    def limit(self, request: Request, start: int, count: int) -> int:
        return self._whole(start, count, request.prompt_len)

    def _whole(self, start: int, count: int, length: int) -> int:
        last = (length - 1) // self._size * self._size
        if start >= last:
            return count if start + count == length else 0
        count = min(count, self._left, last - start) // self._size * self._size
        self._left -= count
        return count

    # Blocks.

    def plan(self, step: StepDraft, left: int) -> None:
        """Add the open tokens of the blocks of rows whose known tokens all run."""
        table, rows = self._rows, step.rows
        lengths, ends = table.length[rows], step.starts + step.counts
        block_ends = np.minimum(lengths // self._size * self._size + self._size, table.limit[rows])
        drafted = np.where(ends == lengths, block_ends - lengths, 0)
        if not drafted.any():
            return
        if not self._cache.grow(rows, ends + drafted):
            raise ConfigError("num_gpu_blocks_override", "blocks were reserved, and are not there")
        for row, end, count in zip(rows.tolist(), lengths.tolist(), drafted.tolist(), strict=True):
            if count:
                block = self._blocks.setdefault(row, np.full(count, self._mask))
                table.tokens[row, end : end + count] = block
        step.drafted, step.one_each = drafted, False

    def receive(self, plan: Plan, report: PartReport) -> None:
        self._revised = report.value

    def settle(self, rows: np.ndarray, ends: np.ndarray, owners: np.ndarray) -> None:
        """Keep what was revised; a row that was given its block begins the next one."""
        revised, self._revised = self._revised, {}
        given, here = set(owners.tolist()), set(rows.tolist())
        for row in given:
            self._blocks.pop(row, None)
        self._blocks |= {row: block for row, block in revised.items() if row in here - given}


class BlockRunner(PartRunner):
    """Lets tokens see their block, and fixes the tokens of which the model is most sure."""

    def __init__(self, part: RevisedBlocks) -> None:
        self.drafts = part.size
        self._part = part
        self._revised: dict[int, np.ndarray] = {}

    def capacity(self) -> Mapping[str, Any]:
        return {"size": self._part.size}

    def amend_layout(self, plan: Plan, spec: AttentionSpec, layout: StepLayout) -> StepLayout:
        spans = enumerate(zip(plan.starts.tolist(), plan.counts.tolist(), strict=True))
        blocks = {
            place: np.arange(start, start + count) // self._part.size
            for place, (start, count) in spans
            if count > 1
        }
        if not (spec.masks and blocks):
            return layout
        return evolve(layout, masks={p: of[None] <= of[:, None] for p, of in blocks.items()})

    def verify(
        self,
        plan: Plan,
        rows: np.ndarray,
        positions: np.ndarray,
        logits: torch.Tensor,
        drafts: Sequence[np.ndarray],
    ) -> Verified:
        """A block without masks has now been computed as it is: its tokens are given."""
        given, accepted, unfinished, first = [], [], [], 0
        for place, (row, block) in enumerate(zip(rows.tolist(), drafts, strict=True)):
            own = logits[first + 1 : first + 1 + len(block)]
            first += 1 + len(block)
            if (block == self._part.mask).any():
                self._revised[row] = revise(block, own, self._part)
                unfinished.append(place)
            else:
                given.append(block)
            accepted.append(len(block) if place not in unfinished else 0)
        tokens = np.concatenate(given) if given else np.zeros(0, dtype=np.int64)
        return Verified(tokens, np.array(accepted, dtype=np.int32), unfinished=unfinished)

    def report(self) -> dict[int, np.ndarray] | None:
        revised, self._revised = self._revised, {}
        return revised or None


def revise(block: np.ndarray, logits: torch.Tensor, part: RevisedBlocks) -> np.ndarray:
    """The block with its most likely masked tokens fixed. block: [n] int64; logits: [n,
    vocabulary], of each token itself.
    """
    logits = logits.float().clone()
    logits[:, part.mask] = -torch.inf
    sure, tokens = logits.softmax(-1).max(-1)
    sure[torch.from_numpy(block != part.mask)] = -1
    masked = int((block == part.mask).sum())
    chosen = sure.topk(min(part.sure, masked)).indices.numpy()
    revised = block.copy()
    revised[chosen] = tokens.numpy()[chosen]
    return revised
