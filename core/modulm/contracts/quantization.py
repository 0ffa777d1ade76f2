"""Quantization method: how a linear layer keeps and applies its weight (`modulm.quantization`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from modulm.contracts.ops import Ops
    from modulm.contracts.platform import Platform

__all__ = [
    "API",
    "CheckpointInfo",
    "LinearSpec",
    "ParamSpec",
    "QuantizationMethod",
]

API = 1


@frozen
class CheckpointInfo:
    """What is known of a checkpoint before any weight is read.

    `config` is config.json; `quantization` its `quantization_config` table, if it has one;
    `files` the names of the files beside it; `dtype` the dtype the weights are stored in.
    """

    config: Mapping[str, Any]
    quantization: Mapping[str, Any] | None = None
    files: tuple[str, ...] = ()
    dtype: str = "bfloat16"


@frozen
class LinearSpec:
    """One linear map y = x W^T + b, possibly several stored side by side (q, k and v).

    `name` is the module's path ("model.layers.0.self_attn.qkv_proj"), `parts` the output sizes
    of the fused pieces on this rank, `kind` is "linear", "lm_head", "embedding", "router" or
    "expert".
    `experts` > 0 means that many maps of this shape stacked in front.
    """

    name: str
    inputs: int
    parts: tuple[int, ...]
    bias: bool
    dtype: str
    kind: str = "linear"
    experts: int = 0

    @property
    def outputs(self) -> int:
        """Output size of all parts together."""
        return sum(self.parts)


@frozen
class ParamSpec:
    """A tensor that the checkpoint supplies for a layer.

    `output_dim` is the dimension along which fused parts are laid side by side (None: shared by
    all parts), `input_dim` the one along which a row-parallel layer is cut; `scale` is how many
    values of the unquantized dimension one entry stands for (8 for eight 4-bit values per word).
    """

    shape: tuple[int, ...]
    dtype: str
    output_dim: int | None = None
    input_dim: int | None = None
    output_scale: int = 1
    input_scale: int = 1
    optional: bool = False


class QuantizationMethod(ABC):
    """Creates, finishes and applies the weights of linear layers.

    One object serves all layers of a model; what differs per layer is kept on the layer module.
    The driver's `Config` (attrs, frozen) is structured from the checkpoint's quantization table
    or from `--quantization-config`, unknown keys forbidden.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    Config: ClassVar[type]

    @classmethod
    @abstractmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        """A reason why this method is the one the checkpoint was written with, or None."""

    @classmethod
    @abstractmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        """A reason why this method cannot hold `spec` on `platform`, or None if it can.

        A rejected layer of a method that quantizes at load stays unquantized.
        """

    def __init__(self, config: Any, platform: Platform, ops: Ops) -> None:
        self.config = config
        self.platform = platform
        self.ops = ops

    @abstractmethod
    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        """The tensors the checkpoint supplies, by name ("weight", "scales", ...), bias excluded."""

    def skips(self, name: str) -> bool:
        """Whether the layer called `name` is left unquantized by the checkpoint's settings."""
        return False

    def note(self, spec: LinearSpec) -> str | None:
        """What `modulm explain` says of a layer that is held in another form than most."""
        return None

    def finish(self, layer: torch.nn.Module, spec: LinearSpec) -> None:
        """After loading: repack into what `apply` wants and drop what it does not need."""

    def share(self, head: torch.nn.Module, table: torch.nn.Module) -> None:
        """After `finish` of a head whose weight is the embedding table's, both of this method:
        the table may take its rows from what the head holds and drop its own copy.
        """

    @abstractmethod
    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x: [tokens, inputs] -> [tokens, outputs], in x's dtype."""

    def experts(self, layer: torch.nn.Module) -> Any:
        """The stack that `kind == "expert"` created, as the op `fused_experts` takes it.

        That is the op's own packed form, or anything that gives the weight [outputs, inputs] of
        one expert by its index.
        """
        raise UnsupportedError(f"quantization method {self.name} does not hold experts: not yet")

    def embed(self, layer: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Rows of an embedding table that `kind == "embedding"` created; ids: [tokens] int64."""
        rows: torch.Tensor = self.ops.embedding(ids, layer.get_parameter("weight"))
        return rows

    def dequantize(self, layer: torch.nn.Module, spec: LinearSpec) -> torch.Tensor:
        """The weight as [outputs, inputs] in the layer's dtype (LoRA merge, absorbed attention)."""
        raise UnsupportedError(f"quantization method {self.name} cannot give its weights back")
