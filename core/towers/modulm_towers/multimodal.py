"""Models that read media: a text model of another plugin, and the encoders of this one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.contracts.model import Batch, CacheSpec, Model, MtpLayer
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, Rewrite, WeightNames, read_config
from modulm_layers import tiny_config
from modulm_towers.text import TEXT_NAMES, TextConfig, completed

__all__ = ["MultimodalConfig", "MultimodalModel", "cropped", "flat_patches", "stacked", "tiny_text"]

#: What lies around the text model, wherever that has it.
_AROUND = (
    r"^model\.(vision_tower|vision_model|visual|multi_modal_projector|connector|image_newline|"
    r"mlp1|projector|vision_projection|vision_embedder|aligner)\b"
)


@frozen(eq=False, kw_only=True)
class MultimodalConfig:
    """config.json of a model around a text model. text: that one's; vision: of `vision_type`;
    whole: of `whole_type`, the keys beside them.

    Keys that the file leaves out are those of transformers' class for it.
    """

    vision_type: ClassVar[type]
    whole_type: ClassVar[type | None] = None

    text: TextConfig
    vision: Any
    whole: Any = None

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Raises CheckpointError, UnsupportedError."""
        name = str(table["architectures"][0])
        known = completed(name, table, file)
        if known is None:
            raise UnsupportedError(f"{name}: the installed transformers does not know it")
        keys = known.to_dict()
        vision = keys.get("vision_config")
        if not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: vision_config: a table is expected")
        whole = None if cls.whole_type is None else read_config(keys, cls.whole_type, file)
        return cls(
            text=TextConfig.from_table(table, file),
            vision=read_config(vision, cls.vision_type, file),
            whole=whole,
            **cls.more(keys, file),
        )

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        """Further fields of a family's class, from config.json. Raises CheckpointError."""
        return {}

    @property
    def hidden_size(self) -> int:
        """The text model's width."""
        return int(self.text.text.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary."""
        return self.text.vocab_size

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens."""
        return self.text.max_length

    @property
    def sliding_window(self) -> int | None:
        """The text model's window, in tokens."""
        return self.text.sliding_window


class MultimodalModel(Module, Model):
    """A text model and what turns media into embeddings for it.

    A family sets `api`, `config_type`, `media` and `names`, makes its encoders in `make_encoders`
    and runs them in `features`.
    """

    names: ClassVar[WeightNames] = WeightNames()
    media: ClassVar[tuple[str, ...]] = ("image",)
    #: Whether the tokens of an image see each other in both directions, as its media family says.
    bidirectional: ClassVar[bool] = False

    def __init__(self, config: Any, build: Builder) -> None:
        super().__init__()
        self.config = config
        inner = evolve(build, shared=evolve(build.shared, spans=self.bidirectional))
        self.text = config.text.driver(config.text.text, inner)
        self.dtype, self.device = build.shared.dtype, build.shared.device
        self.make_encoders(config, build)

    @abstractmethod
    def make_encoders(self, config: Any, b: Builder) -> None:
        """Make what `features` runs; `b` stands at the top."""

    @abstractmethod
    def features(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        """[n, hidden] of each item: what replaces its placeholders, in order."""

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        text: WeightNames = config.text.driver.weights(config.text.text)
        return evolve(
            text,
            rename=((_AROUND, r"\1"), *TEXT_NAMES, *cls.names.rename, *text.rename),
            ignore=(*cls.names.ignore, *text.ignore),
            rewrite=(*cls.names.rewrite, *text.rewrite),
        )

    @classmethod
    def mtp(cls, config: Any) -> MtpLayer | None:
        layer: MtpLayer | None = config.text.driver.mtp(config.text.text)
        return layer

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        found: tuple[CacheSpec, ...] = self.text.caches
        return found

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        features = self.features(items)
        return [self._placed(item, own) for item, own in zip(items, features, strict=True)]

    def _placed(self, item: MediaItem, features: Tensor) -> Tensor:
        """The item's embeddings, those of the tokens between its placeholders among them."""
        if "item_tokens" not in item.tensors:
            return features
        tokens = torch.from_numpy(np.array(item.tensors["item_tokens"])).to(self.device)
        inside = torch.from_numpy(np.array(item.tensors["item_embedded"])).to(self.device)
        words = self.text.embeddings(tokens).to(features.dtype)
        found = features.new_zeros(len(tokens), features.shape[1])
        found[:, : words.shape[1]] = words
        found[inside] = features
        return found

    def forward(self, batch: Batch) -> Tensor:
        hidden: Tensor = self.text(batch)
        return hidden

    def states(self, batch: Batch, layers: Sequence[int]) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.text.states(batch, layers)
        return found

    def embeddings(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.text.embeddings(tokens)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.text.logits(hidden)
        return logits

    def tensor(self, item: MediaItem, name: str) -> Tensor:
        """One of an item's tensors, on the device; numbers in the model's dtype."""
        found = torch.from_numpy(np.array(item.tensors[name])).to(self.device)
        return found.to(self.dtype) if found.is_floating_point() else found


def stacked(
    model: MultimodalModel, items: Sequence[MediaItem], name: str
) -> tuple[Tensor, list[int]]:
    """The items' tensors of that name, one after the other, and how many rows each has."""
    parts = [model.tensor(item, name) for item in items]
    return torch.cat(parts), [len(part) for part in parts]


def cropped(model: MultimodalModel, items: Sequence[MediaItem]) -> list[Tensor]:
    """The items' images [channels, height, width], of the sizes that their processor says."""
    found = []
    for item in items:
        height, width = item.tensors["image_sizes"].reshape(-1).tolist()
        found.append(model.tensor(item, "pixel_values")[0, :, :height, :width])
    return found


def flat_patches(pattern: str) -> Rewrite:
    """Weights of convolutions that do not overlap, as those of linear maps of whole patches."""
    return Rewrite(pattern, lambda name, tensor: [(name, tensor.reshape(len(tensor), -1))])


def tiny_text(model_type: str = "llama", **more: Any) -> dict[str, Any]:
    """`text_config` of a tiny checkpoint."""
    text = dict(tiny_config(model_type, "", **more))
    return {key: value for key, value in text.items() if key != "architectures"}
