"""What of a model's weights the flags leave in host memory, before they are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from modulm.errors import ConfigError
from modulm_weight_offload.contract import OffloadingPlatform
from modulm_weight_offload.flags import OffloadConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.platform import Platform
    from modulm.nn.weight_slots import Unit

__all__ = ["PlannedOffload", "offloading_platform", "planned_offload"]

#: Bytes of host memory that show whether the device reads it where it is.
_PROBE = 256


@frozen
class PlannedOffload:
    """Weights in host memory.

    shares: by the id of a unit, the fraction of its weights there; units that are left out stay on
    the device. layers: by the id of a unit, the number of its layer among those that are copied or
    mapped. buffers: how many the device has, each as large as the largest of these layers.
    """

    shares: Mapping[int, float] = field(factory=dict)
    layers: Mapping[int, int] = field(factory=dict)
    buffers: int = 0


def offloading_platform(flags: OffloadConfig, platform: Platform) -> OffloadingPlatform:
    """Return a platform whose weights can stay in host memory. Raises ConfigError."""
    if not isinstance(platform, OffloadingPlatform):
        raise ConfigError(
            flags.first_flag,
            f"platform {platform.name} has no memory of its own that weights could be moved out "
            "of; on CPUs --weights-memory mmap runs models that are larger than the memory",
        )
    return platform


def planned_offload(
    model: Any, units: Sequence[Unit], config: EngineConfig, platform: Platform
) -> PlannedOffload:
    """Return what loading a model with these units would leave in host memory.

    Raises what loading raises before it reads weights: ConfigError, UnsupportedError.
    """
    flags = config.group(OffloadConfig)
    if not flags.is_used:
        return PlannedOffload()
    copies = offloading_platform(flags, platform).host_copies()
    from modulm_weight_offload.experts import mixtures_of
    from modulm_weight_offload.selection import select_layers, stack_of

    chosen = select_layers(stack_of(model, units), units, flags)
    layers = {id(unit): n for n, layer in enumerate(chosen) for unit in layer.units}
    shares = dict.fromkeys(layers, 1.0)
    mixtures = mixtures_of(model, flags.cpu_offload_experts)
    parts = {id(stack): each.host_share for each in mixtures for stack in each.stacks}
    for unit in units:
        if id(unit.module) in parts and any(slot.attribute != "bias" for slot in unit.slots):
            shares[id(unit)] = parts[id(unit.module)]
    buffers = 0
    if chosen and flags.backend == "prefetch":
        buffers = min(flags.offload_prefetch_step, len(chosen))
    elif chosen:
        buffers = int(copies.mapped(copies.allocate(_PROBE)) is None)
    return PlannedOffload(shares, layers, buffers)
