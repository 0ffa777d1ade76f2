"""Weight slots: one per parameter of the model, filled with checkpoint tensors while loading.

Modules are created on the meta device. A slot allocates its parameter when the first tensor
arrives, and a module is finished (repacked, originals dropped) when all its slots are filled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import field, frozen, mutable
from torch import Tensor

from modulm.contracts.quantization import Region

__all__ = ["Part", "Region", "Slot", "Unit"]


@frozen
class Part:
    """A checkpoint tensor that fills a parameter, or a region of it.

    shape: required shape after `transform`, ignoring dimensions of size one. source: this rank's
    region of the tensor. target: its region of the parameter. shared: several parts have the same
    target and must be equal.
    """

    name: str
    shape: tuple[int, ...]
    source: Region = ()
    target: Region = ()
    transform: Callable[[Tensor], Tensor] | None = None
    shared: bool = False

    def view(self, stored: Tensor) -> Tensor:
        """Return a stored tensor in this part's shape. Raises ValueError or RuntimeError."""
        changed = stored if self.transform is None else self.transform(stored)
        if changed.shape == self.shape:
            return changed
        if [n for n in changed.shape if n != 1] != [n for n in self.shape if n != 1]:
            raise ValueError(f"{list(changed.shape)} is not {list(self.shape)}")
        return changed.reshape(self.shape)

    def take(self, stored: Tensor) -> Tensor:
        """Return this rank's region of a stored tensor. Raises as `view` does."""
        tensor = self.view(stored)
        for dim, entries in enumerate(self.source):
            chosen = entries if isinstance(entries, slice) else list(entries)
            tensor = tensor[(slice(None),) * dim + (chosen,)]
        return tensor


@frozen(eq=False)
class Slot:
    """One parameter. Each of `ways` is a set of parts that fills it; a checkpoint has one of them.

    For example, a fused layer may be stored fused or in parts, experts stacked or one by one.
    """

    module: torch.nn.Module
    attribute: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ways: tuple[tuple[Part, ...], ...]
    optional: bool = False
    _shared: list[Region] = field(init=False, factory=list)

    def fill(self, part: Part, tensor: Tensor, device: torch.device) -> None:
        """Copy one tensor into place, converting its dtype.

        Uses one thread: more are not faster, and torch's threads, which wait actively, would slow
        down kernels that repack the weight afterwards. Raises ValueError if a shared target already
        has other values.
        """
        parameter: Tensor = getattr(self.module, self.attribute)
        if parameter.is_meta:
            memory = torch.empty(self.shape, dtype=self.dtype, device=device)
            parameter = torch.nn.Parameter(memory, requires_grad=False)
            setattr(self.module, self.attribute, parameter)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            piece, target = part.take(tensor), parameter[part.target]
            if part.target in self._shared:
                if not torch.equal(_bytes(target), _bytes(piece.to(target))):
                    raise ValueError("differs from what the other parts of its layer have")
                return
            target.copy_(piece)
        finally:
            torch.set_num_threads(threads)
        if part.shared:
            self._shared.append(part.target)


@mutable(eq=False)
class Unit:
    """A module, its slots, and what to do once they are all filled.

    after: runs last; modules that share this one's weight (a tied head) copy it there.
    """

    path: str
    module: torch.nn.Module
    slots: list[Slot] = field(factory=list)
    finish: Callable[[], None] | None = None
    waits_for: Unit | None = None


def _bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, to compare tensors of any dtype bit by bit."""
    return tensor.reshape(-1).view(torch.uint8)
