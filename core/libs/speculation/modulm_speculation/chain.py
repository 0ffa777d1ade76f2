"""Drafts tokens one by one with a drafter's own model, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from attrs import evolve

from modulm.contracts.drafter import DraftStep, Needs, Runs
from modulm_speculation.speculator import Branch, Options, Speculator, single_branches

if TYPE_CHECKING:
    from torch import Tensor

    from modulm.contracts.attention import AttentionBackend, AttentionSpec
    from modulm.contracts.model import Batch, CacheSpec
    from modulm_speculation.draft_model import DraftModel

__all__ = [
    "HIDDEN", "HiddenChain", "ModelSpeculator", "allocated_tokens", "ends_of", "lengthened",
]  # fmt: skip

#: Key in `Batch.extras` of the hidden states that a head continues from: [tokens, hidden].
HIDDEN = "hidden"


class ModelSpeculator(Speculator):
    """A speculator with its own model, whose caches are in the rows' blocks."""

    def __init__(self, config: Options, draft: DraftModel) -> None:
        super().__init__(config)
        self.draft = draft
        self.trees = bool(getattr(config, "trees", False))
        self._branches: list[Sequence[Branch]] = []

    def branches(self) -> Sequence[Sequence[Branch]]:
        return self._branches

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return self.draft.caches

    @property
    def backends(self) -> Mapping[AttentionSpec, AttentionBackend]:
        return self.draft.backends

    def run(self, batch: Batch, states: Tensor, ahead: int) -> Tensor:
        """Run a batch over the draft's caches and return hidden states [tokens, hidden].

        states: hidden states that the rows continue from. ahead: index of the draft that the
        batch's tokens are, from 1; 0 for tokens of the target.
        """
        return self.draft.run(batch)

    @property
    def chosen_at_once(self) -> int:
        """The most tokens of a row that are chosen from the states of one batch."""
        return 1

    def warm_up(
        self, build_batch: Callable[[np.ndarray], Batch], zeros: Callable[..., Tensor]
    ) -> None:
        """Run the steps of `DraftModel.steps`, whose programs the device compiles.

        build_batch: builds a batch in null blocks from the tokens of each row. zeros: allocates on
        the device.
        """
        for counts in self.draft.steps:
            batch = build_batch(counts)
            most = self.chosen_at_once * len(counts)
            sizes = [len(counts)] if most == len(counts) else list(self.draft.samples(most))
            for extras in self.example_inputs(len(batch.tokens), len(counts), zeros):
                states = self.draft.run(evolve(batch, extras=extras))
                for size in sizes:
                    self.draft.choose(states[torch.zeros(size, dtype=torch.int64)])

    def example_inputs(
        self, tokens: int, rows: int, zeros: Callable[..., Tensor]
    ) -> Sequence[Mapping[str, Tensor]]:
        """Return all kinds of `Batch.extras` that a batch may have."""
        return ({},)

    def follow(
        self, step: DraftStep, states: Tensor, ends: np.ndarray, first: int
    ) -> list[np.ndarray]:
        """Draft greedily for the step's rows. With `trees`, the second choice for each token is a
        branch.

        states: [rows, hidden], from which the first draft is chosen. ends: [rows], tokens that the
        target has computed. first: offset from `ends` of the position at which the first draft is
        run to choose the second.
        """
        rows = np.asarray(step.rows)
        most = np.clip(self.draft.max_length - ends, 0, step.most)
        drafts = np.zeros((len(rows), int(most.max(initial=0))), dtype=np.int64)
        seconds = np.zeros_like(drafts)
        chosen: list[tuple[np.ndarray, Tensor]] = []
        others: list[Tensor] = []
        at = np.arange(len(rows))
        for ahead in range(drafts.shape[1]):
            going = most[at] > ahead
            tokens = chosen[-1][1] if chosen else states
            if not going.all():
                left = torch.from_numpy(going.nonzero()[0]).to(states.device)
                at, states, tokens = at[going], states[left], tokens[left]
            if ahead:
                runs = _singles(rows[at], ends[at] + first + ahead - 1)
                batch = step.build_batch(runs)
                tokens = lengthened(tokens, len(batch.tokens))
                states = self.run(evolve(batch, tokens=tokens), states, ahead)[: len(at)]
            if self.trees:
                first_choice, second = self.draft.choose_two(states)
                chosen.append((at, first_choice))
                others.append(second)
            else:
                chosen.append((at, self.draft.choose(states)))
        for ahead, (at, tokens) in enumerate(chosen):
            drafts[at, ahead] = tokens.cpu().numpy()
        for ahead, second in enumerate(others):
            seconds[chosen[ahead][0], ahead] = second.cpu().numpy()
        if self.trees:
            self._branches = [
                single_branches(row[:count])
                for row, count in zip(seconds, most.tolist(), strict=True)
            ]
        return [row[:count] for row, count in zip(drafts, most.tolist(), strict=True)]


class HiddenChain(ModelSpeculator):
    """A head that continues from the target's hidden states, then from its own.

    Its input at each position is the hidden state there, `Batch.extras[HIDDEN]`, and the token
    after it, in `Batch.tokens`. It sees every step, so that its cache covers the same tokens as the
    target's. `draft.run` returns the states that the next position continues from, `draft.choose`
    the tokens.
    """

    needs: ClassVar[Needs] = Needs(histories=False, hidden=True, every=True)

    def hidden(self, step: DraftStep) -> Tensor:
        """Return the target's states that the head uses: [tokens of the step, hidden]."""
        if step.hidden is None:
            raise ValueError("the step has no hidden states")
        return step.hidden

    def inputs(self, step: DraftStep) -> Mapping[str, Tensor]:
        """Return the `Batch.extras` of the batch of the step's own tokens."""
        return {HIDDEN: self.hidden(step)}

    @property
    def width(self) -> int:
        """The size of the states that the head continues from."""
        width: int = self.draft.model.config.hidden_size  # type: ignore[attr-defined]
        return width

    def example_inputs(
        self, tokens: int, rows: int, zeros: Callable[..., Tensor]
    ) -> Sequence[Mapping[str, Tensor]]:
        dtype = getattr(torch, self.draft.loaded.dtype)
        return ({HIDDEN: zeros((tokens, self.width), dtype)},)

    def run(self, batch: Batch, states: Tensor, ahead: int) -> Tensor:
        extras = {HIDDEN: lengthened(states, len(batch.tokens))}
        return self.draft.run(evolve(batch, extras=extras))

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        ran = step.ran
        tokens = np.append(ran.tokens[1:], 0)
        tokens[step.lasts] = step.following
        shifted = Runs(ran.rows, ran.starts, ran.counts, np.maximum(tokens, 0))
        batch, inputs = step.build_batch(shifted), self.inputs(step)
        if HIDDEN in inputs:
            states = self.run(batch, inputs[HIDDEN], 0)
        else:
            count = len(batch.tokens)
            inputs = {name: lengthened(part, count) for name, part in inputs.items()}
            states = self.draft.run(evolve(batch, extras=inputs))
        if not any(step.most):
            self._branches = [()] * len(step.rows)
            return [np.zeros(0, dtype=np.int64)] * len(step.rows)
        indices = torch.from_numpy(np.asarray(step.accepted, dtype=np.int64)).to(states.device)
        return self.follow(step, states[indices], ends_of(step), 0)


def ends_of(step: DraftStep) -> np.ndarray:
    """Return how many tokens of each row the target has computed: [rows of the step]."""
    ran = step.ran
    ends = ran.starts + ran.counts + step.lasts - ran.lasts
    places = {row: index for index, row in enumerate(ran.rows.tolist())}
    computed: np.ndarray = ends[[places[row] for row in step.rows]]
    return computed


def allocated_tokens(table: np.ndarray, size: int) -> np.ndarray:
    """Return the tokens that each row has blocks for: [rows]. table: [rows, blocks]."""
    used = table.shape[1] - (table[:, ::-1] != 0).argmax(axis=1)
    room: np.ndarray = np.where(table.any(axis=1), used, 0) * size
    return room


def lengthened(tensor: Tensor, length: int) -> Tensor:
    """Append rows to a tensor of a batch that is padded."""
    more = length - len(tensor)
    if not more:
        return tensor
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, more))


def _singles(rows: np.ndarray, positions: np.ndarray) -> Runs:
    """Build runs of one token per row; the tokens are known only on the device."""
    count = len(rows)
    return Runs(rows, positions, np.ones(count, np.int32), np.zeros(count, np.int64))
