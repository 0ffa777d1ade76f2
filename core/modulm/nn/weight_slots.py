"""Where checkpoint tensors go: one slot per parameter of the model, filled while loading.

Modules are made on the meta device: a slot gives its parameter memory when its first tensor
arrives, and the module is finished (repacked, originals dropped) when all of its own are there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import field, frozen, mutable
from torch import Tensor

__all__ = ["Part", "Region", "Slot", "Unit"]

#: What is taken of each dimension: a stretch, or entries by number.
Region = tuple[slice | tuple[int, ...], ...]


@frozen
class Part:
    """A checkpoint tensor that fills (a region of) a parameter.

    `shape` is what the file must hold, after `transform` and but for dimensions of size one; of
    that, `source` is what this rank takes and `target` is where it goes. `shared`: several parts
    go there, and must be equal.
    """

    name: str
    shape: tuple[int, ...]
    source: Region = ()
    target: Region = ()
    transform: Callable[[Tensor], Tensor] | None = None
    shared: bool = False

    def view(self, stored: Tensor) -> Tensor:
        """A stored tensor in this part's shape. Raises ValueError or RuntimeError if not to be."""
        changed = stored if self.transform is None else self.transform(stored)
        if changed.shape == self.shape:
            return changed
        if [n for n in changed.shape if n != 1] != [n for n in self.shape if n != 1]:
            raise ValueError(f"{list(changed.shape)} is not {list(self.shape)}")
        return changed.reshape(self.shape)


@frozen(eq=False)
class Slot:
    """One parameter. Each of `ways` is a set of parts that fills it: the checkpoint holds one.

    A fused layer may be stored in parts or in one piece, a stack of experts one by one or as such.
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

        On one thread: memory is no faster with more, and torch's others, which wait for their
        next work without sleep, would be in the way of kernels that then repack the weight.
        Raises ValueError where other values than these are there already.
        """
        parameter: Tensor = getattr(self.module, self.attribute)
        if parameter.is_meta:
            held = torch.empty(self.shape, dtype=self.dtype, device=device)
            parameter = torch.nn.Parameter(held, requires_grad=False)
            setattr(self.module, self.attribute, parameter)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            piece, place = _take(part.view(tensor), part.source), parameter[part.target]
            if part.target in self._shared:
                if not torch.equal(_bytes(place), _bytes(piece.to(place))):
                    raise ValueError("differs from what the other parts of its layer have")
                return
            place.copy_(piece)
        finally:
            torch.set_num_threads(threads)
        if part.shared:
            self._shared.append(part.target)


@mutable(eq=False)
class Unit:
    """A module with its slots and what to do once they are all filled.

    `after` runs later still: modules that use this one's weight (a tied head) copy it there.
    """

    path: str
    module: torch.nn.Module
    slots: list[Slot] = field(factory=list)
    finish: Callable[[], None] | None = None
    waits_for: Unit | None = None


def _take(tensor: Tensor, region: Region) -> Tensor:
    """The region of a tensor, dimension by dimension."""
    for dim, wanted in enumerate(region):
        if isinstance(wanted, slice):
            tensor = tensor[(slice(None),) * dim + (wanted,)]
        else:
            tensor = tensor.index_select(dim, torch.tensor(wanted, device=tensor.device))
    return tensor


def _bytes(tensor: Tensor) -> Tensor:
    """What tells two tensors of one dtype apart, whatever the dtype."""
    return tensor.reshape(-1).view(torch.uint8)
