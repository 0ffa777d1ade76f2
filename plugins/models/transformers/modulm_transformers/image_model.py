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
from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm_towers import tiny_text
from modulm_transformers.bridge import NAME, TransformersForCausalLM
from modulm_transformers.config import TransformersConfig
from modulm_transformers.load import explained
from modulm_transformers.media_family import EMBEDDED, MEDIA_FAMILY, TOKENS

__all__ = ["SeesOnAxes", "TransformersWithImages", "seeing"]

#: Decoder inputs besides embeddings that do not depend on images.
_OF_TEXT = frozenset(
    {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position"}
    | {"past_key_values", "use_cache", "kwargs"}
)


class TransformersWithImages(TransformersForCausalLM):
    """A decoder of transformers with the library's encoders."""

    media = ("image", "video")
    media_family = MEDIA_FAMILY
    around = None

    def _take_decoder(self, prefix: str) -> None:
        """The surrounding model computes embeddings; the decoder runs in each step."""
        self.embedder = getattr(self.whole, prefix)
        self.base = self.embedder.get_decoder()
        name = self.config.model.__name__
        if self.base is self.embedder:
            raise UnsupportedError(f"{name} has no separate decoder")
        more = [name for name in signature(self.base.forward).parameters if name not in _OF_TEXT]
        if more:
            raise UnsupportedError(f"{name}: not supported yet: decoder inputs {', '.join(more)}")
        self.base.set_attn_implementation(NAME)

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        return [self._embedded(item) for item in items]

    @torch.inference_mode()
    def _embedded(self, item: MediaItem) -> Tensor:
        """[item.length, hidden]: the decoder's input embeddings of the item's tokens.

        Raises UnsupportedError if the decoder needs further inputs.
        """
        tensors = {name: self._tensor(value) for name, value in item.tensors.items()}
        tokens, inside = tensors.pop(TOKENS), tensors.pop(EMBEDDED)
        for name in ("item_tokens", "item_embedded"):
            tensors.pop(name, None)
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
        beside = [
            key
            for key, value in decoder_inputs.items()
            if key not in _OF_TEXT and _is_informative(value)
        ]
        if beside:
            raise UnsupportedError(
                f"{name}: not supported yet: decoder input {beside[0]} of an image"
            )
        embedded = inside.nonzero()[:, 0]
        return decoder_inputs["inputs_embeds"][0, int(embedded[0]) : int(embedded[-1]) + 1]

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


def seeing(config: TransformersConfig) -> type[TransformersWithImages]:
    """Select the class for a model with images."""
    return SeesOnAxes if config.axes > 1 else TransformersWithImages


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


def _is_informative(value: Any) -> bool:
    """Whether an argument holds tensors."""
    inner = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(one, Tensor) for one in inner)
