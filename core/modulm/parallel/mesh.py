"""Ranks that share a model. One rank is the ordinary case and a full object, never None."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from attrs import field, frozen

from modulm.contracts.quantization import Shard
from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from torch import Tensor

    from modulm.contracts.attention import AttentionBackend, AttentionSpec

__all__ = ["Mesh", "ProcessGroup", "SpreadExperts"]

T = TypeVar("T")


@frozen
class ProcessGroup:
    """A group of `size` ranks, of which this process is number `rank`.

    The collectives are what layers and the worker call; alone, each returns its input. A group of
    several ranks is a subclass with real ones.
    """

    rank: int = 0
    size: int = 1
    #: Layers of each rank where they run one after the other; none: as equal as possible.
    layers: tuple[int, ...] = field(default=(), kw_only=True)
    #: What says how many ranks there are, for people.
    flag: str = field(default="tensor_parallel_size", kw_only=True)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, on each of them."""
        return self._alone(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors side by side along the last dimension, on each of them."""
        return self._alone(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum over all ranks, which all have equally many."""
        return self._alone(x)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """What rank `source` has, on each of them; x: of the shape to come elsewhere."""
        return self._alone(x)

    def send(self, x: Tensor, target: int) -> Tensor:
        """Give a tensor to rank `target`, which receives it."""
        return self._alone(x)

    def recv(self, x: Tensor, source: int) -> Tensor:
        """What rank `source` sends; x: of the shape to come."""
        return self._alone(x)

    def pass_on(self, tensors: Sequence[Tensor]) -> None:
        """Give tensors to the next rank, whatever their shapes."""
        self._alone(tensors)

    def take_over(self) -> tuple[Tensor, ...]:
        """What the rank before passed on."""
        return self._alone(())

    def part(self, total: int, what: str) -> int:
        """This rank's share of `total`. Raises UnsupportedError if it cannot be cut evenly."""
        return self.shard(total, what).size

    def shard(self, total: int, what: str, least: int | None = None) -> Shard:
        """Where that share lies. least: what cannot be cut any more (the channels of a head of
        keys); where ranks are more than there are of these, several ranks hold the same.
        """
        pieces, ranks = total // (least or 1), self.size
        if least is not None and pieces < ranks and ranks % pieces == 0:
            return Shard(self.rank * pieces // ranks * least, least, total)
        if pieces % ranks:
            unit = "" if least in (None, 1) else f" in pieces of {least}"
            raise UnsupportedError(
                f"{self.flag}: {what}: {total}{unit} cannot be cut for {ranks} ranks"
            )
        size = total // ranks
        return Shard(self.rank * size, size, total)

    def stage(self, layers: int) -> range:
        """The layers of this rank where they run one rank after the other, the first ones more.
        Raises UnsupportedError if those that are given are not all of them.
        """
        if self.layers:
            if len(self.layers) != self.size or sum(self.layers) != layers:
                raise UnsupportedError(
                    f"pipeline_layer_partition: {layers} layers for {self.size} stages, not "
                    f"{', '.join(map(str, self.layers))}"
                )
            first = sum(self.layers[: self.rank])
            return range(first, first + self.layers[self.rank])
        each, more = divmod(layers, self.size)
        first = self.rank * each + min(self.rank, more)
        return range(first, first + each + (self.rank < more))

    @property
    def first(self) -> bool:
        """Whether nobody is before this rank."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether nobody is after it."""
        return self.rank == self.size - 1

    def _alone(self, x: T) -> T:
        if self.size > 1:
            raise UnsupportedError(f"collectives between {self.size} ranks: not yet")
        return x


class SpreadExperts(Protocol):
    """How tokens reach experts that are spread over ranks."""

    def layer(self, fused: Callable[..., Tensor], own: Shard, name: str) -> Callable[..., Tensor]:
        """The op `fused_experts` for a layer's experts, of which this rank loads `own`."""

    def report(self) -> np.ndarray | None:
        """[experts] int64: tokens that chose each since the last report, in all layers."""


@frozen
class Mesh:
    """The groups of this process, by what their ranks share.

    tensor: each layer; pipeline: the model, some layers each; data: the experts, while each has
    requests of its own; expert: the experts of a layer; context: the tokens of a sequence; world:
    the model, so all of tensor and pipeline. spread: None where each rank computes the experts that
    it loads.
    """

    tensor: ProcessGroup = field(factory=ProcessGroup)
    pipeline: ProcessGroup = field(factory=ProcessGroup)
    data: ProcessGroup = field(factory=ProcessGroup)
    expert: ProcessGroup = field(factory=ProcessGroup)
    context: ProcessGroup = field(factory=ProcessGroup)
    world: ProcessGroup = field(factory=ProcessGroup)
    spread: SpreadExperts | None = None

    @property
    def gives(self) -> bool:
        """Whether this rank has the logits, samples, and gives a step's result."""
        return self.pipeline.last and self.tensor.first

    def cut_cache(self, spec: AttentionSpec, copies: int, what: str) -> AttentionSpec:
        """The spec of a layer whose cache `copies` ranks of `tensor` would hold alike: `partial` if
        each holds some of the tokens instead. Raises UnsupportedError if it cannot be cut.
        """
        return spec

    def attention(
        self, spec: AttentionSpec, choose: Callable[[AttentionSpec], AttentionBackend]
    ) -> AttentionBackend:
        """The backend for layers of a spec; choose: the one for what a single rank attends to."""
        return choose(spec)
