"""Groups of ranks that share a model. A single rank is a full object, too, never None."""

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
    """A group of `size` ranks, of which this process is rank `rank`.

    Layers and the worker call its collectives. In a group of one rank, each returns its input;
    groups of several ranks are a subclass that implements them.
    """

    rank: int = 0
    size: int = 1
    #: Layers of each pipeline stage; empty for an even split.
    layers: tuple[int, ...] = field(default=(), kw_only=True)
    #: Flag that sets the number of ranks, for messages.
    flag: str = field(default="tensor_parallel_size", kw_only=True)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, on each rank."""
        return self._single_rank(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' tensors concatenated along the last dimension, on each rank."""
        return self._single_rank(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the sum over all ranks; all ranks have equally many rows."""
        return self._single_rank(x)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return the tensor of rank `source`, on each rank. x: on other ranks, a tensor of that
        shape.
        """
        return self._single_rank(x)

    def send(self, x: Tensor, target: int) -> Tensor:
        """Send a tensor to rank `target`."""
        return self._single_rank(x)

    def recv(self, x: Tensor, source: int) -> Tensor:
        """Receive a tensor from rank `source`. x: a tensor of that shape."""
        return self._single_rank(x)

    def pass_on(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors of any shapes to the next rank."""
        self._single_rank(tensors)

    def take_over(self) -> tuple[Tensor, ...]:
        """Receive the tensors that the previous rank passed on."""
        return self._single_rank(())

    def part(self, total: int, what: str) -> int:
        """Return this rank's share of `total`. Raises UnsupportedError if it cannot be split
        evenly.
        """
        return self.shard(total, what).size

    def shard(self, total: int, what: str, least: int | None = None) -> Shard:
        """Return the position of this rank's share.

        least: the smallest unit (the channels of a KV head); with more ranks than units, several
        ranks hold the same one.
        """
        pieces, ranks = total // (least or 1), self.size
        if least is not None and pieces < ranks and ranks % pieces == 0:
            return Shard(self.rank * pieces // ranks * least, least, total)
        if pieces % ranks:
            unit = "" if least in (None, 1) else f" in pieces of {least}"
            raise UnsupportedError(
                f"{self.flag}: {what}: {total}{unit} cannot be split across {ranks} ranks"
            )
        size = total // ranks
        return Shard(self.rank * size, size, total)

    def stage(self, layers: int) -> range:
        """Return the layers of this pipeline stage; earlier stages get more if the split is uneven.

        Raises UnsupportedError if the configured partition does not add up to all layers.
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
        """Whether this is the first rank."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether this is the last rank."""
        return self.rank == self.size - 1

    def _single_rank(self, x: T) -> T:
        if self.size > 1:
            raise UnsupportedError(f"collectives between {self.size} ranks are not supported yet")
        return x


class SpreadExperts(Protocol):
    """Distributes tokens to experts on several ranks."""

    def layer(self, fused: Callable[..., Tensor], own: Shard, name: str) -> Callable[..., Tensor]:
        """Return the op `fused_experts` for a layer's experts, of which this rank holds `own`."""

    def report(self) -> np.ndarray | None:
        """Return [experts] int64: tokens routed to each since the last report, over all layers."""


@frozen
class Mesh:
    """The process groups of this process.

    tensor: ranks that share each layer. pipeline: ranks with some layers each. data: ranks that
    share experts but have their own requests. expert: ranks that share a layer's experts. context:
    ranks that share a sequence's tokens. world: all ranks of the model. spread: None if each rank
    computes the experts that it holds.
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
        """Whether this rank has the logits, samples, and returns a step's result."""
        return self.pipeline.last and self.tensor.first

    def cut_cache(self, spec: AttentionSpec, copies: int, what: str) -> AttentionSpec:
        """Return the spec of a layer whose cache would be replicated on `copies` ranks: `partial`
        if each rank holds some of the tokens instead.

        Raises UnsupportedError if the cache cannot be split.
        """
        return spec

    def attention(
        self, spec: AttentionSpec, choose: Callable[[AttentionSpec], AttentionBackend]
    ) -> AttentionBackend:
        """Return the backend for layers of a spec. choose: returns the backend for one rank's
        part.
        """
        return choose(spec)
