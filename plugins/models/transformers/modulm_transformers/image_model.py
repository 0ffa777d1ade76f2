"""Models of transformers with images: their own code computes the image embeddings.

The library's model turns tokens and processor outputs into the decoder's input embeddings. That
part runs once per item and is stopped where the decoder begins; the decoder runs like that of a
text model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, NoReturn

import numpy as np
import torch
from attrs import evolve
from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.contracts.model import Batch
from modulm.errors import EngineError, UnsupportedError
from modulm.nn import Builder
from modulm_towers import tiny_text
from modulm_transformers.attention import NAME
from modulm_transformers.bridge import BridgedForCausalLM
from modulm_transformers.config import TransformersConfig
from modulm_transformers.decoder_inputs import DecoderInputs
from modulm_transformers.load import explained
from modulm_transformers.media_family import BOTH_WAYS, EMBEDDED, HEARING, MEDIA_FAMILY, TOKENS

__all__ = ["SeesAndHears", "SeesBothWays", "SeesOnAxes", "TransformersWithImages", "seeing"]

#: Decoder inputs that say of each token whether it is part of an image.
_TYPES = frozenset({"moe_mm_token_type_ids"})
#: The settings that name tokens of images and videos.
_SEEN_TOKENS = tuple(
    f"{kind}{part}_token_id" for kind in ("image", "video") for part in ("", "_start", "_end")
)


class TransformersWithImages(BridgedForCausalLM):
    """A decoder of transformers with the library's encoders."""

    media = ("image", "video")
    media_family = MEDIA_FAMILY
    around = None
    slotted = False

    def _take_decoder(self, prefix: str) -> None:
        """The surrounding model computes embeddings; the decoder runs in each step."""
        self.embedder = getattr(self.whole, prefix)
        self.base = self.embedder.get_decoder()
        name = self.config.model.__name__
        if self.base is self.embedder:
            raise UnsupportedError(f"{name} has no separate decoder")
        self.types = _TYPES & signature(self.base.forward).parameters.keys()
        tokens = [getattr(self.config.settings, key, None) for key in _SEEN_TOKENS]
        known = [token for token in tokens if token is not None]
        self.seen_tokens = torch.tensor(known, device=self.build.shared.device)
        self.accepted = signature(self.embedder.forward).parameters.keys()
        self.beside: DecoderInputs | None = None
        self.base.set_attn_implementation(NAME)

    def _inputs(self, batch: Batch) -> Mapping[str, Any]:
        """The decoder's arguments; besides embeddings those that depend on images."""
        inputs = dict(super()._inputs(batch))
        for name in self.types:
            inputs[name] = torch.isin(batch.tokens, self.seen_tokens).int()[None]
        if batch.embeds is None or batch.embeds_mask is None:
            return inputs
        hidden = inputs["inputs_embeds"].shape[-1]
        if batch.embeds.shape[1] == hidden:
            return inputs
        if self.beside is None:
            raise EngineError("encoder outputs came from elsewhere before any was computed here")
        return inputs | self.beside.arguments(batch.embeds, batch.embeds_mask, hidden)

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        return [self._embedded(item) for item in items]

    @torch.inference_mode()
    def _embedded(self, item: MediaItem) -> Tensor:
        """[item.length, width]: the decoder's input embeddings of the item's tokens, with what it
        reads besides.

        Raises UnsupportedError if columns cannot hold that.
        """
        tensors = {name: self._tensor(value) for name, value in item.tensors.items()}
        tokens, inside = tensors.pop(TOKENS), tensors.pop(EMBEDDED)
        tensors = {name: value for name, value in tensors.items() if name in self.accepted}
        # Passed so that the model does not compute any; the embeddings do not depend on them.
        positions = tokens.new_zeros(
            (self.axes, 1, len(tokens)) if self.axes > 1 else (1, len(tokens))
        )
        tensors |= {"input_ids": tokens[None], "position_ids": positions}
        name = self.config.model.__name__
        with explained(f"{name}: transformers' code for {item.kind}"), _stopped(self.base):
            try:
                self.embedder(**tensors, use_cache=False)
            except _Reached as reached:
                decoder_inputs = reached.inputs
        inputs = {key: value for key, value in decoder_inputs.items() if key not in self.types}
        self.beside, output = DecoderInputs.pack(name, inputs)
        embedded = inside.nonzero()[:, 0]
        return output[int(embedded[0]) : int(embedded[-1]) + 1]

    def _tensor(self, value: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.array(value)).to(self.build.shared.device)
        return tensor.to(self.build.shared.dtype) if tensor.is_floating_point() else tensor

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
        vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 7}
        return {
            "architectures": ["VipLlavaForConditionalGeneration"],
            "model_type": "vipllava",
            "image_token_index": 480,
            "vision_feature_layers": [-2, -3],
            "text_config": tiny_text(),
            "vision_config": {**vision, "model_type": "clip_vision_model"},
        }


class SeesOnAxes(TransformersWithImages):
    """A model whose decoder counts positions in time, height and width."""

    axes = 3

    def _positions(self, batch: Batch) -> Tensor:
        positions = batch.axis_positions
        return super()._positions(batch) if positions is None else positions[:, None]


class SeesOnFourAxes(SeesOnAxes):
    """A model whose decoder counts positions in the text, an image's width and height, and the
    number of images.
    """

    axes = 4


class SeesAndHears(TransformersWithImages):
    """A model that also takes sounds: Muse Spark."""

    media = ("image", "video", "audio")
    media_family = HEARING


class SeesBothWays(TransformersWithImages):
    """A model whose images attend in both directions, and to each other: Molmo 2."""

    media = ("image",)
    media_family = BOTH_WAYS

    def __init__(self, config: TransformersConfig, build: Builder) -> None:
        shared = evolve(build.shared, spans=True, masks=True)
        super().__init__(config, evolve(build, shared=shared))


def seeing(config: TransformersConfig) -> type[TransformersWithImages]:
    """Select the class for a model with images."""
    if config.both_ways:
        return SeesBothWays
    if config.hears:
        return SeesAndHears
    kinds = {kind.axes: kind for kind in (TransformersWithImages, SeesOnAxes, SeesOnFourAxes)}
    return kinds[config.axes]


class _Reached(Exception):
    """Raised instead of running the decoder. inputs: its arguments."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        super().__init__("the decoder was reached")
        self.inputs = inputs


@contextmanager
def _stopped(decoder: Module) -> Iterator[None]:
    """Make the decoder raise _Reached within this context."""

    def stop(_: Module, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> NoReturn:
        raise _Reached(inputs)

    handle = decoder.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
