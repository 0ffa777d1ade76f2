"""Collectives over torch.distributed's backends, without its global state.

Tensors are gathered and summed in the order of ranks, in fp32, rounded once. A backend's all-reduce
adds in an order that depends on the tensor's length, so a request's output would depend on the rest
of its batch.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from modulm.parallel import ProcessGroup
from modulm_distributed.collectives import Collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.platform import Platform
    from modulm_distributed.collectives import Members

__all__ = ["Gloo", "Nccl", "TorchGroup", "sum_in_order"]

#: Maximum dimensions of a tensor passed to the next stage.
_DIMENSIONS = 4
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


@frozen(eq=False)
class TorchGroup(ProcessGroup):
    """A group whose ranks communicate through a backend of torch.distributed."""

    backend: Any = None
    device: torch.device | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_order(self._gather(x))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._gather(x), -1)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_reduce(x).tensor_split(self.size)[self.rank]

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        options = c10d.BroadcastOptions()
        options.rootRank = source
        data = x.contiguous().clone()
        self.backend.broadcast([_bytes(data)], options).wait()
        return data

    def send(self, x: Tensor, target: int) -> Tensor:
        self.backend.send([_bytes(x.contiguous())], target, 0).wait()
        return x

    def recv(self, x: Tensor, source: int) -> Tensor:
        data = torch.empty_like(x)
        self.backend.recv([_bytes(data)], source, 0).wait()
        return data

    def pass_on(self, tensors: Sequence[Tensor]) -> None:
        heads = [_head(tensor) for tensor in tensors]
        size = torch.tensor([len(heads)], device=self.device)
        self.send(size, self.rank + 1)
        self.send(torch.tensor(heads, device=self.device), self.rank + 1)
        for tensor in tensors:
            self.send(tensor, self.rank + 1)

    def take_over(self) -> tuple[Tensor, ...]:
        before, like = self.rank - 1, torch.empty(1, dtype=torch.int64, device=self.device)
        count = int(self.recv(like, before).item())
        heads = self.recv(like.new_empty(count, _DIMENSIONS + 1), before).tolist()
        return tuple(self.recv(self._empty(head), before) for head in heads)

    def _empty(self, head: Sequence[int]) -> Tensor:
        dtype, *shape = head
        sizes = [size for size in shape if size >= 0]
        return torch.empty(sizes, dtype=_DTYPES[dtype], device=self.device)

    def _gather(self, x: Tensor) -> list[Tensor]:
        """Gather the tensors of all ranks, in order."""
        data = x.contiguous()
        gathered = [torch.empty_like(data) for _ in range(self.size)]
        self.backend.allgather([list(map(_bytes, gathered))], [_bytes(data)]).wait()
        return gathered


class Gloo(Collectives):
    """Gloo: over sockets, for tensors in host memory."""

    name: ClassVar[str] = "gloo"
    api: ClassVar[int | tuple[int, int]] = 1

    @classmethod
    def open(cls, platform: Platform, members: Members) -> TorchGroup:
        kind = c10d.ProcessGroupGloo
        options = kind._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=members.seconds)
        address = "127.0.0.1" if members.one_host else members.address
        device = kind.create_device(hostname=address) if address else kind.create_default_device()
        options._devices = [device]
        store = c10d.PrefixStore(members.name, members.store)
        backend = kind(store, members.rank, members.size, options)
        return TorchGroup(members.rank, members.size, backend, platform.device)


class Nccl(Collectives):
    """NCCL between NVIDIA GPUs, or RCCL (same name) between AMD GPUs."""

    name: ClassVar[str] = "nccl"
    api: ClassVar[int | tuple[int, int]] = 1

    @classmethod
    def rejects(cls, platform: Platform, members: Members) -> str | None:
        return None if hasattr(c10d, "ProcessGroupNCCL") else "this torch was built without it"

    @classmethod
    def open(cls, platform: Platform, members: Members) -> TorchGroup:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=members.seconds)
        store = c10d.PrefixStore(members.name, members.store)
        backend = c10d.ProcessGroupNCCL(store, members.rank, members.size, options)
        return TorchGroup(members.rank, members.size, backend, platform.device)


def sum_in_order(tensors: Sequence[Tensor]) -> Tensor:
    """Add tensors of one shape and dtype in order, in fp32, and round once.

    Integers are added as they are. Kernels that sum over ranks have the same bits.
    """
    first, *others = tensors
    total = first.float() if first.is_floating_point() else first
    for other in others:
        total = total + other
    return total.to(first.dtype)


def _bytes(x: Tensor) -> Tensor:
    """View the tensor as bytes, because not every backend supports every dtype."""
    return x.view(-1).view(torch.uint8)


def _head(x: Tensor) -> list[int]:
    return [_DTYPES.index(x.dtype), *x.shape, *[-1] * (_DIMENSIONS - x.dim())]
