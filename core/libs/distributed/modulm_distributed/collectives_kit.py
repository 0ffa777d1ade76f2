"""The contract kit for collectives.

from modulm_distributed.collectives_kit import check_collectives

def test_contract():
    check_collectives(MyCollectives)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from modulm.contracts.platform import Platform
from modulm.parallel import ProcessGroup
from modulm.testing.kit import KitNotRun
from modulm.testing.platform import usable_platforms
from modulm_distributed.collectives import Collectives, Members

__all__ = ["check_collectives"]

_RANKS = 3
#: Seconds after which ranks that wait for one another are taken to hang.
_SECONDS = 60.0
_DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def check_collectives(driver: type[Collectives]) -> None:
    """Run the kit: three ranks, as threads of this process, make each call.

    Raises AssertionError with what was expected, KitNotRun if they cannot be connected here.
    """
    reasons = []
    for platform in usable_platforms():
        members = Members("kit", 0, _RANKS, c10d.HashStore(), seconds=_SECONDS)
        reason = driver.rejects(platform, members)
        valid = reason is None or (isinstance(reason, str) and reason.strip())
        assert valid, f"rejects() gave {reason!r}, not a reason or None"
        # Ranks that are threads of one process share a device only where that is the host's memory.
        if reason is None and platform.reset_peak_memory() is None:
            return _check_ranks(driver, platform)
        reasons.append(f"{platform.name}: {reason or 'each rank needs a device of its own'}")
    raise KitNotRun("; ".join(reasons) or "this machine has no platform")


def _check_ranks(driver: type[Collectives], platform: Platform) -> None:
    store = c10d.HashStore()

    def open_rank(rank: int) -> ProcessGroup:
        return driver.open(platform, Members("kit", rank, _RANKS, store, seconds=_SECONDS))

    groups = _together("open()", open_rank, range(_RANKS))
    for rank, group in enumerate(groups):
        assert isinstance(group, ProcessGroup), f"open() gave {group!r}, not a ProcessGroup"
        place = group.rank, group.size
        assert place == (rank, _RANKS), f"open() gave rank {place}, not {(rank, _RANKS)}"
    for dtype in _DTYPES:
        for shape in ((4, 6), (1, 6), (0, 6), (2, 3, 5)):
            inputs = [_numbers(shape, dtype, rank, platform.device) for rank in range(_RANKS)]
            _check_sums(groups, inputs)
            _check_copies(groups, inputs)
    _check_rows(groups, platform.device)
    _check_stages(groups, platform.device)


def _numbers(shape: Sequence[int], dtype: torch.dtype, rank: int, device: Any) -> Tensor:
    made = torch.Generator().manual_seed(rank)
    return (torch.randn(*shape, generator=made) * 8).to(dtype).to(device)


def _check_sums(groups: Sequence[ProcessGroup], inputs: Sequence[Tensor]) -> None:
    before = [x.clone() for x in inputs]
    sums = _together("all_reduce()", lambda rank: groups[rank].all_reduce(inputs[rank]))
    wide = torch.stack([x.double() for x in before]).sum(0)
    for rank, total in enumerate(sums):
        what = f"all_reduce() of {list(inputs[0].shape)} {inputs[0].dtype}, rank {rank}"
        _check_form(total, inputs[0], what)
        close = torch.allclose(total.double(), wide, rtol=2**-7, atol=2**-5)
        assert close, f"{what}: it is not the sum over all ranks"
        assert torch.equal(total, sums[0]), f"{what}: it differs from that of rank 0"
    kept = all(torch.equal(x, old) for x, old in zip(inputs, before, strict=True))
    assert kept, "all_reduce() changes its input, which a layer may read again"
    _check_rounding(groups, inputs[0].device)


def _check_rounding(groups: Sequence[ProcessGroup], device: Any) -> None:
    """Check that small numbers are not lost between large ones of the same dtype."""
    values = [torch.full((2, 2), value).bfloat16().to(device) for value in (256.0, 1.0, 1.0)]
    total = _together("all_reduce()", lambda rank: groups[rank].all_reduce(values[rank]))[0]
    exact = bool((total.float() == 258.0).all())
    assert exact, "all_reduce() of bfloat16 rounds after each rank: sum in float32, round once"


def _check_copies(groups: Sequence[ProcessGroup], inputs: Sequence[Tensor]) -> None:
    every = torch.cat(list(inputs), -1)
    for rank, result in enumerate(
        _together("all_gather()", lambda rank: groups[rank].all_gather(inputs[rank]))
    ):
        same = result.shape == every.shape and torch.equal(result, every)
        assert same, f"all_gather(), rank {rank}: not all ranks' tensors along the last dimension"
    for source in range(_RANKS):
        for rank, result in enumerate(
            _together("broadcast()", partial(_broadcast, groups, inputs, source))
        ):
            same = torch.equal(result, inputs[source])
            assert same, f"broadcast() from rank {source}: rank {rank} has another tensor"
    rows = [torch.cat([x * number for number in range(1, _RANKS + 1)]) for x in inputs]
    sums = _together("all_reduce()", lambda rank: groups[rank].all_reduce(rows[rank]))[0]
    scattered = _together("reduce_scatter()", lambda rank: groups[rank].reduce_scatter(rows[rank]))
    same = torch.equal(torch.cat(list(scattered)), sums)
    assert same, "reduce_scatter() does not give each rank its rows of the sum, in order"
    last = _RANKS - 1

    def pass_one(rank: int) -> Tensor:
        if rank == 0:
            return groups[0].send(inputs[0], last)
        return groups[rank].recv(inputs[0], 0) if rank == last else inputs[0]

    like = [x.clone() for x in inputs]
    inputs = [like[0], like[1], torch.zeros_like(like[2])]
    received = _together("send() and recv()", pass_one)[last]
    assert torch.equal(received, like[0]), "recv() did not give the tensor that was sent"


def _broadcast(
    groups: Sequence[ProcessGroup], inputs: Sequence[Tensor], source: int, rank: int
) -> Tensor:
    return groups[rank].broadcast(inputs[rank], source)


def _check_rows(groups: Sequence[ProcessGroup], device: Any) -> None:
    """Check that the sum of a row does not depend on the rows beside it."""
    inputs = [_numbers((33, 7), torch.float32, rank, device) for rank in range(_RANKS)]
    many = _together("all_reduce()", lambda rank: groups[rank].all_reduce(inputs[rank]))[0]
    one = _together("all_reduce()", lambda rank: groups[rank].all_reduce(inputs[rank][4:5]))[0]
    assert torch.equal(one, many[4:5]), "all_reduce(): a row's sum depends on other rows"
    columns = [x.T for x in inputs]
    turned = _together("all_reduce()", lambda rank: groups[rank].all_reduce(columns[rank]))[0]
    assert torch.equal(turned, many.T), "all_reduce() of a tensor that is not contiguous differs"


def _check_stages(groups: Sequence[ProcessGroup], device: Any) -> None:
    """Check that tensors of any shapes go from stage to stage."""
    shapes = ((3, 4), (1,), (0, 2), (2, 1, 3))
    sent = tuple(_numbers(shape, dtype, 1, device) for shape in shapes for dtype in _DTYPES)

    def stage(rank: int) -> tuple[Tensor, ...]:
        group = groups[rank]
        tensors = sent if group.first else group.take_over()
        if not group.last:
            group.pass_on(tensors)
        return tensors

    for arrived in _together("pass_on() and take_over()", stage):
        assert len(arrived) == len(sent), f"{len(arrived)} tensors arrive, not {len(sent)}"
        for one, other in zip(arrived, sent, strict=True):
            _check_form(one, other, "take_over()")
            assert torch.equal(one, other), "take_over() gives other tensors than were passed on"


def _check_form(actual: Tensor, expected: Tensor, what: str) -> None:
    form = actual.dtype, tuple(actual.shape), actual.device.type
    wanted = expected.dtype, tuple(expected.shape), expected.device.type
    assert form == wanted, f"{what}: {form}, not {wanted}"


def _together(
    what: str, call: Callable[[int], Any], ranks: Sequence[int] = range(_RANKS)
) -> list[Any]:
    """Make a call on all ranks at once. Raises what a rank raised, AssertionError if one hangs."""
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = call(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0.1 if errors else _SECONDS)
    for rank, error in sorted(errors.items()):
        raise AssertionError(f"{what} on rank {rank}: {type(error).__name__}: {error}") from error
    hanging = [str(rank) for rank in ranks if rank not in results]
    assert not hanging, f"{what} does not return on rank {', '.join(hanging)}"
    return [results[rank] for rank in ranks]
