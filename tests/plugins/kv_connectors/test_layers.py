"""Blocks that are saved layer by layer, while the step that computes them runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from modulm.contracts.connector import BlockTransfer, TransferPlan
from modulm.testing.connectors import FakeConnector
from modulm_kv_transfer.layers import BlockWriter, LayeredMover
from modulm_kv_transfer.part import TransfersPart
from modulm_kv_transfer.remote import LayeredPlan

SAVE = BlockTransfer(1, "a", (b"x", b"y"), ((2, 3),))


class Writer(BlockWriter):
    """Keeps what it is asked to do, and rows of bytes."""

    def __init__(self, mover: Mover, transfer: BlockTransfer) -> None:
        self.mover, self.blocks = mover, transfer.blocks
        self.rows = torch.zeros((len(transfer.names), mover.copier.width), dtype=torch.uint8)

    def write(self, tensors: Sequence[int]) -> None:
        if self.mover.broken:
            raise OSError("no room")
        self.mover.copier.save(self.blocks, list(self.rows), tensors)
        self.mover.events.append(list(tensors))

    def end(self, *, worked: bool) -> None:
        self.mover.events.append("stored" if worked else "discarded")


class Mover(LayeredMover):
    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.events: list[Any] = []
        self.writers: list[Writer] = []

    def writer(self, transfer: BlockTransfer) -> BlockWriter:
        self.writers.append(Writer(self, transfer))
        return self.writers[-1]

    def save(self, transfer: BlockTransfer) -> None: ...

    def load(self, transfer: BlockTransfer) -> None: ...

    def outcome(self) -> tuple[tuple[int, ...], tuple[tuple[int, str], ...]]:
        """Wait for the transfer; return `done` and `failed`."""
        while True:
            result = self.ended()
            if result.done or result.failed:
                return result.done, result.failed
            self.wait(1)


def opened(mover: Mover, layers: int = 3) -> tuple[Mover, list[torch.Tensor]]:
    caches = [torch.zeros((5, 4, 2)) for _ in range(layers)]
    mover.open({0: caches})
    return mover, caches


def test_layers_are_copied_when_they_are_computed_and_the_others_after_the_step() -> None:
    mover, caches = opened(Mover())
    mover.begin(LayeredPlan(computing=(SAVE,)))
    for index in (0, 2):
        caches[index][2:4] = index + 1
        mover.computed([index])
    caches[1][2:4] = 9
    assert mover.computing
    mover.begin(LayeredPlan(committed=(1,)))
    assert mover.outcome() == ((1,), ())
    assert not mover.computing
    assert mover.events[-2:] == [[1], "stored"]
    assert sorted(index for written in mover.events[:-1] for index in written) == [0, 1, 2]
    values = mover.writers[0].rows.view(torch.float32).view(2, 3, 8)
    assert values.unique(dim=2).squeeze().tolist() == [[1, 9, 3]] * 2
    mover.close()


@pytest.mark.parametrize(
    ("ended", "broken", "reason"),
    [
        (LayeredPlan(dropped=(1,)), False, "its step failed"),
        (LayeredPlan(committed=(1,)), True, "no room"),
        (None, False, "a layer ran twice in a step"),
    ],
)
def test_blocks_of_a_step_that_failed_are_discarded(
    ended: LayeredPlan | None, broken: bool, reason: str
) -> None:
    mover, _ = opened(Mover(broken=broken))
    mover.begin(LayeredPlan(computing=(SAVE,)))
    mover.computed([0])
    if ended is None:
        mover.computed([0])
    else:
        mover.begin(ended)
    assert mover.outcome() == ((), ((1, reason),))
    assert mover.events[-1] == "discarded"
    mover.close()


def test_a_mover_closes_while_a_step_runs() -> None:
    mover, _ = opened(Mover())
    mover.begin(LayeredPlan(computing=(SAVE,)))
    mover.close()
    assert mover._thread is None


@pytest.mark.parametrize(
    "plan",
    [
        TransferPlan(saves=(SAVE,)),
        LayeredPlan(loads=(SAVE,), computing=(SAVE,), committed=(3, 4), dropped=(5,)),
    ],
)
def test_plans_are_packed(plan: TransferPlan) -> None:
    part = TransfersPart(FakeConnector())
    assert part.unpack_plan(part.pack_plan(plan)) == plan
