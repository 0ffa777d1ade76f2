"""Quantization method: how a linear layer keeps and applies its weight (`modulm.quantization`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from attrs import evolve, field, frozen

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from modulm.contracts.ops import Ops
    from modulm.contracts.platform import Platform

__all__ = [
    "API",
    "INPUTS",
    "OUTPUTS",
    "PARTS",
    "Axis",
    "CheckpointInfo",
    "LinearKind",
    "LinearSpec",
    "MovableStack",
    "ParamSpec",
    "QuantizationMethod",
    "Shard",
    "fixed",
]

API = 2


@frozen
class CheckpointInfo:
    """What is known of a checkpoint before any weight is read.

    `config` is config.json; `quantization` its `quantization_config` table, if it has one;
    `files` the names of the files beside it; `dtype` the dtype the weights are stored in;
    `folder` where they lie, if they lie in one.
    """

    config: Mapping[str, object]
    quantization: Mapping[str, object] | None = None
    files: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    folder: Path | None = None


@frozen
class Shard:
    """What this rank holds of a dimension: `size` of its `whole` entries, from `start`."""

    start: int
    size: int
    whole: int


class LinearKind(StrEnum):
    """What a linear map is in the model."""

    LINEAR = "linear"
    LM_HEAD = "lm_head"
    EMBEDDING = "embedding"
    ROUTER = "router"
    EXPERT = "expert"


@frozen
class LinearSpec:
    """One linear map y = x W^T + b, possibly several stored side by side (q, k and v).

    `name` is the module's path ("model.layers.0.self_attn.qkv_proj"), `parts` the output sizes
    of the fused pieces on this rank. `experts` > 0 means that many maps of this shape stacked in
    front.
    `part_names` are the paths that a checkpoint gives the parts (those of the first expert, and
    `expert_names` those of all, with {expert} for its number).
    `shards`, `input_shard` and `expert_shard` are where the parts, inputs and experts of this rank
    lie in the whole ones; without them they are whole.
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
        """What this rank holds of the experts."""
        return self._expert_shard or Shard(0, self.experts, self.experts)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """What this rank holds of each part."""
        return self._shards or tuple(Shard(0, size, size) for size in self.parts)

    @property
    def input_shard(self) -> Shard:
        """What this rank holds of the inputs."""
        return self._input_shard or Shard(0, self.inputs, self.inputs)

    @property
    def outputs(self) -> int:
        """Output size of all parts together."""
        return sum(self.parts)

    def only(self, part: int) -> LinearSpec:
        """The map of one of the parts."""
        one = slice(part, part + 1)
        names, shards = self.part_names[one], self.shards[one]
        return evolve(self, parts=self.parts[one], part_names=names, shards=shards)

    def output_block(self, block: int) -> int:
        """How many outputs share an entry of an axis `OUTPUTS.blocks(block)` on this rank.

        That is `block`, or less where a part begins inside a block: entries are then repeated,
        so that output r always has entry r // output_block(block).
        """
        starts = [shard.start for shard in self.shards]
        ends = accumulate(shard.whole for shard in self.shards)
        joined = [start + end for start, end in zip(starts[1:], ends, strict=False)]
        return gcd(block, *starts, *joined, *accumulate(self.parts[:-1]))

    def input_block(self, block: int) -> int:
        """The same for an axis `INPUTS.blocks(block)`."""
        return gcd(block, self.input_shard.start)


@frozen
class Axis:
    """One dimension of a stored tensor, and what of the layer it runs along.

    `along`: "outputs", "inputs", "parts" (an entry for each fused part) or "" (`size` entries,
    whatever the layer). Each `block` of the layer's numbers have `entries` entries together; the
    last block may hold fewer numbers. `whole`: blocks must not be cut; else entries are repeated
    where a part or a rank begins inside a block.
    """

    along: Literal["outputs", "inputs", "parts", ""]
    size: int = 1
    block: int = 1
    entries: int = 1
    whole: bool = False

    def blocks(self, block: int) -> Axis:
        """This axis with an entry for each `block` numbers: scales, zero points."""
        return evolve(self, block=block)

    def packed(self, values: int, entries: int = 1) -> Axis:
        """This axis with `values` numbers in `entries` entries that cannot be taken apart.

        Words of eight 4-bit codes: 8 in 1; of 3-bit codes: 32 in 3; raw blocks: 32 in 34 bytes.
        """
        return evolve(self, block=values, entries=entries, whole=True)

    def held(self, spec: LinearSpec) -> int:
        """How many entries this rank has of it."""
        if self.along == "parts":
            return len(spec.parts)
        if self.along == "":
            return self.size
        size = spec.outputs if self.along == "outputs" else spec.inputs
        return -(-size // self.step(spec)) * self.entries

    def step(self, spec: LinearSpec) -> int:
        """How many outputs or inputs have `entries` entries together on this rank."""
        if self.whole or self.block == 1:
            return self.block
        return (spec.output_block if self.along == "outputs" else spec.input_block)(self.block)


OUTPUTS = Axis("outputs")
INPUTS = Axis("inputs")
PARTS = Axis("parts")


def fixed(size: int) -> Axis:
    """An axis of `size` entries, whatever the layer."""
    return Axis("", size)


@frozen
class ParamSpec:
    """A tensor that the checkpoint supplies for a layer, by what its dimensions run along.

    `axes` say all that is needed to find each part, expert and rank its place: with OUTPUTS the
    fused parts lie side by side, with PARTS each has entries of its own (the scale of q, of k, of
    v), with neither all parts share the values and a checkpoint in which they differ is refused.
    A stack of experts puts one more dimension in front by itself. Dimensions of size one may be
    there in the file or not.

    `transform` changes a stored piece before it is checked and cut: transpose, unpack, bitcast,
    reorder. It must also work on tensors of the meta device. `stored` is the name in the file
    where it is not the parameter's. `part`: the parameter is that one's of the fused parts alone
    (parts stored in different forms). `optional`: may be missing, and is None then.
    """

    axes: tuple[Axis, ...]
    dtype: str
    stored: str = ""
    part: int | None = None
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    optional: bool = False

    def shape(self, spec: LinearSpec) -> tuple[int, ...]:
        """The parameter's shape on this rank, experts in front."""
        one = spec if self.part is None else spec.only(self.part)
        found = tuple(axis.held(one) for axis in self.axes)
        return (spec.experts, *found) if spec.experts else found


class MovableStack(Protocol):
    """A packed stack of experts whose members are copied between ranks."""

    def grow(self, experts: int) -> None:
        """Make room for this many experts, in place. New entries are undefined until `put`."""

    def memory(self, expert: int) -> tuple[torch.Tensor, ...]:
        """The tensors that hold one expert, for reading."""

    def put(self, expert: int, memory: Sequence[torch.Tensor]) -> None:
        """Replace an expert by a copy of another one's `memory`."""


class QuantizationMethod(ABC):
    """Creates, finishes and applies the weights of linear layers.

    One object serves all layers of a model; what differs per layer is kept on the layer module.
    The driver's `Config` (attrs, frozen) is structured from the checkpoint's quantization table
    or from `--quantization-config`, unknown keys forbidden.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    Config: ClassVar[type]
    #: Settings that the contract kit takes, where the defaults of `Config` quantize nothing.
    EXAMPLE: ClassVar[Mapping[str, object]] = {}

    @classmethod
    @abstractmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        """A reason why this method is the one the checkpoint was written with, or None."""

    @classmethod
    def settings(cls, checkpoint: CheckpointInfo) -> Mapping[str, object]:
        """What the checkpoint says to the method; formats with a file of their own read it."""
        return checkpoint.quantization or {}

    @classmethod
    @abstractmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        """A reason why this method cannot hold `spec` on `platform`, or None if it can.

        A rejected layer of a method that quantizes at load stays unquantized.
        """

    #: A driver says in its class body which: `config: MyConfig`.
    config: object

    def __init__(self, config: object, platform: Platform, ops: Ops) -> None:
        self.config = config
        self.platform = platform
        self.ops = ops

    @abstractmethod
    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        """The tensors the checkpoint supplies, by name ("weight", "scales", ...), bias excluded."""

    def skips(self, name: str) -> bool:
        """Whether the layer called `name` is left unquantized by the checkpoint's settings.

        Asked for a layer, and for each of its parts by the name that the checkpoint gives it.
        """
        return False

    def skips_fused(self, name: str) -> bool:
        """The same for several layers fused, by the name of the whole: a checkpoint that lists what
        is quantized, not what is not, need not know it.
        """
        return self.skips(name)

    def declines(self, spec: LinearSpec) -> str | None:
        """A reason why settings leave a layer unquantized that `rejects` lets through, or None."""
        return None

    def rename(self, name: str) -> str | None:
        """The name by which `create` asks for what is stored as `name`, or None if it is needless.

        `name` is what the model's own table of names made of it.
        """
        return name

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

    def experts(self, layer: torch.nn.Module) -> object:
        """The stack that `kind == "expert"` created, as the op `fused_experts` takes it.

        That is the op's own packed form, or anything that gives the weight [outputs, inputs] of
        one expert by its index. Experts that move between ranks are a tensor [experts, ...] or a
        `MovableStack`.
        """
        raise UnsupportedError(f"quantization method {self.name} does not hold experts: not yet")

    def embed(self, layer: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Rows of an embedding table that `kind == "embedding"` created; ids: [tokens] int64."""
        rows: torch.Tensor = self.ops.embedding(ids, layer.get_parameter("weight"))
        return rows

    def dequantize(self, layer: torch.nn.Module, spec: LinearSpec) -> torch.Tensor:
        """The weight as [outputs, inputs] in the layer's dtype (LoRA merge, absorbed attention)."""
        raise UnsupportedError(f"quantization method {self.name} cannot give its weights back")
