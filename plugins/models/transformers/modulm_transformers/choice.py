"""Models of transformers by what they read: text, images and sounds, or another text first."""

from __future__ import annotations

from typing import Any

from modulm.nn import Builder
from modulm_transformers.bridge import BridgedForCausalLM
from modulm_transformers.config import RemoteConfig, TransformersConfig
from modulm_transformers.encoder import TransformersForPooling
from modulm_transformers.encoder_decoder import TransformersEncoderDecoder
from modulm_transformers.image_model import seeing

__all__ = ["RemoteForCausalLM", "TransformersForCausalLM"]


class TransformersForCausalLM(BridgedForCausalLM):
    """A causal language model of transformers, or what its config.json asks for instead."""

    def __new__(cls, config: TransformersConfig, build: Builder) -> Any:
        """Select the class: pooling models and models with images have other ones."""
        if not config.generates:
            return TransformersForPooling(config, build)
        if config.crosses:
            return TransformersEncoderDecoder(config, build)
        return seeing(config)(config, build) if config.sees else super().__new__(cls)


class RemoteForCausalLM(TransformersForCausalLM):
    """A causal language model with code in the checkpoint, written for transformers."""

    config_type = RemoteConfig
    remote_code = True
