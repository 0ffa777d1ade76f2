"""Model: the computation of one architecture and its caches (group `modulm.models`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve, field, frozen

from modulm.contracts.attention import AttentionPlan, AttentionSpec
from modulm.contracts.recording import Recordable
from modulm.contracts.state import StatePlan, StateSpec
from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
    from pathlib import Path

    import torch

    from modulm.contracts.media import MediaItem
    from modulm.contracts.weight_names import WeightNames

__all__ = ["API", "Batch", "CacheKind", "CacheSpec", "Model", "MtpLayer", "StatePlan", "StateSpec"]

API = 1


class CacheKind(StrEnum):
    """What a cache group stores: keys and values, those of cross attention, or recurrent states."""

    ATTENTION = "attention"
    CROSS = "cross"
    STATE = "state"


@frozen
class CacheSpec:
    """The cache of one layer: paged keys and values, or a recurrent state.

    layer: module path. The entry's position in `Model.caches` is the layer's index into
    `Batch.caches`. Layers whose specs store the same kind of entries form a cache group with one
    block table. shares: an earlier layer whose cache this one reads. follows: an earlier attention
    layer whose block table this cache uses, although the specs differ (the indexer of a sparse
    attention layer).
    """

    layer: str
    spec: AttentionSpec | StateSpec
    shares: str | None = None
    follows: str | None = None


@frozen(eq=False)
class Batch(Recordable):
    """One step's input: rows of any lengths, concatenated.

    tokens, positions: [tokens] int64. query_starts: [rows + 1] int32. caches: one per CacheSpec of
    the model, in order. plans: one per cache group, and one per backend of layers that follow
    another's block table; cache i uses `plans[groups[i]]`. sample: [n] int64, indices of the tokens
    that need logits. embeds: [tokens, hidden], replaces the embedding where `embeds_mask` [tokens]
    is true; or None. axis_positions: [axes, tokens] int64 if some tokens have positions that differ
    by axis, else None. extras: tensors that only some models read ("token_types", ...). adapters:
    [tokens] int32, adapter slot of each token, or None if no adapter is used. carried: output of
    the previous pipeline stage, () in the first. encoded: [n, width], encoder outputs of the rows
    that start in this step, in order, for the caches of cross-attention layers; or None.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    query_starts: torch.Tensor
    caches: tuple[Any, ...]
    plans: tuple[AttentionPlan | StatePlan, ...]
    groups: tuple[int, ...]
    sample: torch.Tensor
    embeds: torch.Tensor | None = None
    embeds_mask: torch.Tensor | None = None
    axis_positions: torch.Tensor | None = None
    extras: Mapping[str, torch.Tensor] = field(factory=dict)
    adapters: torch.Tensor | None = None
    carried: tuple[torch.Tensor, ...] = ()
    encoded: torch.Tensor | None = None
    only_sampled: bool = False

    def plan(self, cache: int) -> Any:
        """Return the plan for the layer of cache `cache`: attention or state, by its spec."""
        return self.plans[self.groups[cache]]

    def key(self) -> Hashable | None:
        keys = tuple([plan.key() for plan in self.plans])
        inputs = (self.embeds, self.axis_positions, self.encoded)
        whole = not (self.carried or self.only_sampled)
        unrecordable = not whole or any(tensor is not None for tensor in inputs)
        return None if None in keys or unrecordable else (keys, tuple(self._own()))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self._own().values(), *(t for plan in self.plans for t in plan.tensors()))

    def tables(self) -> tuple[torch.Tensor, ...]:
        return tuple([table for plan in self.plans for table in plan.tables()])

    def over(self, tensors: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]) -> Batch:
        left, tables_left = iter(tensors), iter(tables)
        own: dict[str, Any] = {name: next(left) for name in self._own()}
        extras = {name: own.pop(name) for name in self.extras}
        plans = tuple(
            plan.over(
                tuple(islice(left, len(plan.tensors()))),
                tuple(islice(tables_left, len(plan.tables()))),
            )
            for plan in self.plans
        )
        return evolve(self, plans=plans, extras=extras, **own)

    def _own(self) -> Mapping[str, torch.Tensor]:
        """The batch's tensors, without those of its plans."""
        tensors = {
            "tokens": self.tokens,
            "positions": self.positions,
            "query_starts": self.query_starts,
            "sample": self.sample,
            "embeds": self.embeds,
            "embeds_mask": self.embeds_mask,
            "adapters": self.adapters,
            "axis_positions": self.axis_positions,
        }
        return {**{name: t for name, t in tensors.items() if t is not None}, **self.extras}


@frozen
class MtpLayer:
    """A multi-token prediction layer of a checkpoint, used for drafting (arXiv 2412.19437).

    Its input is a projection of two concatenated vectors: the normalized embedding of a token and
    the normalized hidden state of the token before it.

    layer: builds it, given a `modulm.nn.Builder` at the path `at`. hidden: width. embedding_norm,
    hidden_norm, project, norm: module paths in the checkpoint; norm precedes the head, "" for none.
    offset: added to the norms' weights. state_first: the hidden state comes first in the
    concatenation. normed: the next draft continues from the output of `norm`, not from its input.
    """

    layer: Callable[[Any], torch.nn.Module]
    at: str
    hidden: int
    eps: float
    embedding_norm: str
    hidden_norm: str
    project: str
    norm: str = ""
    offset: float = 0.0
    state_first: bool = False
    normed: bool = False


class Model(ABC):
    """One architecture. Concrete models are also `torch.nn.Module`s (see modulm-layers).

    A model defines the computation. Dtype, device, ranks, quantization, attention backend and
    weight names come from the builder that it is constructed with.
    """

    api: ClassVar[int | tuple[int, int]]
    #: attrs class that config.json is structured into; missing or invalid keys are errors.
    config_type: ClassVar[type]
    #: Supported tasks: "generate", or pooling tasks ("embed", "classify", "score", ...).
    tasks: ClassVar[tuple[str, ...]] = ("generate",)
    #: The pooler of a generating model's pooling tasks; empty if it has none.
    pooler: ClassVar[str] = ""
    #: "package.module:attribute" of a reference implementation for the contract kit, where
    #: transformers has none (`modulm.testing.oracles`).
    oracle: ClassVar[str] = ""
    #: Number of position axes (3 for time, height and width of an image).
    axes: ClassVar[int] = 1
    #: Whether `Batch.embeds` may replace tokens; False if the model needs their ids as well.
    takes_embeds: bool = True
    #: Whether it runs Python code from the checkpoint, which needs --trust-remote-code.
    remote_code: ClassVar[bool] = False
    #: Whether its code keeps the bits of a token's result, whatever else is in the step, if the
    #: attention backend and the ops do. For a text model of another model, too.
    batch_invariant: ClassVar[bool] = True
    #: Kinds of media that `encode` accepts ("image", "audio", "video").
    media: ClassVar[tuple[str, ...]] = ()
    #: Media family of its prompts; empty: named like the architecture in config.json.
    media_family: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def weights(cls, config: Any) -> WeightNames:
        """Return how checkpoint names map to the model's (`modulm.loading.WeightNames`)."""

    @classmethod
    def mtp(cls, config: Any) -> MtpLayer | None:
        """Return the multi-token prediction layer of its checkpoints, or None."""
        return None

    @classmethod
    @abstractmethod
    def tiny(cls) -> Mapping[str, Any]:
        """Return the config.json of a tiny random checkpoint for tests.

        It must load in transformers, or in the driver's `oracle`.
        """

    def load(self, checkpoint: Path) -> bool:
        """Load the weights without the builder's slots; return whether that was done.

        For models that another library loads and runs. They may register their caches here instead
        of on construction. Raises CheckpointError.
        """
        return False

    @property
    @abstractmethod
    def caches(self) -> tuple[CacheSpec, ...]:
        """One entry per layer with a cache, in layer order.

        Empty for encoders. The prompts of a model without caches run in a single step.
        """

    @property
    def pooling(self) -> str:
        """Default pooling type: "LAST" token, "CLS" (the first) or "MEAN" of all tokens."""
        return "LAST"

    def encode(self, items: Sequence[MediaItem]) -> Sequence[torch.Tensor]:
        """Encode media items: returns [item.length, hidden] for each, in order.

        There may be additional columns; they arrive in `Batch.embeds`. Kinds may be mixed. Items of
        one call may be computed together.
        """
        raise UnsupportedError(f"{type(self).__name__} does not support images, video or audio")

    def encode_in_pieces(
        self, items: Sequence[MediaItem]
    ) -> Generator[int, None, Sequence[torch.Tensor]]:
        """Encode like `encode`, bit for bit, yielding where other work may run in between.

        Each yield is the number of rows (patches, frames) that passed through a layer since the
        last one, at least 1. Yields depend only on the items, so they are the same on all ranks.
        The default never yields.
        """
        yield from ()
        return self.encode(items)

    @abstractmethod
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute hidden states after the final norm: [tokens, hidden]."""

    def states(self, batch: Batch, layers: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Compute the result of `forward` and the outputs of single layers, each [tokens, hidden].

        layers: indices from 0. A layer's output is the residual stream after it.
        """
        raise UnsupportedError(f"{type(self).__name__} does not return states of single layers")

    def embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed tokens as inputs of the first layer: [n] int64 -> [n, hidden]."""
        raise UnsupportedError(f"{type(self).__name__} does not provide its token embedding")

    def carry(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Run a pipeline stage that is not the last one, in place of `forward`.

        Returns the next stage's `Batch.carried`: tensors [tokens, hidden].
        """
        raise UnsupportedError(f"{type(self).__name__} does not support pipeline parallelism yet")

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits: [n, hidden] -> [n, vocabulary]."""
