"""Phi-4 multimodal in the format that Microsoft publishes it in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from attrs import evolve, frozen

from modulm.errors import CheckpointError
from modulm.nn import WeightNames
from modulm_phi.multimodal import Phi4MultimodalConfig, Phi4MultimodalForCausalLM

__all__ = ["Phi4MMConfig", "Phi4MMForCausalLM", "as_phi4_multimodal"]

#: Keys of the sound encoder, and what transformers calls them.
_SOUND = {
    "activation": "activation",
    "attention_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
    "chunk_size": "chunk_size",
    "conv_activation": "conv_activation",
    "conv_glu_type": "conv_glu_type",
    "depthwise_multiplier": "depthwise_multiplier",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
    "ext_pw_out_channel": "ext_pw_out_channel",
    "input_size": "input_size",
    "kernel_size": "kernel_size",
    "left_chunk": "left_chunk",
    "linear_units": "intermediate_size",
    "num_blocks": "num_blocks",
    "time_reduction": "time_reduction",
}
#: Tokens of images and sounds, which config.json does not have.
_TOKENS = {"image": 200010, "audio": 200011}
_IMAGE, _AUDIO = (f"model.embed_tokens_extend.{part}_embed." for part in ("image", "audio"))
_RENAME = (
    (r"\.base_layer\.", "."),
    (rf"^{_IMAGE}img_projection\.0\.", f"{_IMAGE}img_projection_up."),
    (rf"^{_IMAGE}img_projection\.2\.", f"{_IMAGE}img_projection_down."),
    (rf"^{_IMAGE}glb_GN$", f"{_IMAGE}global_img_feature_extensor"),
    (rf"^{_IMAGE}sub_GN$", f"{_IMAGE}sub_img_feature_extensor"),
    (rf"^{_AUDIO}audio_projection\.speech\.0\.", f"{_AUDIO}up_proj_for_speech."),
    (rf"^{_AUDIO}audio_projection\.speech\.2\.", f"{_AUDIO}down_proj_for_speech."),
    (rf"^{_AUDIO}audio_projection\.vision\.0\.", f"{_AUDIO}up_proj_for_vision_speech."),
    (rf"^{_AUDIO}audio_projection\.vision\.2\.", f"{_AUDIO}down_proj_for_vision_speech."),
    (r"(\.encoders\.\d+\.feed_forward_(?:in|out))\.net\.0\.linear\.", r"\1.gate_up_proj."),
    (r"(\.encoders\.\d+\.feed_forward_(?:in|out))\.net\.2\.", r"\1.down_proj."),
    (r"(\.encoders\.\d+\.self_attn)\.linear_(q|k|v)\.", r"\1.\2_proj."),
    (r"(\.encoders\.\d+\.self_attn)\.linear_out\.", r"\1.o_proj."),
)


def as_phi4_multimodal(table: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return config.json with the keys of transformers. Raises CheckpointError."""
    parts = {}
    for key in ("audio_processor", "embd_layer", "vision_config", "audio_config"):
        parts[key] = table.get(key) or {}
        if not isinstance(parts[key], Mapping):
            raise CheckpointError(f"{file}: {key}: must be a table")
    sound = parts["audio_processor"].get("config") or {}
    heard = {ours: sound[key] for key, ours in _SOUND.items() if key in sound}
    if isinstance(inner := sound.get("nemo_conv_settings"), Mapping) and "conv_channels" in inner:
        heard["nemo_conv_channels"] = inner["conv_channels"]
    bias = sound.get("relative_attention_bias_args")
    if isinstance(bias, Mapping) and "t5_bias_max_distance" in bias:
        heard["bias_max_distance"] = bias["t5_bias_max_distance"]
    dropped = ("audio_processor", "embd_layer", "img_processor", "speech_lora", "vision_lora")
    return {
        **{key: value for key, value in table.items() if key not in (*dropped, "auto_map")},
        "architectures": ["Phi4MultimodalForCausalLM"],
        "model_type": "phi4_multimodal",
        "vision_config": {"image_token_id": _TOKENS["image"], **parts["vision_config"]},
        "audio_config": {"audio_token_id": _TOKENS["audio"], **heard, **parts["audio_config"]},
    }


@frozen(eq=False, kw_only=True)
class Phi4MMConfig(Phi4MultimodalConfig):
    """config.json of Phi-4 multimodal as published."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        return super().from_table(as_phi4_multimodal(table, file), file)


class Phi4MMForCausalLM(Phi4MultimodalForCausalLM):
    """Phi-4 multimodal as published; adapters are in its folders vision-lora and speech-lora."""

    config_type = Phi4MMConfig

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        ignore = (r"\.lora_[AB]\.",)
        return evolve(names, rename=(*_RENAME, *names.rename), ignore=(*ignore, *names.ignore))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = dict(super().tiny())
        sound = table.pop("audio_config")
        theirs = {ours: key for key, ours in _SOUND.items()}
        config = {theirs[key]: value for key, value in sound.items() if key in theirs}
        config |= {
            "nemo_conv_settings": {"conv_channels": sound["nemo_conv_channels"]},
            "relative_attention_bias_args": {
                "type": "t5", "t5_bias_max_distance": sound["bias_max_distance"]
            },
        }  # fmt: skip
        return {
            **table,
            "architectures": ["Phi4MMForCausalLM"],
            "model_type": "phi4mm",
            "audio_processor": {"name": "cascades", "config": config},
            "audio_config": {"audio_token_id": sound["audio_token_id"]},
        }
