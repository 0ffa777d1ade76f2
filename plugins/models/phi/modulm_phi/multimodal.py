"""Phi-4 multimodal (arXiv 2503.01743): Phi 3's text model with images and audio."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames
from modulm_phi.audio import PhiHearing, PhiHearingConfig
from modulm_phi.vision import PhiSight, PhiSightConfig
from modulm_towers import MultimodalConfig, MultimodalModel, Pieces, flat_patches, tiny_text

__all__ = ["Phi4MultimodalConfig", "Phi4MultimodalForCausalLM"]

log = logging.getLogger("modulm.models")


@frozen(eq=False, kw_only=True)
class Phi4MultimodalConfig(MultimodalConfig):
    """config.json of Phi-4 multimodal. depth: layers of the vision encoder that run."""

    vision_type: ClassVar[type | None] = PhiSightConfig
    audio_type: ClassVar[type | None] = PhiHearingConfig
    text_ignored = (
        "vision_config", "audio_config", "attention_bias", "layer_types", "mlp_bias",
    )  # fmt: skip

    depth: int

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        table = keys["vision_config"]
        layer, count = table.get("feature_layer"), table.get("num_hidden_layers")
        if type(layer) is not int or not -count - 1 <= layer <= count:
            raise CheckpointError(f"{file}: feature_layer: {layer!r} of {count} layers")
        return {"depth": layer % (count + 1)}


class Phi4MultimodalForCausalLM(MultimodalModel):
    """Phi-4 multimodal.

    Its adapters, one for prompts with images and one for sound only, are loaded like any LoRA
    adapter.
    """

    api = 1
    config_type: ClassVar[type] = Phi4MultimodalConfig
    media = ("image", "audio")
    names = WeightNames(
        ignore=(r"\.image_embed\.img_processor\.head\.",),
        rewrite=(flat_patches(r"\.patch_embedding\.weight$"),),
    )

    def make_encoders(self, config: Phi4MultimodalConfig, b: Builder) -> None:
        log.warning(
            "the checkpoint was trained with adapters for prompts with images and with audio: "
            "pass their folders as --lora-modules, and their names in requests"
        )
        at, hidden = b.at("model.embed_tokens_extend"), config.hidden_size
        self.sight = PhiSight(config.vision, config.depth, hidden, at.at("image_embed"))
        self.hearing = PhiHearing(config.audio, hidden, at.at("audio_embed"))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        embeddings: list[Tensor] = []
        for item in items:
            run = self._embed_image(item) if item.kind == "image" else self._embed_audio(item)
            item_embeddings = yield from run
            embeddings.append(item_embeddings)
        return embeddings

    def _embed_image(self, item: MediaItem) -> Pieces[Tensor]:
        side = self.config.vision.crop_size
        rows, columns = (length // side for length in item.tensors["image_sizes"].ravel().tolist())
        count = 1 + rows * columns
        filled = torch.from_numpy(item.tensors["image_attention_mask"][0, :count] > 0)
        pixels = self.tensor(item, "image_pixel_values")[0, :count]
        return self.sight.run(pixels, filled, (rows, columns))

    def _embed_audio(self, item: MediaItem) -> Pieces[Tensor]:
        mel = self.tensor(item, "audio_input_features")[0]
        return self.hearing.run(mel, bool(item.tensors["beside_images"]))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        text = tiny_text(
            "phi4_multimodal",
            original_max_position_embeddings=512,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * i for i in range(6)],
                "long_factor": [2.0 + 0.3 * i for i in range(6)],
            },
        )
        return {
            **text,
            "architectures": ["Phi4MultimodalForCausalLM"],
            "tie_word_embeddings": True,
            "vision_config": {
                "model_type": "phi4_multimodal_vision",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": 28,
                "crop_size": 28,
                "patch_size": 7,
                "image_token_id": 480,
            },
            "audio_config": {
                "model_type": "phi4_multimodal_audio",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_blocks": 2,
                "num_attention_heads": 2,
                "ext_pw_out_channel": 32,
                "depthwise_separable_out_channel": 32,
                "input_size": 16,
                "nemo_conv_channels": 8,
                "bias_max_distance": 4,
                "audio_token_id": 481,
            },
        }
