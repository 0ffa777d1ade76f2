"""The quantization_config of compressed-tensors: schemes and the layers that they apply to."""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import field, frozen, validators

from modulm_quantized import matches

__all__ = ["CompressedTensorsConfig", "Group", "Sparsity", "Weights"]

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "nvfp4-pack-quantized",
    "marlin-24",
)
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
#: Targets that match every linear layer.
_LINEAR = frozenset({"Linear", "Conv1D", "Parallel", "ReplicatedLinear"})


@frozen
class Weights:
    """How a scheme stores weights (`QuantizationArgs`)."""

    OPEN_ENDED: ClassVar[bool] = True

    num_bits: int = 8
    type: str = field(default="int", validator=validators.in_(("int", "float")))
    symmetric: bool = True
    strategy: str | None = field(
        default=None, validator=validators.optional(validators.in_(_STRATEGIES))
    )
    group_size: int | None = None
    block_structure: tuple[int, ...] | None = None

    @property
    def scope(self) -> str:
        """What shares a scale; derived from the group size if the file does not state it."""
        if self.strategy is not None:
            return self.strategy
        if self.group_size is None:
            return "tensor"
        return "channel" if self.group_size == -1 else "group"

    def check_marlin(self, name: str) -> None:
        """Raise ValueError for settings that marlin-24 does not support."""
        grouped = self.scope == "group" and self.group_size == 128
        if self.num_bits not in (4, 8) or not (grouped or self.scope == "channel"):
            raise ValueError(
                f"config_groups.{name}.weights: marlin-24 needs 4 or 8 bits and a scale per output "
                "or per 128 inputs"
            )


@frozen
class Group:
    """An entry of `config_groups`: layers and how they are stored."""

    targets: tuple[str, ...] = ()
    weights: Weights | None = None
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None

    def matches_layer(self, name: str) -> bool:
        """Whether the layer is a target."""
        return bool(_LINEAR & set(self.targets)) or matches(name, self.targets)

    @property
    def integers(self) -> bool:
        """Whether activations are 8-bit integers."""
        activations = self.input_activations or {}
        return activations.get("type", "int") == "int" and activations.get("num_bits") == 8

    @property
    def floats(self) -> bool:
        """Whether activations are 8-bit floats."""
        activations = self.input_activations or {}
        return activations.get("type") == "float" and activations.get("num_bits") == 8

    @property
    def four_bit_floats(self) -> bool:
        """Whether activations are 4-bit floats."""
        activations = self.input_activations or {}
        return activations.get("type") == "float" and activations.get("num_bits") == 4


@frozen
class Sparsity:
    """`sparsity_config`: layers with 2:4 sparsity, stored without zeros."""

    OPEN_ENDED: ClassVar[bool] = True

    format: str = field(default="dense", validator=validators.in_(("dense", "sparse-24-bitmask")))
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] | None = None

    def matches_layer(self, name: str) -> bool:
        """Whether the layer is stored without zeros."""
        if self.format == "dense" or matches(name, self.ignore or ()):
            return False
        return bool(_LINEAR & set(self.targets)) or matches(name, self.targets)


@frozen
class CompressedTensorsConfig:
    """`quantization_config` of config.json. Keys on how weights were computed are ignored."""

    OPEN_ENDED: ClassVar[bool] = True

    quant_method: str = "compressed-tensors"
    format: str = "pack-quantized"
    config_groups: dict[str, Group] = field(factory=dict)
    ignore: tuple[str, ...] | None = None
    quantization_status: str = "compressed"
    sparsity_config: Sparsity | None = None
    transform_config: dict[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        if not self.config_groups and self.sparsity_config is None:
            raise ValueError(
                "config_groups: missing; plain checkpoints cannot be quantized at load"
            )
        if (self.transform_config or {}).get("config_groups"):
            raise ValueError("transform_config: transforms of activations are not supported yet")
        if self.quantization_status not in ("compressed", "frozen"):
            raise ValueError(
                f"quantization_status: must be compressed, not {self.quantization_status!r}"
            )
        for name, group in self.config_groups.items():
            if group.weights is not None and self.stored_as(group) not in FORMATS:
                raise ValueError(
                    f"config_groups.{name}.format: {self.stored_as(group)!r}; "
                    f"supported: {', '.join(FORMATS)}"
                )
            if group.weights is not None and self.stored_as(group) == "marlin-24":
                group.weights.check_marlin(name)

    def stored_as(self, group: Group) -> str:
        """Return the format of a group's files."""
        return group.format or self.format

    def sparse(self, name: str) -> bool:
        """Whether a layer is stored without zeros."""
        return self.sparsity_config is not None and self.sparsity_config.matches_layer(name)

    def group(self, name: str) -> Group | None:
        """Return a layer's scheme: of the group that names it, else of the group for all layers."""
        if matches(name, self.ignore or ()):
            return None
        groups = [
            candidate for candidate in self.config_groups.values() if candidate.matches_layer(name)
        ]
        groups.sort(key=lambda candidate: not matches(name, candidate.targets))
        return groups[0] if groups and groups[0].weights is not None else None
