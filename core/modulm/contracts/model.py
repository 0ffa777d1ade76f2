"""Model: the mathematics of one architecture, and what it keeps (group `modulm.models`)."""

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
    """What a cache group keeps: keys and values, those of cross attention, or states."""

    ATTENTION = "attention"
    CROSS = "cross"
    STATE = "state"


@frozen
class CacheSpec:
    """One layer that keeps something between steps: a paged cache or a state.

    `layer` is the module path; its position in the model's list is the index by which the layer
    finds its cache in `Batch.caches`. Layers whose `spec` agree in what they keep form a group
    with one block table. `shares` names an earlier layer whose cache this one reads. `follows`
    names an earlier layer with keys and values, by whose block table this one keeps its own: they
    are one group however their specs differ (the indexer of a sparse attention layer).
    """

    layer: str
    spec: AttentionSpec | StateSpec
    shares: str | None = None
    follows: str | None = None


@frozen(eq=False)
class Batch(Recordable):
    """One step's input: rows of any mix of lengths laid end to end.

    tokens, positions: [tokens] int64. query_starts: [rows + 1] int32. caches: one entry per
    CacheSpec of the model, in its order. plans: one entry per cache group, and one for each
    backend of layers that follow another's block table; `groups[i]` is the entry of cache i.
    sample: [n] int64, the token positions whose logits are wanted. embeds: [tokens, hidden] or
    None, replaces the embedding where `embeds_mask` [tokens] is true. axis_positions: [axes,
    tokens] int64 in steps with tokens whose positions differ from axis to axis, else None.
    extras: named tensors that only some models read ("token_types", ...). adapters: [tokens] int32,
    the slot of each token's adapter, or None if none is used. carried: what the pipeline stage
    before this one gave, empty in the first. encoded: [n, width], what encoders gave for the rows
    that begin in this step, in their order: of these, layers of cross attention keep keys and
    values; None where no row does.
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

    def plan(self, cache: int) -> Any:
        """The plan for the layer that owns cache `cache`: the kind that its spec asks for."""
        return self.plans[self.groups[cache]]

    def key(self) -> Hashable | None:
        keys = tuple([plan.key() for plan in self.plans])
        given = (self.embeds, self.axis_positions, self.encoded)
        apart = self.carried or any(tensor is not None for tensor in given)
        return None if None in keys or apart else (keys, tuple(self._own()))

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
        """The batch's tensors beside those of its plans."""
        given = {
            "tokens": self.tokens,
            "positions": self.positions,
            "query_starts": self.query_starts,
            "sample": self.sample,
            "embeds": self.embeds,
            "embeds_mask": self.embeds_mask,
            "adapters": self.adapters,
            "axis_positions": self.axis_positions,
        }
        return {**{name: t for name, t in given.items() if t is not None}, **self.extras}


@frozen
class MtpLayer:
    """A layer of a checkpoint that foretells the token after the next (arXiv 2412.19437).

    It runs on a map of two vectors side by side: the norm of a token's embedding, and that of the
    model's hidden state before it. layer: makes it, given a `modulm.nn.Builder` that stands at
    `at`. hidden: the width. embedding_norm, hidden_norm, project, norm: where these lie in the
    checkpoint; norm is what comes before the head, "" for none. offset: what norms add to their
    weights.
    state_first: the state is the map's first half. normed: the next draft goes on from what `norm`
    gives, not from before it.
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

    A model states the mathematics; dtype, device, ranks, quantization, attention backend and
    weight names come from the builder it is constructed with.
    """

    api: ClassVar[int | tuple[int, int]]
    #: attrs class that config.json is structured into; a missing or absurd key is an error.
    config_type: ClassVar[type]
    #: What the model is for: "generate", or a pooling task ("embed", "classify", "score", ...).
    tasks: ClassVar[tuple[str, ...]] = ("generate",)
    #: The pooler of what it can be asked for beside text; empty: it is for nothing else.
    pooler: ClassVar[str] = ""
    #: "package.module:attribute" of what the kit compares with where transformers has no such
    #: model (`modulm.testing.oracles`).
    oracle: ClassVar[str] = ""
    #: Along how many axes it counts the positions of tokens (time, height and width of an image).
    axes: ClassVar[int] = 1
    #: Whether `Batch.embeds` may stand for tokens: no where it needs their ids as well.
    takes_embeds: bool = True
    #: Whether it runs Python code that lies in the checkpoint: only with --trust-remote-code.
    remote_code: ClassVar[bool] = False
    #: Kinds of media that `encode` takes ("image", "audio", "video").
    media: ClassVar[tuple[str, ...]] = ()
    #: The name of the media family of its prompts; empty: config.json's architecture.
    media_family: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def weights(cls, config: Any) -> WeightNames:
        """The table of renames and fusions from checkpoint names (`modulm.loading.WeightNames`)."""

    @classmethod
    def mtp(cls, config: Any) -> MtpLayer | None:
        """The layer of its checkpoints that drafts tokens; None where there is none."""
        return None

    @classmethod
    @abstractmethod
    def tiny(cls) -> Mapping[str, Any]:
        """config.json of a tiny random checkpoint for tests; loads in transformers as well, or in
        the driver's `oracle`.
        """

    def load(self, checkpoint: Path) -> bool:
        """Fill the weights from the folder by other means than the builder's slots.

        For models that another library reads and runs; True when that was done. A model that does
        this may register its caches here instead of when it is built. Raises CheckpointError.
        """
        return False

    @property
    @abstractmethod
    def caches(self) -> tuple[CacheSpec, ...]:
        """One entry per layer that keeps something, in layer order.

        Empty for encoders: the prompts of a model that keeps nothing run whole, in one step.
        """

    @property
    def pooling(self) -> str:
        """How the hidden states of a row become one vector where nothing else says it.

        "LAST" token, "CLS" (the first) or "MEAN" of all.
        """
        return "LAST"

    def encode(self, items: Sequence[MediaItem]) -> Sequence[torch.Tensor]:
        """Run the encoder over media: per item [item.length, hidden], in the order given, or more
        columns than that, which the model finds in `Batch.embeds` again.

        Items of several kinds may be mixed; what is given together may be computed together.
        """
        raise UnsupportedError(f"{type(self).__name__} takes no images, video or sound")

    def encode_in_pieces(
        self, items: Sequence[MediaItem]
    ) -> Generator[int, None, Sequence[torch.Tensor]]:
        """What `encode` gives, bit for bit, with stops at which other work may be done: each tells
        how many rows (patches, frames) have been through a layer since the last one, at least 1.

        The stops depend on the items alone, so that ranks make the same ones. This one has none.
        """
        yield from ()
        return self.encode(items)

    @abstractmethod
    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states after the final norm: [tokens, hidden]."""

    def states(self, batch: Batch, layers: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """What `forward` gives, then what each of these layers gives: [tokens, hidden] each.

        layers: indices from 0, of those whose output (the whole stream of residuals) is wanted.
        """
        raise UnsupportedError(f"{type(self).__name__} does not show states of single layers")

    def embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [n] int64 -> [n, hidden], as the first layer is given them."""
        raise UnsupportedError(f"{type(self).__name__} does not show its embedding")

    def carry(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """In a pipeline stage that is not the last, instead of `forward`: what the next one takes.

        That is the next one's `Batch.carried`: tensors [tokens, hidden].
        """
        raise UnsupportedError(f"{type(self).__name__} in pipeline stages: not yet")

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden] -> [n, vocabulary]."""
