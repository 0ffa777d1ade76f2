"""Models that read media: encoders around a text model of another plugin."""

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
from modulm_towers.text import TEXT_NAMES, TextConfig, complete_config

__all__ = ["MultimodalConfig", "MultimodalModel", "cropped", "flat_patches", "stacked", "tiny_text"]

#: Weight prefix of the text model, wherever it nests its weights.
_AROUND = (
    r"^model\.(vision_tower|vision_model|vision_encoder|visual|multi_modal_projector|connector|"
    r"image_newline|mlp1|projector|vision_projection|vision_embedder|aligner|"
    r"visual_embeddings_table|audio_tower)\b"
)


@frozen(eq=False, kw_only=True)
class MultimodalConfig:
    """config.json of a model around a text model.

    text: the text model's. vision: of `vision_type`, if it reads images. audio: of `audio_type`, if
    it reads sound. top_level: of `top_level_type`, the top-level keys. Missing keys default to
    those of transformers' class.
    """

    vision_type: ClassVar[type | None] = None
    audio_type: ClassVar[type | None] = None
    #: Key of the sound encoder's configuration, and whether checkpoints may lack that encoder.
    audio_key: ClassVar[str] = "audio_config"
    audio_optional: ClassVar[bool] = False
    top_level_type: ClassVar[type | None] = None
    #: Keys of the text model that are applied by the surrounding model instead.
    text_ignored: ClassVar[tuple[str, ...]] = ()

    text: TextConfig
    vision: Any = None
    audio: Any = None
    top_level: Any = None
    #: The former name of `top_level`.
    whole = property(lambda self: self.top_level)

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        name = str(table["architectures"][0])
        known = complete_config(name, table, file)
        if known is None:
            raise UnsupportedError(f"{name}: not supported by the installed transformers")
        keys = known.to_dict()
        top_type = cls.top_level_type
        return cls(
            text=TextConfig.from_table(table, file, cls.text_ignored),
            vision=_part(keys, "vision_config", cls.vision_type, file),
            audio=None
            if cls.audio_optional and keys.get(cls.audio_key) is None
            else _part(keys, cls.audio_key, cls.audio_type, file),
            top_level=None if top_type is None else read_config(keys, top_type, file),
            **cls.more(keys, file),
        )

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        """Additional fields of a family's class, from config.json. Raises CheckpointError."""
        return {}

    @property
    def hidden_size(self) -> int:
        """Width of the text model."""
        return int(self.text.text.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return self.text.vocab_size

    @property
    def max_length(self) -> int:
        """Maximum sequence length in tokens."""
        return self.text.max_length

    @property
    def sliding_window(self) -> int | None:
        """The text model's attention window in tokens."""
        return self.text.sliding_window


def _part(keys: Mapping[str, Any], key: str, into: type | None, file: str) -> Any:
    """Configuration of an encoder, None if the model lacks it."""
    if into is None:
        return None
    table = keys.get(key)
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{file}: {key}: must be a table")
    return read_config(table, into, file)


class MultimodalModel(Module, Model):
    """A text model with encoders that turn media into embeddings.

    A family sets `api`, `config_type`, `media` and `names`, creates its encoders in `make_encoders`
    and runs them in `features`.
    """

    names: ClassVar[WeightNames] = WeightNames()
    media: ClassVar[tuple[str, ...]] = ("image",)
    #: Whether the tokens of an image attend in both directions, as its media family declares.
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
            replicated = evolve(mesh, tensor=ProcessGroup())
            build = evolve(build, shared=evolve(build.shared, mesh=replicated))
        self.make_encoders(
            config, _stored_plain(build) if config.text.has_own_quantization else build
        )

    def _leave_out_text(self, config: Any, inner: Builder) -> None:
        """Build the text model without memory, except its embedding table.

        The table is needed because items may contain text tokens.
        """
        if type(self).tasks != ("generate",):
            raise ConfigError("mm_encoder_only", f"{type(self).__name__} is not a generative model")
        self.tasks = ("token_embed",)  # type: ignore[misc]
        dropped = inner.stage(False).shared
        inner = evolve(inner, shared=evolve(dropped, ropes={}))
        text = config.text.driver(config.text.text, inner)
        object.__setattr__(self, "text", text)
        embedding_ids = {id(module) for module in getattr(text, "embed", Module()).modules()}
        for unit in [unit for unit in dropped.units if id(unit.module) in embedding_ids]:
            dropped.units.remove(unit)
            dropped.elsewhere.append(unit)

    @classmethod
    def spans(cls, config: Any) -> bool | Literal["windows"]:
        """Which layers let the tokens of an image attend in both directions."""
        return cls.bidirectional

    @abstractmethod
    def make_encoders(self, config: Any, b: Builder) -> None:
        """Create the encoders that `features` runs; `b` points at the root."""

    @abstractmethod
    def features(self, items: Sequence[MediaItem]) -> Sequence[Tensor] | Pieces[Sequence[Tensor]]:
        """[n, hidden] per item: the embeddings of its placeholders, in order.

        A generator pauses between layers, like `Tower.run`.
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
        caches: tuple[CacheSpec, ...] = () if self.only_encodes else self.text.caches
        return caches

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
        result = self.features(items)
        features = (yield from result) if isinstance(result, Generator) else result
        return [
            self._placed(item, item_features)
            for item, item_features in zip(items, features, strict=True)
        ]

    def _placed(self, item: MediaItem, features: Tensor) -> Tensor:
        """The item's embeddings, including those of text tokens between its placeholders."""
        if "item_tokens" not in item.tensors:
            return features
        tokens = torch.from_numpy(np.array(item.tensors["item_tokens"])).to(self.device)
        inside = torch.from_numpy(np.array(item.tensors["item_embedded"])).to(self.device)
        text_embeddings = self.text.embeddings(tokens).to(features.dtype)
        embeddings = features.new_zeros(len(tokens), features.shape[1])
        embeddings[:, : text_embeddings.shape[1]] = text_embeddings
        embeddings[inside] = features
        return embeddings

    def forward(self, batch: Batch) -> Tensor:
        if self.only_encodes:
            embeds = batch.embeds
            return self._nothing(batch.tokens) if embeds is None else embeds.to(self.dtype)
        hidden: Tensor = self.text(batch)
        return hidden

    def _nothing(self, tokens: Tensor) -> Tensor:
        """[tokens, hidden] placeholders for text embeddings in encoder-only mode."""
        width = self.config.hidden_size
        return torch.zeros(len(tokens), width, dtype=self.dtype, device=self.device)

    def states(self, batch: Batch, layers: Sequence[int]) -> tuple[Tensor, ...]:
        captured: tuple[Tensor, ...] = self.text.states(batch, layers)
        return captured

    def embeddings(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.text.embeddings(tokens)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        if self.only_encodes:
            return hidden
        logits: Tensor = self.text.logits(hidden)
        return logits

    def tensor(self, item: MediaItem, name: str) -> Tensor:
        """One of an item's tensors on the device, floats in the model's dtype."""
        tensor = torch.from_numpy(np.array(item.tensors[name])).to(self.device)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _stored_plain(build: Builder) -> Builder:
    """The builder for parts that are not quantized."""
    plain = build.shared.plain
    if plain is None:
        return build
    return evolve(build, shared=evolve(build.shared, choose_method=lambda spec: plain))


def stacked(
    model: MultimodalModel, items: Sequence[MediaItem], name: str
) -> tuple[Tensor, list[int]]:
    """The items' tensors of that name, concatenated, and the number of rows of each."""
    parts = [model.tensor(item, name) for item in items]
    return torch.cat(parts), [len(part) for part in parts]


def cropped(model: MultimodalModel, items: Sequence[MediaItem]) -> list[Tensor]:
    """The items' images [channels, height, width], cropped to the sizes from their processor."""
    images = []
    for item in items:
        height, width = item.tensors["image_sizes"].reshape(-1).tolist()
        images.append(model.tensor(item, "pixel_values")[0, :, :height, :width])
    return images


def flat_patches(pattern: str) -> Rewrite:
    """Rewrite non-overlapping convolutions as linear maps of whole patches."""
    return Rewrite(pattern, lambda name, tensor: [(name, tensor.reshape(len(tensor), -1))])


def tiny_text(model_type: str = "llama", **more: Any) -> dict[str, Any]:
    """`text_config` of a tiny checkpoint."""
    text = dict(tiny_config(model_type, "", **more))
    return {key: value for key, value in text.items() if key != "architectures"}
