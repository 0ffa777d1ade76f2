"""Blocks of ranks that hold more or fewer heads, and memory that two processes share."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from modulm_kv_peer.layout import Layout, block_loader, source_ranks
from modulm_kv_peer.memory import SharedMemory, open_shared
from modulm_kv_peer.store import PeerStore
from modulm_kv_peer.wire import Fault
from modulm_kv_transfer.copies import BlockCopier

#: Heads of the model; a rank has one at least.
HEADS = 4
#: The first one only pads tables: it is not loaded.
BLOCKS = 4


def caches(values: torch.Tensor, rank: int, size: int) -> dict[int, list[torch.Tensor]]:
    """A rank's caches of two layers: heads in the second dimension, and the same on all ranks."""
    each = max(HEADS // size, 1)
    first = rank * HEADS // size
    return {0: [values[:, first : first + each].clone(), values[:, 0].clone()]}


@pytest.mark.parametrize(("here", "there"), [*product((1, 2, 4, 8), repeat=2)])
def test_heads_are_split_and_merged(here: int, there: int) -> None:
    values = torch.randn(BLOCKS, HEADS, 2, 3)
    for rank in range(here):
        copier = BlockCopier(caches(torch.zeros_like(values), rank, here))
        for source in source_ranks(rank, here, there):
            other = BlockCopier(caches(values, source, there))
            rows = list(other.buffer(BLOCKS - 1))
            for tensor in (1, 0):
                other.save([range(1, BLOCKS)], rows, [tensor])
            load = block_loader(copier, Layout.of(other), rank, here, source, there)
            if load is not None:
                # Tensor by tensor, as they come from a step that is running.
                for tensors in ([0], [1]):
                    load([[3, 1, 2]], rows, tensors)
        moved = torch.cat([torch.zeros_like(values[:1]), values[[2, 3, 1]]])
        wanted = caches(moved, rank, here)[0]
        for (_, tensor), expected in zip(copier.tensors, wanted, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def test_ranks_of_later_stages_ask_the_same_stage() -> None:
    assert list(source_ranks(3, 2, 4)) == [6, 7]
    assert list(source_ranks(6, 4, 2)) == [3]
    with pytest.raises(Fault, match="tensor_parallel_size is 3 where the blocks are, and 2 here"):
        source_ranks(0, 2, 3)


@pytest.mark.parametrize("shape", [(4, 2, 4), (3, 2, 3), (4, 2), (8, 2, 3)])
def test_other_differences_are_refused(shape: tuple[int, ...]) -> None:
    copier = BlockCopier({0: [torch.zeros(BLOCKS, 4, 2, 3)]})
    layout = Layout.of(BlockCopier({0: [torch.zeros(BLOCKS, *shape)]}))
    with pytest.raises(Fault, match="the cache layout is different"):
        block_loader(copier, layout, 0, 1, 0, 1)


def test_memory_is_shared_with_those_who_know_its_token() -> None:
    memory = SharedMemory(2, 8)
    memory.blocks[1] = 7
    described = memory.describe()
    other = open_shared(described, 8)
    assert other is not None
    memory.blocks[0] = 9
    assert other.tolist() == [[9] * 8, [7] * 8]
    assert open_shared({**described, "token": bytes(32)}, 8) is None
    assert open_shared(described, 9) is None
    memory.close()
    assert open_shared(described, 8) is None


def test_blocks_that_are_read_are_not_evicted() -> None:
    store = PeerStore(torch.zeros(2, 8, dtype=torch.uint8))
    names = [b"a", b"b"]
    store.add(names, store.reserve(names)[1])
    held, _ = store.hold(names, 0)
    assert store.reserve([b"c"]) == ([], [])
    assert store.hold([b"c"], 60) == ([], None)  # evicted at once: nobody waits for it
    store.drop(held)
    new, slots = store.reserve([b"c"])
    assert (new, slots) == ([0], [held[1]])
    store.add([b"c"], slots)
    held_now = [store.hold([name], 0)[0] for name in (b"a", b"b", b"c")]
    assert held_now == [[held[0]], [], slots]
