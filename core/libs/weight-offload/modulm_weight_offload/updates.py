"""Updates of weights that stay in host memory.

A layer that is copied ahead is brought into its buffer, where it is changed, and then copied back.
Experts that the CPU computes are overwritten where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from modulm.errors import UnsupportedError
from modulm_weight_transfer.elsewhere import MovedWeights

if TYPE_CHECKING:
    import torch

    from modulm.contracts.platform import Platform
    from modulm.contracts.quantization import Region, Writer
    from modulm.nn.weight_slots import Unit
    from modulm_weight_offload.experts import CpuExperts
    from modulm_weight_offload.ring import Ring

__all__ = ["OffloadedUpdates"]


class OffloadedUpdates(MovedWeights):
    """Reaches the weights of a model in host memory.

    ring: of the layers that are copied ahead, if any. layers: by the id of their units, their
    number in it. experts: by the id of a stack, its mixture and its index there.
    """

    def __init__(
        self,
        platform: Platform,
        ring: Ring | None,
        layers: Mapping[int, int],
        experts: Mapping[int, tuple[CpuExperts, int]],
    ) -> None:
        self._platform, self._ring = platform, ring
        self._layers, self._experts = layers, experts
        self._is_idle = False

    def _wait(self) -> None:
        """Wait for the steps that were launched, which read host memory."""
        if not self._is_idle:
            self._platform.synchronize()
            self._is_idle = True

    def fetch(self, unit: Unit) -> None:
        number = self._layers.get(id(unit))
        if number is not None and self._ring is not None:
            self._wait()
            self._ring.fetch(number)

    def store(self) -> None:
        self._is_idle = False
        if self._ring is not None:
            self._ring.store()

    def writer(self, unit: Unit, attribute: str) -> Writer | None:
        found = self._experts.get(id(unit.module))
        if found is None or attribute == "bias":
            return None
        return partial(self._overwrite, unit.module, *found)

    def check_reload(self, unit: Unit) -> None:
        if id(unit.module) in self._experts and any(s.attribute != "bias" for s in unit.slots):
            raise UnsupportedError(
                f"{unit.path}: weight updates with --cpu-offload-experts need experts that are "
                "stored as they are computed; leave the flag out"
            )

    def _overwrite(
        self,
        layer: Any,
        mixture: CpuExperts,
        index: int,
        region: Region,
        values: torch.Tensor,
        sparse: bool = False,
    ) -> None:
        """Overwrite the same region of some experts. values: [experts, ...], or of one expert."""
        self._wait()
        entries, *rest = region or (slice(None),)
        all_experts = range(layer.spec.experts)
        chosen = all_experts[entries] if isinstance(entries, slice) else entries
        stack = layer.method.experts(layer)
        rows = values if values.dim() == stack.dim() else values.unsqueeze(0)
        for expert, new in zip(chosen, rows, strict=True):
            target = mixture.weight(index, stack, expert)[tuple(rest)]
            kept = new.to(target.device, target.dtype)
            target.copy_(kept.where(~kept.isnan(), target) if sparse else kept)
