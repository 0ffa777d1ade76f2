"""Move experts between ranks to balance their load (`--enable-eplb`).

Each rank sees all tokens of a step, so all compute the same counts and decisions without
communication. Weights move when their layer runs, before it computes.
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

#: Maximum tensors of an expert in a stack.
_PIECES = 4

log = logging.getLogger("modulm.eplb")


class BalancedExperts:
    """The balanced experts of all layers (`Mesh.spread`)."""

    def __init__(self, group: ProcessGroup, config: EplbConfig) -> None:
        self._group, self._config = group, config
        self._layers: list[_Layer] = []
        if config.log_balancedness:
            log.setLevel(logging.INFO)

    def layer(self, fused: Callable[..., Tensor], shard: Shard, name: str) -> Callable[..., Tensor]:
        """Wrap `fused` for the experts of one layer, of which this rank loads `shard`."""
        self._layers.append(_Layer(name, shard.total, self._group, self._config))
        return partial(self._layers[-1], fused)

    def report(self) -> np.ndarray | None:
        """Return [experts] int64: tokens that chose each since the last report, in all layers."""
        if not self._layers:
            return None
        counts = [layer.reported for layer in self._layers]
        total = torch.nn.utils.rnn.pad_sequence(counts).sum(1).cpu().numpy()
        for one in counts:
            one.zero_()
        counted: np.ndarray = total
        return counted


class _Layer:
    """The experts of one layer: the slots of each, and the tokens that chose it."""

    def __init__(self, name: str, experts: int, group: ProcessGroup, config: EplbConfig) -> None:
        self._name, self._group, self._config = name, group, config
        spare = config.num_redundant_experts // group.size
        self._placed = first_placement(experts, group.size, spare)
        self._steps = 0
        self._is_ready = False
        self._recent = torch.zeros(config.window_size, experts, dtype=torch.int32)
        self._counts = torch.zeros(experts, dtype=torch.int64)  # of `recent`
        #: Tokens since the last report.
        self.reported = torch.zeros(experts, dtype=torch.int64)
        #: Slots of each expert [experts, max copies]; number of copies [experts].
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
        """Compute the experts in this rank's slots: [tokens, hidden], a partial sum."""
        biases = [more[name] for name in ("gate_up_bias", "down_bias") if more[name] is not None]
        if not self._is_ready:  # the warm-up pass, whose tokens do not count
            self._begin([*stacks, *biases], ids.device)
        else:
            if self._steps and self._steps % self._config.step_interval == 0:
                self._balance([*stacks, *biases], ids.device)
            self._count(ids)
        slots = self._placed.shape[1]
        slots_of_tokens = self._choose_slots(x, ids) - self._group.rank * slots
        here = (slots_of_tokens >= 0) & (slots_of_tokens < slots)
        return fused(x, weights * here, slots_of_tokens.where(here, 0), *stacks, **more)

    def _count(self, ids: Tensor) -> None:
        chosen = ids.flatten().long()
        now = torch.zeros_like(self._counts).scatter_add_(0, chosen, torch.ones_like(chosen))
        oldest = self._recent[self._steps % len(self._recent)]
        self._counts += now - oldest
        oldest.copy_(now)
        self.reported += now
        self._steps += 1

    def _choose_slots(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the slots for the experts `ids`. If an expert has copies, a hash of the token's
        values picks one, so that results do not depend on the rest of the step.
        """
        copies = self._copies[ids]
        hashes = x[:, :16].contiguous().view(torch.uint8).sum(-1, dtype=torch.int64)
        return self._slots[ids, hashes[:, None] % copies]

    def _begin(self, stacks: Sequence[Any], device: torch.device) -> None:
        """Allocate and fill the slots for copies."""
        self._is_ready = True
        self._recent, self._counts = self._recent.to(device), self._counts.to(device)
        self.reported = self.reported.to(device)
        ranks, slots = self._placed.shape
        own_experts = len(self._counts) // ranks
        for stack in stacks:
            _grow(stack, slots, self._name)
        self._check(stacks)
        empty = self._placed.copy()
        empty[:, own_experts:] = -1
        self._move(empty, self._placed, stacks)
        self._index_slots(device)

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
        self._index_slots(device)

    def _check(self, stacks: Sequence[Any]) -> None:
        """Raise UnsupportedError if ranks hold their experts in different formats."""
        sizes = torch.zeros(1, len(stacks) * _PIECES, dtype=torch.int64)
        for number, stack in enumerate(stacks):
            for index, piece in enumerate(_memory(stack, 0)):
                sizes[0, number * _PIECES + index] = piece.nbytes
        every = self._group.all_gather(sizes).view(self._group.size, -1)
        if bool((every != every[0]).any()):
            raise UnsupportedError(
                f"enable_eplb: {self._name}: experts cannot move, because only some ranks have "
                "zero points"
            )

    def _index_slots(self, device: torch.device) -> None:
        """Index the slots of each expert: [experts, max copies], and the number of copies."""
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
        """Exchange the weights of slots whose expert changes, in the same order on all ranks."""
        rank, coming = self._group.rank, []
        for to, slot in zip(*np.nonzero(before != after), strict=True):
            expert = after[to, slot]
            holders = np.nonzero((before == expert).any(1))[0]
            source = to if to in holders else holders[to % len(holders)]
            at = int(np.nonzero(before[source] == expert)[0][0])
            if rank == source == to:
                pieces_of_stacks = [
                    [piece.clone() for piece in _memory(stack, at)] for stack in stacks
                ]
                coming.append((int(slot), pieces_of_stacks))
            elif rank == source:
                for stack in stacks:
                    for piece in _memory(stack, at):
                        self._group.send(piece, int(to))
            elif rank == to:
                # Empty slots have the shapes of filled ones.
                received = [
                    [self._group.recv(like, int(source)) for like in _memory(stack, int(slot))]
                    for stack in stacks
                ]
                coming.append((int(slot), received))
        for slot, pieces_of_stacks in coming:
            for stack, pieces in zip(stacks, pieces_of_stacks, strict=True):
                _put(stack, slot, pieces)


def _grow(stack: Any, slots: int, name: str) -> None:
    if isinstance(stack, Tensor):
        more = stack.new_zeros(slots - len(stack), *stack.shape[1:])
        stack.data = torch.cat([stack.data, more]) if len(more) else stack.data
    elif hasattr(stack, "grow"):
        stack.grow(slots)
    else:
        raise UnsupportedError(
            f"enable_eplb: {name}: experts held as {type(stack).__name__} cannot move: not "
            "supported yet"
        )


def _memory(stack: Any, slot: int) -> tuple[Tensor, ...]:
    return (stack[slot],) if isinstance(stack, Tensor) else stack.memory(slot)


def _put(stack: Any, slot: int, pieces: Sequence[Tensor]) -> None:
    if isinstance(stack, Tensor):
        stack.data[slot] = pieces[0]
    else:
        stack.put(slot, pieces)
