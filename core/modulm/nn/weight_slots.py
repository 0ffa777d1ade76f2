"""Where checkpoint tensors go: one slot per parameter of the model, filled while loading.

Modules are made on the meta device: a slot gives its parameter memory when its first tensor
arrives, and the module is finished (repacked, originals dropped) when all of its own are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import field, frozen, mutable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Part", "Slot", "Unit"]

Region = tuple[slice, ...]


@frozen
class Part:
    """A checkpoint tensor that fills (a region of) a parameter.

    `shape` is what the file must hold; of that, `source` is what this rank takes and `target`
    is where it goes.
    """

    name: str
    shape: tuple[int, ...]
    source: Region = ()
    target: Region = ()


@frozen(eq=False)
class Slot:
    """One parameter. Either all of `parts` are in the checkpoint, or all of `whole`.

    `whole` is the same parameter stored in one piece under the fused layer's own name.
    """

    module: torch.nn.Module
    attribute: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    whole: tuple[Part, ...] = ()
    optional: bool = False

    def fill(self, part: Part, tensor: Tensor, device: torch.device) -> None:
        """Copy one tensor into place, converting its dtype.

        On one thread: memory is no faster with more, and torch's others, which wait for their
        next work without sleep, would be in the way of kernels that then repack the weight.
        """
        import torch

        parameter: Tensor = getattr(self.module, self.attribute)
        if parameter.is_meta:
            held = torch.empty(self.shape, dtype=self.dtype, device=device)
            parameter = torch.nn.Parameter(held, requires_grad=False)
            setattr(self.module, self.attribute, parameter)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            parameter[part.target].copy_(tensor[part.source])
        finally:
            torch.set_num_threads(threads)


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
