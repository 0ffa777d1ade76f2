"""Contract kit of KV connectors: both halves of a connector, without an engine.

from modulm.testing.kv_connectors import check_connector, check_kv_connector

def test_contract(tmp_path):
    check_kv_connector(MyConnector, sample=lambda folder: {"path": str(folder)})

def test_with_a_store_of_another_process(tmp_path):
    check_connector(lambda: MyConnector(MyOptions(path=str(tmp_path))), durable=True)
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from modulm.contracts.connector import (
    BlockHold,
    BlockTransfer,
    KVConnector,
    KVIndex,
    KVMover,
    TransferPlan,
    TransferResult,
)
from modulm.errors import ModulmError
from modulm.plugins.options import structure
from modulm.testing.kit import KitNotRun, sample_of

__all__ = [
    "Tier", "block_names", "check_bounded", "check_connector", "check_holds", "check_kv_connector",
    "open_tier",
]  # fmt: skip

#: Blocks of each group, the null block with them.
_BLOCKS = 24
#: Seconds after which a transfer hangs.
_PATIENCE = 60.0
_MODEL, _OTHER = "0" * 32, "f" * 32


def block_names(count: int, chain: int = 0) -> tuple[bytes, ...]:
    """Names of `count` blocks of one prompt; other chains are other prompts."""
    return tuple(bytes([chain, index]) * 16 for index in range(count))


def _caches(seed: int) -> dict[int, list[torch.Tensor]]:
    """Two groups: layers of several dtypes and shapes, and one whose blocks are not adjacent."""
    torch.manual_seed(seed)
    both = torch.randn(_BLOCKS, 2, 4, 3)
    return {
        0: [torch.randn(_BLOCKS, 4, 8).to(torch.bfloat16), both[:, 0], both[:, 1]],
        1: [
            torch.randint(0, 255, (_BLOCKS, 4, 5)).to(torch.uint8),
            torch.randn(_BLOCKS, 7).to(torch.float8_e4m3fn),
        ],
    }


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@frozen(eq=False)
class Tier:
    """An index, and the movers and caches of all ranks, which do what an engine would."""

    index: KVIndex
    movers: Sequence[KVMover]
    caches: Sequence[dict[int, list[torch.Tensor]]]

    def save(self, number: int, names: Sequence[bytes], first: int = 1) -> bool:
        """Save blocks `first`, first + 1, ... of each group. Whether it worked on all ranks."""
        worked = self.move(TransferPlan(saves=(_transfer(number, names, first),)))
        if worked:
            self.index.store(names)
        return worked

    def load(self, number: int, names: Sequence[bytes], first: int) -> bool:
        """Fill blocks `first`, first + 1, ... of each group. Whether it worked on all ranks."""
        return self.move(TransferPlan(loads=(_transfer(number, names, first),)))

    def hold(self, names: Sequence[bytes], key: str = "") -> None:
        """Hold blocks for a minute."""
        for mover in self.movers:
            mover.begin(TransferPlan(holds=(BlockHold(tuple(names), 60.0, "tenant", key),)))

    def move(self, plan: TransferPlan) -> bool:
        """Begin a plan of one transfer on all ranks, and wait until it has ended on all."""
        (transfer,) = (*plan.loads, *plan.saves)
        for mover in self.movers:
            mover.begin(plan)
        results = [_await(mover, transfer.id) for mover in self.movers]
        for result in results:
            if result.removed:
                self.index.remove(result.removed)
        return not any(result.failed for result in results)

    def content(self, rank: int, first: int, count: int) -> list[torch.Tensor]:
        """The bytes of a rank's blocks `first`, first + 1, ..., tensor by tensor."""
        tensors = (tensor for group in self.caches[rank].values() for tensor in group)
        return [_bytes(tensor[first : first + count]).clone() for tensor in tensors]

    def match(self, names: Sequence[bytes]) -> int:
        """How many leading blocks the index knows, asked until it answers."""
        until = time.monotonic() + _PATIENCE
        while (count := self.index.match("request", names, 0)) is None:
            assert time.monotonic() < until, "match answers None for ever"
        return count


def _transfer(number: int, names: Sequence[bytes], first: int) -> BlockTransfer:
    # Groups have blocks of their own: the second's are in another order.
    ids = tuple(range(first, first + len(names)))
    return BlockTransfer(number, "request", tuple(names), (ids, ids))


def _await(mover: KVMover, identity: int) -> TransferResult:
    """All that the mover says until the transfer has ended."""
    done: list[int] = []
    failed: list[tuple[int, str]] = []
    removed: list[bytes] = []
    until = time.monotonic() + _PATIENCE
    while identity not in (*done, *(number for number, _ in failed)):
        assert time.monotonic() < until, f"transfer {identity} has not ended in {_PATIENCE} s"
        mover.wait(0.01)
        result = mover.ended()
        done += result.done
        failed += result.failed
        removed += result.removed
    assert (done + [number for number, _ in failed]).count(identity) == 1, "a transfer ended twice"
    assert all(reason for _, reason in failed), "a transfer failed without a reason"
    return TransferResult(tuple(done), tuple(failed), tuple(removed))


@contextmanager
def open_tier(connector: KVConnector, ranks: int = 1, model: str = _MODEL) -> Iterator[Tier]:
    """Both halves, opened as an engine opens them and closed at the end."""
    connector.bind(model, ranks)
    connector.limit_holds(0.5, 0.5)
    movers = [connector.mover() for _ in range(ranks)]
    caches = [_caches(rank) for rank in range(ranks)]
    for rank, mover in enumerate(movers):
        mover.open(caches[rank], rank=rank, ranks=ranks)
    try:
        yield Tier(connector.index(), movers, caches)
    finally:
        for mover in movers:
            mover.close()


def check_kv_connector(
    driver: type[KVConnector], sample: Callable[[Path], Mapping[str, Any]] | None = None
) -> str:
    """Check a driver on one rank and on two; one that is durable also with restarts and torn files.

    sample: a function (folder) that returns a table of options, or the driver's `kit_sample`; not
    needed if all options have defaults. Returns what was left out. Raises AssertionError, or
    KitNotRun if the driver cannot be built here.
    """
    with tempfile.TemporaryDirectory(prefix="modulm-kit-") as name:
        table: Mapping[str, Any] = {}
        try:
            if sample is None and not hasattr(driver, "kit_sample"):
                structure({}, driver.Config, f"kv_connectors.{driver.name}")
            else:
                table = sample_of(driver, sample, "options")(Path(name))
            options: Any = structure(dict(table), driver.Config, f"kv_connectors.{driver.name}")
            connector = driver(options)
            connector.bind(_MODEL, 1)
            durable = connector.index().durable
        except ModulmError as error:
            raise KitNotRun(f"its options: {error}; pass sample=, or define kit_sample") from error
        check_connector(lambda: driver(options), durable=durable, folder=Path(name))
        torn = any(path.is_file() for path in Path(name).rglob("*"))
    return "" if torn or not durable else "torn files were not tried: none are in the folder"


def check_connector(
    make: Callable[[], KVConnector], *, durable: bool = False, folder: Path | None = None
) -> None:
    """Check that a connector brings back what it saved, and nothing else.

    make: a connector with an empty store, or with that of the connectors before it if it is
    `durable`. Its store must have room for 8 blocks of 600 bytes on each of two ranks. folder: of
    its files, which are torn if it is durable. Raises AssertionError.
    """
    for ranks in (1, 2):
        _check_round_trip(make, ranks)
    _check_refused(make)
    _check_foreign(make, durable)
    _check_other_ranks(make)
    _check_dropped(make)
    if durable and folder is not None:
        for left in (0.5, 0.0):
            _check_torn(make, folder, left)


def _same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def _check_round_trip(make: Callable[[], KVConnector], ranks: int) -> None:
    names = block_names(4, chain=ranks)
    with open_tier(make(), ranks) as tier:
        assert tier.match(names) == 0, "the index knows blocks that nobody has saved"
        expected = [tier.content(rank, 1, 4) for rank in range(ranks)]
        rest = [tier.content(rank, 5, _BLOCKS - 5) for rank in range(ranks)]
        null = [tier.content(rank, 0, 1) for rank in range(ranks)]
        assert tier.save(1, names), "a save has failed"
        assert tier.match(names) == 4, "the index does not know what was saved"
        assert tier.match((*names[:2], b"x" * 32, names[3])) == 2, "a hit reaches over a gap"
        assert tier.match((b"x" * 32, *names)) == 0, "a hit does not begin with the first block"
        for rank in range(ranks):
            for group in tier.caches[rank].values():
                for tensor in group:
                    tensor[1:5] = 0
        assert tier.load(2, names, 9), "a load has failed"
        for rank in range(ranks):
            content = tier.content(rank, 9, 4)
            assert _same(content, expected[rank]), (
                f"rank {rank}: a block came back with other bytes"
            )
            untouched = [
                tier.content(rank, start, stop - start) for start, stop in ((5, 9), (13, _BLOCKS))
            ]
            assert _same(tier.content(rank, 0, 1), null[rank]), "a load wrote into the null block"
            before = [[part[:4] for part in rest[rank]], [part[8:] for part in rest[rank]]]
            assert all(map(_same, untouched, before)), (
                f"rank {rank}: a load wrote into other blocks"
            )
        assert tier.load(3, names[1:3], 15), "a load of some of the saved blocks has failed"
        content = tier.content(0, 15, 2)
        assert _same(content, [part[1:3] for part in expected[0]]), (
            "blocks came back in another order"
        )
        assert tier.save(4, names), "saving what is stored already has failed"


def _check_foreign(make: Callable[[], KVConnector], durable: bool) -> None:
    names = block_names(3, chain=3)
    with open_tier(make()) as tier:
        assert tier.save(1, names), "a save has failed"
        expected = tier.content(0, 1, 3)
        assert not tier.load(2, block_names(2, chain=9), 9), "a load of unknown blocks has worked"
    with open_tier(make(), model=_OTHER) as tier:
        assert tier.match(names) == 0, "blocks of another model are found"
        assert not tier.load(1, names, 9), "blocks of another model are loaded"
    with open_tier(make()) as tier:
        count = tier.match(names)
        if durable:
            assert count == 3, "a restart finds nothing again"
            assert tier.load(1, names, 9)
            assert _same(tier.content(0, 9, 3), expected), "other bytes after a restart"
        else:
            assert not count, "the index knows blocks of a connector before it"


def _check_refused(make: Callable[[], KVConnector]) -> None:
    """A load of which one block is unknown fails, and the connector goes on."""
    names = block_names(2, chain=6)
    with open_tier(make()) as tier:
        expected = tier.content(0, 1, 2)
        assert tier.save(1, names), "a save has failed"
        unknown = (names[0], *block_names(1, chain=10))
        assert not tier.load(2, unknown, 9), "a load with an unknown block has worked"
        assert tier.load(3, names, 12), "after a load that failed, others fail too"
        assert _same(tier.content(0, 12, 2), expected), "other bytes after a load that failed"


def _check_other_ranks(make: Callable[[], KVConnector]) -> None:
    """Blocks of one rank are not the halves of two ranks."""
    names = block_names(2, chain=7)
    with open_tier(make()) as tier:
        assert tier.save(1, names), "a save has failed"
    with open_tier(make(), ranks=2) as tier:
        assert not (tier.match(names) and tier.load(1, names, 9)), (
            "blocks of another number of ranks are loaded"
        )


def _check_torn(make: Callable[[], KVConnector], folder: Path, left: float) -> None:
    """Files that lost their end, or all content: found missing or damaged, and written anew."""
    names = block_names(3, chain=8)
    with open_tier(make()) as tier:
        expected = tier.content(0, 1, 3)
        assert tier.save(1, names), "a save has failed"
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("r+b") as file:
                file.truncate(int(path.stat().st_size * left))
    with open_tier(make()) as tier:
        if (count := tier.match(names)) and tier.load(1, names[:count], 9):
            assert _same(tier.content(0, 9, count), [part[:count] for part in expected]), (
                "a torn file was loaded"
            )
        for number, name in enumerate(names):
            tier.load(10 + number, (name,), 9)
        assert tier.save(20, names), "after torn files, a save fails"
        assert tier.match(names) == 3, "the index does not know what was saved over torn files"
        assert tier.load(21, names, 15), "a torn file was not written anew"
        assert _same(tier.content(0, 15, 3), expected), "other bytes after torn files"


def _check_dropped(make: Callable[[], KVConnector]) -> None:
    """Closed with transfers under way: nothing hangs, and what is found later is whole."""
    names = block_names(4, chain=4)
    with open_tier(make()) as tier:
        expected = tier.content(0, 1, 4)
        assert tier.save(1, names), "a save has failed"
        tier.movers[0].begin(TransferPlan(loads=(_transfer(2, names, 9),)))
        tier.movers[0].begin(TransferPlan(saves=(_transfer(3, block_names(4, chain=5), 5),)))
    with open_tier(make()) as tier:
        for chain, saved in ((4, expected), (5, None)):
            count = tier.match(block_names(4, chain))
            if count and saved is not None:
                assert tier.load(chain, block_names(4, chain)[:count], 15)
                assert _same(tier.content(0, 15, count), [part[:count] for part in saved])


def check_bounded(make: Callable[[], KVConnector], used: Callable[[], int], most: int) -> None:
    """Check that a store of `most` bytes, of which `used` tells what it takes, stays within them:
    the blocks that were used the longest ago go, and the index knows. It has to hold at least 4
    and less than 30 blocks of the kit.
    """
    with open_tier(make()) as tier:
        kept = block_names(1, chain=200)
        assert tier.save(1, kept)
        expected = tier.content(0, 1, 1)
        for chain in range(30):
            assert tier.save(10 + chain, block_names(1, chain=chain), 2), "a full store is an error"
            assert used() <= most, f"{used()} bytes of at most {most}"
            assert tier.load(100 + chain, kept, 9), "what was just used has gone"
            assert _same(tier.content(0, 9, 1), expected), "a block came back with other bytes"
        assert tier.match(block_names(1, chain=0)) == 0, "the index knows what has gone"
        assert tier.match(block_names(1, chain=29)) == 1, "the newest has gone"


def check_holds(make: Callable[[], KVConnector], *, durable: bool = False) -> None:
    """Check that a store evicts held blocks last, and that no key holds more than its share.

    make: see `check_connector`; its store has to hold at least 4 and less than 30 blocks of the
    kit. durable: whether holds outlive the engine. Raises AssertionError.
    """
    with open_tier(make()) as tier:
        held = block_names(1, chain=210)
        assert tier.save(1, held)
        tier.hold(held)
        room = _press(tier, 220)
        assert tier.match(held) == 1, "a held block was evicted"
        assert tier.load(2, held, 9), "a held block was evicted"
        for number in range(40):
            more = block_names(1, chain=100 + number)
            assert tier.save(300 + number, more, 2), "holds leave no room"
            tier.hold(more, "greedy")
        _press(tier, 221)
        left = sum(tier.match(block_names(1, chain=100 + number)) for number in range(40))
        assert left <= room // 3 + 1, f"a key holds {left} of {room} blocks, more than its share"
        assert tier.match(held) == 1, "holds of one key took another's place"
    if durable:
        with open_tier(make()) as tier:
            _press(tier, 222)
            assert tier.match(held) == 1, "a held block was evicted after a restart"


def _press(tier: Tier, chain: int) -> int:
    """Save 30 blocks that nobody holds; return how many of them are stored at the end."""
    blocks = [(name,) for name in block_names(30, chain)]
    for block in blocks:
        assert tier.save(10, block, 2), "a full store is an error"
    return sum(map(tier.match, blocks))
