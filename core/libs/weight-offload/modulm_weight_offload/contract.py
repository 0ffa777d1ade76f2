"""What a platform offers so that weights can stay in host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

__all__ = ["HostCopies", "OffloadingPlatform"]


class HostCopies(ABC):
    """Copies from host memory to a device, beside the work that the device computes."""

    @abstractmethod
    def allocate(self, size: int) -> Tensor:
        """Allocate host memory that the device copies from without the host: [size] uint8."""

    def mapped(self, memory: Tensor) -> Tensor | None:
        """Return memory of `allocate` as a tensor of the device, which reads it where it is.

        [size] uint8. It is valid as long as `memory`. None if the device cannot.
        """
        return None

    @abstractmethod
    def start(self, target: Tensor, source: Tensor) -> object:
        """Start a copy that runs after the work launched so far and beside later work.

        Copies run in the order in which they were started.
        target: on the device. source: in memory of `allocate`, of the same shape and dtype; it
        must not change before the copy is done. Returns what `wait` takes.
        """

    @abstractmethod
    def wait(self, copy: object) -> None:
        """Let the work that is launched from now on wait for a copy. The host does not wait."""

    def host(self) -> AbstractContextManager[object]:
        """Return the context in which the host computes while a step is launched."""
        return nullcontext()


@runtime_checkable
class OffloadingPlatform(Protocol):
    """A platform whose device has memory of its own."""

    def host_copies(self) -> HostCopies:
        """Create the copies of one model."""
