"""Quantization method: how linear layers store and apply weights (`modulm.quantization`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias

from attrs import evolve, field, frozen

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from modulm.contracts.ops import Ops
    from modulm.contracts.platform import Flags, Platform

__all__ = [
    "API", "INPUTS", "OUTPUTS", "PARTS", "Axis", "CheckpointInfo", "LinearKind", "LinearSpec",
    "MovableStack", "ParamSpec", "QuantizationMethod", "Region", "Shard", "Writer", "fixed",
]  # fmt: skip

API = 2

#: The part of each dimension of a tensor: a slice, or indices.
Region = tuple[slice | tuple[int, ...], ...]
#: `write(region, values, sparse=False)` overwrites a region of a layer's tensor.
Writer: TypeAlias = "Callable[..., None]"


@frozen
class CheckpointInfo:
    """What is known about a checkpoint before any weight is read.

    config: config.json. quantization: its `quantization_config`, if any. files: names of the files
    beside it. dtype: stored dtype of the weights. folder: of the files, if they are in one.
    """

    config: Mapping[str, object]
    quantization: Mapping[str, object] | None = None
    files: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    folder: Path | None = None


@frozen
class Shard:
    """This rank's part of a dimension: `size` of its `total` entries, starting at `start`."""

    start: int
    size: int
    total: int
    #: The former name of `total`.
    whole = property(lambda self: self.total)


class LinearKind(StrEnum):
    """The role of a linear layer in the model."""

    LINEAR = "linear"
    LM_HEAD = "lm_head"
    EMBEDDING = "embedding"
    ROUTER = "router"
    EXPERT = "expert"


@frozen
class LinearSpec:
    """A linear layer y = x W^T + b, possibly several fused side by side (q, k and v).

    name: module path ("model.layers.0.self_attn.qkv_proj"). parts: output sizes of the fused parts
    on this rank. experts: if > 0, the number of stacked layers of this shape. part_names: paths of
    the parts in the checkpoint (those of the first expert). expert_names: the same for all experts,
    with {expert} for the number. shards, input_shard, expert_shard: this rank's share of each part,
    of the inputs and of the experts; by default everything.
    """

    name: str
    inputs: int
    parts: tuple[int, ...]
    bias: bool
    dtype: str
    kind: LinearKind = field(default=LinearKind.LINEAR, converter=LinearKind)
    experts: int = 0
    part_names: tuple[str, ...] = ()
    _shards: tuple[Shard, ...] = ()
    _input_shard: Shard | None = None
    expert_names: tuple[str, ...] = ()
    _expert_shard: Shard | None = None

    @property
    def expert_shard(self) -> Shard:
        """This rank's share of the experts."""
        return self._expert_shard or Shard(0, self.experts, self.experts)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """This rank's share of each part."""
        return self._shards or tuple(Shard(0, size, size) for size in self.parts)

    @property
    def input_shard(self) -> Shard:
        """This rank's share of the inputs."""
        return self._input_shard or Shard(0, self.inputs, self.inputs)

    @property
    def outputs(self) -> int:
        """Total output size of all parts."""
        return sum(self.parts)

    def only(self, part: int) -> LinearSpec:
        """Return the spec of a single part."""
        one = slice(part, part + 1)
        names, shards = self.part_names[one], self.shards[one]
        return evolve(self, parts=self.parts[one], part_names=names, shards=shards)

    def output_block(self, block: int) -> int:
        """Return how many outputs share an entry of an axis `OUTPUTS.blocks(block)` on this rank.

        This is `block`, or a divisor of it if a part starts inside a block; entries are then
        repeated, so that output r always uses entry r // output_block(block).
        """
        starts = [shard.start for shard in self.shards]
        ends = accumulate(shard.total for shard in self.shards)
        joined = [start + end for start, end in zip(starts[1:], ends, strict=False)]
        return gcd(block, *starts, *joined, *accumulate(self.parts[:-1]))

    def input_block(self, block: int) -> int:
        """Return the same as `output_block` for an axis `INPUTS.blocks(block)`."""
        return gcd(block, self.input_shard.start)


@frozen
class Axis:
    """One dimension of a stored tensor and the dimension of the layer that it follows.

    along: "outputs", "inputs", "parts" (an entry per fused part) or "" (always `size` entries).
    Every `block` outputs or inputs have `entries` entries; the last block may be shorter.
    indivisible: blocks must not be split; otherwise entries are repeated if a part or a rank starts
    inside a block.
    """

    along: Literal["outputs", "inputs", "parts", ""]
    size: int = 1
    block: int = 1
    entries: int = 1
    indivisible: bool = False

    def blocks(self, block: int) -> Axis:
        """Return this axis with one entry per `block` values: scales, zero points."""
        return evolve(self, block=block)

    def packed(self, values: int, entries: int = 1) -> Axis:
        """Return this axis with each `values` values packed into `entries` indivisible entries.

        Words of eight 4-bit codes: 8 in 1. 3-bit codes: 32 in 3. Raw blocks: 32 in 34 bytes.
        """
        return evolve(self, block=values, entries=entries, indivisible=True)

    def local_size(self, spec: LinearSpec) -> int:
        """Return this rank's number of entries."""
        if self.along == "parts":
            return len(spec.parts)
        if self.along == "":
            return self.size
        size = spec.outputs if self.along == "outputs" else spec.inputs
        return -(-size // self.step(spec)) * self.entries

    def step(self, spec: LinearSpec) -> int:
        """Return how many outputs or inputs share `entries` entries on this rank."""
        if self.indivisible or self.block == 1:
            return self.block
        return (spec.output_block if self.along == "outputs" else spec.input_block)(self.block)


OUTPUTS = Axis("outputs")
INPUTS = Axis("inputs")
PARTS = Axis("parts")


def fixed(size: int) -> Axis:
    """Return an axis that always has `size` entries."""
    return Axis("", size)


@frozen
class ParamSpec:
    """A tensor of a layer that the checkpoint supplies, described by its axes.

    The axes determine which slice belongs to each part, expert and rank. With OUTPUTS the fused
    parts are side by side; with PARTS each part has its own entries (scales of q, k and v); with
    neither all parts share the values, and a checkpoint in which they differ is refused. Stacked
    experts add a leading dimension. Dimensions of size one may be missing in the file.

    transform: applied to a stored tensor before it is checked and sliced (transpose, unpack,
    bitcast, reorder); must also work on meta tensors. stored: name in the file, if it differs.
    part: the parameter belongs to this part only, for parts stored in different formats. optional:
    may be missing, and is None then.
    """

    axes: tuple[Axis, ...]
    dtype: str
    stored: str = ""
    part: int | None = None
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    optional: bool = False

    def shape(self, spec: LinearSpec) -> tuple[int, ...]:
        """Return the parameter's shape on this rank, with experts as the first dimension."""
        one = spec if self.part is None else spec.only(self.part)
        sizes = tuple(axis.local_size(one) for axis in self.axes)
        return (spec.experts, *sizes) if spec.experts else sizes


class MovableStack(Protocol):
    """A packed stack of experts that can be copied between ranks one by one."""

    def grow(self, experts: int) -> None:
        """Resize the stack to `experts` in place. New entries are undefined until `put`."""

    def memory(self, expert: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors of one expert; they must not be modified."""

    def put(self, expert: int, memory: Sequence[torch.Tensor]) -> None:
        """Overwrite an expert with a copy of another one's `memory`."""


class QuantizationMethod(ABC):
    """Creates, finishes and applies the weights of linear layers.

    One object serves all layers of a model; state of a layer is stored on its module. The driver's
    `Config` (attrs, frozen) is structured from the checkpoint's quantization table or from
    `--quantization-config`; unknown keys are errors.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    Config: ClassVar[type]
    #: Settings for the contract kit, if the defaults of `Config` quantize nothing.
    EXAMPLE: ClassVar[Mapping[str, object]] = {}
    #: Bits per weight that remain in memory, for methods that quantize plain checkpoints while they
    #: load; `modulm fit` suggests these. 0: weights keep the size that they are stored with.
    at_load_bits: ClassVar[float] = 0.0

    @classmethod
    @abstractmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        """Return why the checkpoint was written with this method, or None if it was not."""

    @classmethod
    def settings(cls, checkpoint: CheckpointInfo) -> Mapping[str, object]:
        """Return the checkpoint's settings; formats with a separate file read them from it."""
        return checkpoint.quantization or {}

    @classmethod
    @abstractmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        """Return why this method cannot store `spec` on `platform`, or None if it can.

        If the method quantizes while loading, a rejected layer stays unquantized.
        """

    #: Drivers annotate their type: `config: MyConfig`.
    config: object
    #: The engine's flag groups, set once the method exists; None: the defaults.
    flags: Flags | None = None

    def __init__(self, config: object, platform: Platform, ops: Ops) -> None:
        self.config = config
        self.platform = platform
        self.ops = ops

    @abstractmethod
    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        """Return the tensors that the checkpoint supplies, by name ("weight", ...), except bias."""

    def example(self, spec: LinearSpec, name: str) -> torch.Tensor | None:
        """Return typical values of the tensor `name` of `create`, which are broadcast to its shape.

        Estimates of memory and the contract kit fill layers with them. None: small numbers,
        positive scales, or random bits are typical. Needed for other codes, indices and settings,
        and for zero points that are usually zero.
        """
        return None

    def skips(self, name: str) -> bool:
        """Whether the checkpoint's settings leave layer `name` unquantized.

        Called for each layer, and for each of its parts by their names in the checkpoint.
        """
        return False

    def skips_fused(self, name: str) -> bool:
        """Whether the fused layer `name` is left unquantized.

        Override it if the settings list quantized layers; they may not list fused names.
        """
        return self.skips(name)

    def declines(self, spec: LinearSpec) -> str | None:
        """Return why settings leave a supported layer unquantized, or None."""
        return None

    def rename(self, name: str) -> str | None:
        """Return the name that `create` uses for a stored tensor, or None if it is not needed.

        `name` has been mapped by the model's own table of names.
        """
        return name

    def note(self, spec: LinearSpec) -> str | None:
        """Return a note for `modulm explain` about a layer stored unlike most others, or None."""
        return None

    def allocate(self, layer: torch.nn.Module, spec: LinearSpec) -> bool:
        """Make a layer whose tensors have no memory one that `writer` fills, as `finish` leaves it.

        Returns whether it did; otherwise the layer is unchanged. Spares a copy of the weight where
        it is read as it is kept, apart from its order. The memory may hold any values. A bias is
        allocated by the caller.
        """
        return False

    def finish(self, layer: torch.nn.Module, spec: LinearSpec) -> None:
        """Repack loaded tensors for `apply` and drop those no longer needed."""

    def writer(self, layer: torch.nn.Module, spec: LinearSpec, name: str) -> Writer | None:
        """Return a function that overwrites a region of the tensor `name` of a finished layer.

        It converts the values to the layer's form in place; updates of weights call it. Its keyword
        `sparse` says that values which are NaN leave those of the layer as they are. name: of
        `create`, or "bias". None: the tensor only changes when the layer is loaded again.
        """
        return None

    def share(self, head: torch.nn.Module, table: torch.nn.Module) -> None:
        """Called after `finish` for an LM head tied to the embedding table.

        The table may read its rows from the head's weight and drop its own copy.
        """

    @abstractmethod
    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Apply the layer: x [tokens, inputs] -> [tokens, outputs], in x's dtype."""

    def experts(self, layer: torch.nn.Module) -> object:
        """Return the stack of a layer of `kind == "expert"` for the op `fused_experts`.

        This is the op's packed form, or an object whose `[index]` is the weight [outputs, inputs]
        of one expert. Experts that move between ranks are a tensor [experts, ...] or a
        `MovableStack`.
        """
        raise UnsupportedError(f"quantization method {self.name} does not support experts yet")

    def embed(self, layer: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Look up rows of a layer of `kind == "embedding"`. ids: [tokens] int64."""
        rows: torch.Tensor = self.ops.embedding(ids, layer.get_parameter("weight"))
        return rows

    def dequantize(self, layer: torch.nn.Module, spec: LinearSpec) -> torch.Tensor:
        """Return the weight [outputs, inputs] in the layer's dtype (for absorbed attention)."""
        raise UnsupportedError(f"quantization method {self.name} cannot dequantize its weights")
