"""Kernel provider: a table of op name -> callable (group `modulm.kernels`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from modulm.contracts.ops import Op, Ops
from modulm.contracts.platform import Probe

if TYPE_CHECKING:
    import numpy as np
    import torch

    from modulm.contracts.model import Batch
    from modulm.contracts.platform import Platform

__all__ = ["API", "Forward", "KernelProvider", "Op", "Ops", "RecordedForward"]

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


class RecordedForward(ABC):
    """A forward pass whose steps of certain shapes are recorded ahead (CUDA graphs).

    A step of another shape is padded to one of them by rows that see the null block only, or runs
    call by call. A recorder that records whatever comes, when it comes, needs none of this: it is
    any `Forward`.
    """

    @property
    @abstractmethod
    def steps(self) -> Sequence[np.ndarray]:
        """What to record, in this order: the tokens of each row, [rows] int32. Those that take the
        most memory come first.
        """

    @abstractmethod
    def padded(self, counts: np.ndarray) -> np.ndarray:
        """[rows] int32, the tokens of each row of a recorded step that has room for one of these
        `counts`: its own rows, then rows of padding. `counts` itself where there is none.
        """

    @abstractmethod
    def record(self, batch: Batch) -> None:
        """Record the step of this batch: one of `steps` in the null blocks, with block tables as
        wide as any will be. What cannot be recorded is left out.
        """

    @property
    @abstractmethod
    def held(self) -> int:
        """Bytes of the device that all recordings take."""

    @abstractmethod
    def clear(self) -> None:
        """Drop the recordings and give their memory back."""

    @abstractmethod
    def __call__(self, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """As the forward pass does; the result may be overwritten by the next call."""
