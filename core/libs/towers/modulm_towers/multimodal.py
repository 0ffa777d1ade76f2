"""Models that read media: a text model of another plugin, and the encoders of this one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.contracts.model import Batch, CacheSpec, Model, MtpLayer
from modulm.errors import CheckpointError, ConfigError, UnsupportedError
from modulm.nn import Builder, Rewrite, WeightNames, read_config
from modulm.parallel import ProcessGroup
from modulm_layers import tiny_config
from modulm_media.flags import MediaConfig
from modulm_towers.pieces import Pieces, whole
from modulm_towers.spread import Spread
from modulm_towers.text import TEXT_NAMES, TextConfig, completed

__all__ = ["MultimodalConfig", "MultimodalModel", "cropped", "flat_patches", "stacked", "tiny_text"]

#: What lies around the text model, wherever that has it.
_AROUND = (
    r"^model\.(vision_tower|vision_model|vision_encoder|visual|multi_modal_projector|connector|"
    r"image_newline|mlp1|projector|vision_projection|vision_embedder|aligner|"
    r"visual_embeddings_table|audio_tower)\b"
)


@frozen(eq=False, kw_only=True)
class MultimodalConfig:
    """config.json of a model around a text model. text: that one's; vision: of `vision_type`, where
    it sees; audio: of `audio_type`, where it hears; whole: of `whole_type`, the keys beside them.

    Keys that the file leaves out are those of transformers' class for it.
    """

    vision_type: ClassVar[type | None] = None
    audio_type: ClassVar[type | None] = None
    #: What the file calls the configuration of what hears.
    audio_key: ClassVar[str] = "audio_config"
    whole_type: ClassVar[type | None] = None
    #: Keys of the text model that the model around it obeys itself.
    text_ignored: ClassVar[tuple[str, ...]] = ()

    text: TextConfig
    vision: Any = None
    audio: Any = None
    whole: Any = None

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Raises CheckpointError, UnsupportedError."""
        name = str(table["architectures"][0])
        known = completed(name, table, file)
        if known is None:
            raise UnsupportedError(f"{name}: the installed transformers does not know it")
        keys = known.to_dict()
        whole = None if cls.whole_type is None else read_config(keys, cls.whole_type, file)
        return cls(
            text=TextConfig.from_table(table, file, cls.text_ignored),
            vision=_part(keys, "vision_config", cls.vision_type, file),
            audio=_part(keys, cls.audio_key, cls.audio_type, file),
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


def _part(keys: Mapping[str, Any], key: str, into: type | None, file: str) -> Any:
    """The configuration of an encoder, None for a model without it."""
    if into is None:
        return None
    table = keys.get(key)
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{file}: {key}: a table is expected")
    return read_config(table, into, file)


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
        engine = build.shared.config
        flags = MediaConfig() if engine is None else engine.group(MediaConfig)
        self.only_encodes = flags.mm_encoder_only
        inner = evolve(build, shared=evolve(build.shared, spans=self.spans(config)))
        if self.only_encodes:
            self._leave_out_text(config, inner)
        else:
            self.text = config.text.driver(config.text.text, inner)
        self.dtype, self.device = build.shared.dtype, build.shared.device
        self._sharing: Spread | None = None
        mesh = build.shared.mesh
        if flags.mm_encoder_tp_mode == "data" and mesh.tensor.size > 1:
            self._sharing = Spread(mesh.tensor, self._encoded, self.dtype, self.device)
            alone = evolve(mesh, tensor=ProcessGroup())
            build = evolve(build, shared=evolve(build.shared, mesh=alone))
        self.make_encoders(config, _stored_plain(build) if config.text.alone else build)

    def _leave_out_text(self, config: Any, inner: Builder) -> None:
        """Make the text model without memory, but for its table of embeddings: an item may have
        tokens of text between its own.
        """
        if type(self).tasks != ("generate",):
            raise ConfigError("mm_encoder_only", f"{type(self).__name__} is no model that writes")
        self.tasks = ("token_embed",)  # type: ignore[misc]
        away = inner.stage(False).shared
        inner = evolve(inner, shared=evolve(away, ropes={}))
        text = config.text.driver(config.text.text, inner)
        object.__setattr__(self, "text", text)
        own = {id(module) for module in getattr(text, "embed", Module()).modules()}
        for unit in [unit for unit in away.units if id(unit.module) in own]:
            away.units.remove(unit)
            away.elsewhere.append(unit)

    @classmethod
    def spans(cls, config: Any) -> bool | Literal["windows"]:
        """Which layers let the tokens of an image see each other in both directions."""
        return cls.bidirectional

    @abstractmethod
    def make_encoders(self, config: Any, b: Builder) -> None:
        """Make what `features` runs; `b` stands at the top."""

    @abstractmethod
    def features(self, items: Sequence[MediaItem]) -> Sequence[Tensor] | Pieces[Sequence[Tensor]]:
        """[n, hidden] of each item: what replaces its placeholders, in order.

        Stops between layers where it is a generator, as those of `Tower.run` are.
        """

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
        found: tuple[CacheSpec, ...] = () if self.only_encodes else self.text.caches
        return found

    @property
    def pooling(self) -> str:
        return "MEDIA" if self.only_encodes else super().pooling

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        if self._sharing is not None:
            return self._sharing.at_once(items)
        return whole(self._encoded(items))

    def encode_in_pieces(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        return self._encoded(items) if self._sharing is None else self._sharing.run(items)

    def _encoded(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        given = self.features(items)
        features = (yield from given) if isinstance(given, Generator) else given
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
        if self.only_encodes:
            given = batch.embeds
            return self._nothing(batch.tokens) if given is None else given.to(self.dtype)
        hidden: Tensor = self.text(batch)
        return hidden

    def _nothing(self, tokens: Tensor) -> Tensor:
        """[tokens, hidden] of text, where that is not read."""
        width = self.config.hidden_size
        return torch.zeros(len(tokens), width, dtype=self.dtype, device=self.device)

    def states(self, batch: Batch, layers: Sequence[int]) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.text.states(batch, layers)
        return found

    def embeddings(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.text.embeddings(tokens)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        if self.only_encodes:
            return hidden
        logits: Tensor = self.text.logits(hidden)
        return logits

    def tensor(self, item: MediaItem, name: str) -> Tensor:
        """One of an item's tensors, on the device; numbers in the model's dtype."""
        found = torch.from_numpy(np.array(item.tensors[name])).to(self.device)
        return found.to(self.dtype) if found.is_floating_point() else found


def _stored_plain(build: Builder) -> Builder:
    """The builder for parts that are not quantized."""
    plain = build.shared.plain
    if plain is None:
        return build
    return evolve(build, shared=evolve(build.shared, choose_method=lambda spec: plain))


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
