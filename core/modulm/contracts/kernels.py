"""Kernel provider: a table of op name -> callable (group `modulm.kernels`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from modulm.contracts.ops import Op, Ops
from modulm.contracts.platform import Probe

if TYPE_CHECKING:
    import torch

    from modulm.contracts.model import Batch
    from modulm.contracts.platform import Platform

__all__ = ["API", "Forward", "KernelProvider", "Op", "Ops"]

API = 1

#: `Model.forward`: a batch to hidden states [tokens, hidden]; or to several tensors like these.
Forward: TypeAlias = "Callable[[Batch], torch.Tensor | tuple[torch.Tensor, ...]]"


class KernelProvider(ABC):
    """Implementations of ops for one kind of device.

    The names, arguments and results are those of the twins in `modulm.ops.twins`, which are the
    specification; an op that a provider lacks runs as its twin.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @classmethod
    @abstractmethod
    def probe(cls, platform: Platform) -> Probe:
        """Whether the provider's ops run on `platform` here; score 0 and a reason if not."""

    @abstractmethod
    def ops(self) -> Mapping[str, Op]:
        """Op name -> callable. Called once; the callables are called per layer."""

    def rejects(self, op: str, **facts: object) -> str | None:
        """A reason why `op` cannot run with these dtypes and sizes, or None if it can."""
        return None

    def recorded(self, forward: Forward) -> Forward:
        """`forward`, or what gives the same bits with less work between the kernels.

        For providers that record a step and repeat it (CUDA graphs). A batch says what it holds
        and what must be equal (`Recordable`); one that cannot be recorded runs as `forward` does.
        The result may be overwritten by the next call.
        """
        return forward
