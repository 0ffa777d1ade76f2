"""Which layers of a model stay in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from attrs import frozen
from torch.nn import Module, ModuleList

from modulm.contracts.quantization import LinearKind, LinearSpec
from modulm.errors import ConfigError, UnsupportedError
from modulm_weight_transfer.overwrite import first_unit

if TYPE_CHECKING:
    from modulm.nn.weight_slots import Unit
    from modulm_weight_offload.flags import OffloadConfig

__all__ = ["HostLayer", "select_layers", "spec_of", "stack_of", "unit_bytes"]

_GIB = 2**30


@frozen(eq=False)
class HostLayer:
    """A layer of the stack, and its units that stay in host memory."""

    index: int
    module: Module
    units: tuple[Unit, ...]


def spec_of(unit: Unit) -> LinearSpec | None:
    """Return the spec of a unit that is a linear layer."""
    spec = getattr(unit.module, "spec", None)
    return spec if isinstance(spec, LinearSpec) else None


def unit_bytes(unit: Unit) -> int:
    """Return the memory of a unit's weights; of those that are quantized while they load, after."""
    size, method = 0, getattr(unit.module, "method", None)
    bits = float(getattr(method, "at_load_bits", 0.0))
    for slot in unit.slots:
        scaled = bits / 8 if bits and slot.attribute == "weight" else slot.dtype.itemsize
        size += int(prod(slot.shape) * scaled)
    return size


def stack_of(model: Module, units: Sequence[Unit]) -> list[Module]:
    """Return the layers of a model: the elements of the list of modules with most weights.

    Raises UnsupportedError for a model without such a list.
    """
    owners = [(id(unit.module), unit_bytes(unit)) for unit in units]
    best: tuple[int, list[Module]] = (0, [])
    for module in model.modules():
        if isinstance(module, ModuleList):
            inside = {id(each) for each in module.modules()}
            size = sum(number for owner, number in owners if owner in inside)
            if size > best[0]:
                best = size, list(module)
    if not best[1]:
        raise UnsupportedError(f"offloading: {type(model).__name__} has no list of layers")
    return best[1]


def select_layers(
    stack: Sequence[Module], units: Sequence[Unit], flags: OffloadConfig
) -> list[HostLayer]:
    """Choose the layers, and their units, that stay in host memory.

    Experts of --cpu-offload-experts are not among them. Raises ConfigError if none is chosen.
    """
    inside = _by_layer(stack, units, bool(flags.cpu_offload_experts))
    if not flags.backend:
        return []
    if flags.backend == "uva":
        chosen = dict(_within(inside, flags))
    else:
        size, inner = flags.offload_group_size, flags.offload_num_in_group
        if len(stack) < size:
            raise ConfigError(
                "offload_group_size", f"{size} is more than the {len(stack)} layers of the model"
            )
        chosen = {
            index: [unit for unit in layer if _is_named(unit, flags.offload_params)]
            for index, layer in inside.items()
            if index % size >= size - inner
        }
        _check_names("offload_params", flags.offload_params, chosen)
    layers = [
        HostLayer(index, stack[index], tuple(found)) for index, found in chosen.items() if found
    ]
    if not layers:
        raise ConfigError(flags.first_flag, "no weights of a layer are chosen; raise it")
    return layers


def _by_layer(
    stack: Sequence[Module], units: Sequence[Unit], without_experts: bool
) -> dict[int, list[Unit]]:
    """Return the units of each layer that belong to no other part of the model."""
    layers = {id(module): index for index, layer in enumerate(stack) for module in layer.modules()}
    families: dict[int, set[int | None]] = {}
    for unit in units:
        families.setdefault(id(first_unit(unit)), set()).add(layers.get(id(unit.module)))
    found: dict[int, list[Unit]] = {index: [] for index in range(len(stack))}
    for unit in units:
        index = layers.get(id(unit.module))
        spec = spec_of(unit)
        experts = without_experts and spec is not None and spec.kind is LinearKind.EXPERT
        if index is not None and not experts and families[id(first_unit(unit))] == {index}:
            found[index].append(unit)
    return found


def _within(
    inside: Mapping[int, Sequence[Unit]], flags: OffloadConfig
) -> Iterator[tuple[int, list[Unit]]]:
    """Yield the units that fit --cpu-offload-gb, from the first layer on."""
    _check_names("cpu_offload_params", flags.cpu_offload_params, inside)
    left = flags.cpu_offload_gb * _GIB
    for index, units in inside.items():
        chosen = []
        for unit in units:
            size = unit_bytes(unit)
            if size <= left and _is_named(unit, flags.cpu_offload_params):
                left -= size
                chosen.append(unit)
        yield index, chosen


def _check_names(field: str, patterns: Sequence[str], inside: Mapping[int, Sequence[Unit]]) -> None:
    """Raise ConfigError for a pattern that selects nothing."""
    units = [unit for layer in inside.values() for unit in layer]
    for pattern in patterns:
        if not any(_is_named(unit, (pattern,)) for unit in units):
            example = next((unit.path for unit in units), "")
            raise ConfigError(
                field, f"{pattern} is in the name of no weight; names are like {example}.weight"
            )


def _is_named(unit: Unit, patterns: Sequence[str]) -> bool:
    """Whether a weight of the unit has a name with the segments of a pattern; true without any."""
    names = {f"{unit.path}.{slot.attribute}" for slot in unit.slots}
    names |= {part.name for slot in unit.slots for way in slot.ways for part in way}
    return not patterns or any(
        f".{pattern}." in f".{name}." for name in names for pattern in patterns
    )
