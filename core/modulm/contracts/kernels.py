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

__all__ = ["API", "Forward", "ForwardWithLogits", "KernelProvider", "Op", "Ops", "RecordedForward"]


API = 1

#: `Model.forward`: maps a batch to hidden states [tokens, hidden], or to several such tensors.
Forward: TypeAlias = "Callable[[Batch], torch.Tensor | tuple[torch.Tensor, ...]]"


class KernelProvider(ABC):
    """Implementations of ops for one kind of device.

    The twins in `modulm.ops.twins` specify names, arguments and results. An op that no provider
    has runs as its twin.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @classmethod
    @abstractmethod
    def probe(cls, platform: Platform) -> Probe:
        """Return how well the ops run on `platform`; score 0 and a reason if they do not."""

    @abstractmethod
    def ops(self) -> Mapping[str, Op]:
        """Return op name -> callable. Called once; the callables are called per layer."""

    def rejects(self, op: str, **facts: object) -> str | None:
        """Return why `op` cannot run with these dtypes and sizes, or None if it can."""
        return None

    def recorded(self, forward: Forward) -> Forward:
        """Return a bit-identical forward pass with less launch overhead, or `forward` itself.

        For providers that record and replay steps. `Recordable` describes what batches must have
        in common; batches that cannot be recorded run through `forward`. The result may be
        overwritten by the next call.
        """
        return forward


class ForwardWithLogits(ABC):
    """A forward pass that can compute the logits of a step in the same call."""

    @abstractmethod
    def append_logits(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Allow passes to return `logits` of their first tensor as well, after all others.

        Only for steps all of whose tokens are sampled, and not necessarily for all of them.
        """

    @abstractmethod
    def __call__(self, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the forward pass. The result may be overwritten by the next call."""


class RecordedForward(ABC):
    """A forward pass that records steps of fixed shapes at startup (device graphs).

    Other steps are padded to a recorded shape with rows that see only the null block, or run
    without recording. A recorder that records steps as they occur is a plain `Forward`.
    """

    @property
    @abstractmethod
    def steps(self) -> Sequence[np.ndarray]:
        """The steps to record, largest memory first: tokens of each row, [rows] int32."""

    @abstractmethod
    def padded(self, counts: np.ndarray) -> np.ndarray:
        """Return the tokens per row of a recorded step that fits `counts`: [rows] int32.

        The step's own rows come first, then padding. Returns `counts` if no recorded step fits.
        """

    @abstractmethod
    def record(self, batch: Batch) -> None:
        """Record this batch's step, if it can be recorded.

        The batch is one of `steps`, in null blocks, with block tables of the maximum width.
        """

    @property
    @abstractmethod
    def memory(self) -> int:
        """Device memory of all recordings in bytes."""

    @abstractmethod
    def clear(self) -> None:
        """Drop the recordings and free their memory."""

    @abstractmethod
    def __call__(self, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the forward pass. The result may be overwritten by the next call."""
