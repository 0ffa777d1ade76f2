"""Experts that move between the ranks they are spread over (`--enable-eplb`).

Each rank sees all tokens of a step, so all count alike and decide alike, without asking one
another. Weights move inside a layer's own turn, before it computes.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from modulm.contracts.quantization import MovableStack
from modulm.errors import UnsupportedError
from modulm_distributed.placement import balancedness, first_placement, placement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from modulm.contracts.quantization import Shard
    from modulm.parallel import ProcessGroup
    from modulm_distributed.eplb import EplbConfig

__all__ = ["BalancedExperts", "MovableStack"]

#: Tensors that an expert of a stack has at most.
_PIECES = 4

log = logging.getLogger("modulm.eplb")


class BalancedExperts:
    """What layers with experts have in common: `Mesh.spread`."""

    def __init__(self, group: ProcessGroup, config: EplbConfig) -> None:
        self._group, self._config = group, config
        self._layers: list[_Layer] = []
        if config.log_balancedness:
            log.setLevel(logging.INFO)

    def layer(self, fused: Callable[..., Tensor], own: Shard, name: str) -> Callable[..., Tensor]:
        """`fused` for one layer's experts, of which this rank loads `own`."""
        self._layers.append(_Layer(name, own.whole, self._group, self._config))
        return partial(self._layers[-1], fused)

    def report(self) -> np.ndarray | None:
        """[experts] int64: tokens that chose each since the last report, in all layers."""
        if not self._layers:
            return None
        counts = [layer.told for layer in self._layers]
        total = torch.nn.utils.rnn.pad_sequence(counts).sum(1).cpu().numpy()
        for one in counts:
            one.zero_()
        found: np.ndarray = total
        return found


class _Layer:
    """One layer's experts: who is where, and how many tokens chose each."""

    def __init__(self, name: str, experts: int, group: ProcessGroup, config: EplbConfig) -> None:
        self._name, self._group, self._config = name, group, config
        spare = config.num_redundant_experts // group.size
        self._placed = first_placement(experts, group.size, spare)
        self._steps = 0
        self._begun = False
        self._recent = torch.zeros(config.window_size, experts, dtype=torch.int32)
        self._counts = torch.zeros(experts, dtype=torch.int64)  # of `recent`
        #: Tokens since the last report.
        self.told = torch.zeros(experts, dtype=torch.int64)
        #: [experts, most copies]: where each is; [experts]: how many it has.
        self._slots = self._copies = torch.empty(0, dtype=torch.int64)

    def __call__(
        self,
        fused: Callable[..., Tensor],
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        *stacks: Any,
        **more: Any,
    ) -> Tensor:
        """What the experts in this rank's slots add: [tokens, hidden], a part of the sum."""
        biases = [more[name] for name in ("gate_up_bias", "down_bias") if more[name] is not None]
        if not self._begun:  # when the engine tries the model: what it asks does not count
            self._begin([*stacks, *biases], ids.device)
        else:
            if self._steps and self._steps % self._config.step_interval == 0:
                self._balance([*stacks, *biases], ids.device)
            self._count(ids)
        slots = self._placed.shape[1]
        places = self._chosen(x, ids) - self._group.rank * slots
        here = (places >= 0) & (places < slots)
        return fused(x, weights * here, places.where(here, 0), *stacks, **more)

    def _count(self, ids: Tensor) -> None:
        chosen = ids.flatten().long()
        now = torch.zeros_like(self._counts).scatter_add_(0, chosen, torch.ones_like(chosen))
        place = self._recent[self._steps % len(self._recent)]
        self._counts += now - place
        place.copy_(now)
        self.told += now
        self._steps += 1

    def _chosen(self, x: Tensor, ids: Tensor) -> Tensor:
        """Slots for the experts `ids`. Where an expert is held more than once a token's own numbers
        say which copy it takes, so that an answer does not depend on what else is in the step.
        """
        copies = self._copies[ids]
        own = x[:, :16].contiguous().view(torch.uint8).sum(-1, dtype=torch.int64)
        return self._slots[ids, own[:, None] % copies]

    def _begin(self, stacks: Sequence[Any], device: torch.device) -> None:
        """Make room for copies, and fill it."""
        self._begun = True
        self._recent, self._counts = self._recent.to(device), self._counts.to(device)
        self.told = self.told.to(device)
        ranks, slots = self._placed.shape
        own = len(self._counts) // ranks
        for stack in stacks:
            _grow(stack, slots, self._name)
        self._check(stacks)
        empty = self._placed.copy()
        empty[:, own:] = -1
        self._move(empty, self._placed, stacks)
        self._settle(device)

    def _balance(self, stacks: Sequence[Any], device: torch.device) -> None:
        counts = self._counts.cpu().numpy()
        before, self._placed = self._placed, placement(counts, self._placed)
        if self._config.log_balancedness and self._group.first:
            log.info(
                "%s: balancedness %.3f, with %d experts moved %.3f", self._name,
                balancedness(counts, before), int((before != self._placed).sum()),
                balancedness(counts, self._placed),
            )  # fmt: skip
        self._move(before, self._placed, stacks)
        self._settle(device)

    def _check(self, stacks: Sequence[Any]) -> None:
        """Raises UnsupportedError where ranks hold their experts in different forms."""
        sizes = torch.zeros(1, len(stacks) * _PIECES, dtype=torch.int64)
        for number, stack in enumerate(stacks):
            for place, piece in enumerate(_memory(stack, 0)):
                sizes[0, number * _PIECES + place] = piece.nbytes
        every = self._group.all_gather(sizes).view(self._group.size, -1)
        if bool((every != every[0]).any()):
            raise UnsupportedError(
                f"enable_eplb: {self._name}: ranks hold experts in different forms, so they cannot "
                "move: only some have zero points"
            )

    def _settle(self, device: torch.device) -> None:
        """Note where each expert is: slots [experts, most copies] and how many it has."""
        flat = self._placed.ravel()
        copies = np.bincount(flat, minlength=len(self._counts))
        slots = np.zeros((len(copies), copies.max()), dtype=np.int64)
        seen = np.zeros_like(copies)
        for slot, expert in enumerate(flat):
            slots[expert, seen[expert]] = slot
            seen[expert] += 1
        self._slots = torch.from_numpy(slots).to(device)
        self._copies = torch.from_numpy(copies).to(device)

    def _move(self, before: np.ndarray, after: np.ndarray, stacks: Sequence[Any]) -> None:
        """Exchange the weights of slots whose expert is another one, all ranks in one order."""
        rank, coming = self._group.rank, []
        for to, slot in zip(*np.nonzero(before != after), strict=True):
            expert = after[to, slot]
            holders = np.nonzero((before == expert).any(1))[0]
            source = to if to in holders else holders[to % len(holders)]
            at = int(np.nonzero(before[source] == expert)[0][0])
            if rank == source == to:
                held = [[piece.clone() for piece in _memory(stack, at)] for stack in stacks]
                coming.append((int(slot), held))
            elif rank == source:
                for stack in stacks:
                    for piece in _memory(stack, at):
                        self._group.send(piece, int(to))
            elif rank == to:
                # Empty slots are like those that hold something.
                given = [
                    [self._group.recv(like, int(source)) for like in _memory(stack, int(slot))]
                    for stack in stacks
                ]
                coming.append((int(slot), given))
        for slot, held in coming:
            for stack, pieces in zip(stacks, held, strict=True):
                _put(stack, slot, pieces)


def _grow(stack: Any, slots: int, name: str) -> None:
    if isinstance(stack, Tensor):
        more = stack.new_zeros(slots - len(stack), *stack.shape[1:])
        stack.data = torch.cat([stack.data, more]) if len(more) else stack.data
    elif hasattr(stack, "grow"):
        stack.grow(slots)
    else:
        raise UnsupportedError(
            f"enable_eplb: {name}: experts held as {type(stack).__name__} cannot move: not yet"
        )


def _memory(stack: Any, slot: int) -> tuple[Tensor, ...]:
    return (stack[slot],) if isinstance(stack, Tensor) else stack.memory(slot)


def _put(stack: Any, slot: int, pieces: Sequence[Tensor]) -> None:
    if isinstance(stack, Tensor):
        stack.data[slot] = pieces[0]
    else:
        stack.put(slot, pieces)
