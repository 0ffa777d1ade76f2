"""A tiny checkpoint that speaks: CSM with a random codec, in the published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from modulm.testing.checkpoints import save_tiny, tiny_model

__all__ = ["ARCHITECTURE", "make_csm"]

ARCHITECTURE = "CsmForConditionalGeneration"
#: The codec's last convolution, made smaller so that samples are between -1 and 1.
_LAST = "codec_model.decoder.decoder_seanet.layers.8."


def make_csm(folder: Path, **changes: Any) -> Any:
    """Write a tiny CSM to a folder; returns the model of transformers that it was written from.

    Its codebooks are buffers, which are zero in an untrained model. No token ends a text: the sound
    ends with a frame of zeros.
    """
    model = tiny_model(ARCHITECTURE, **changes)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("embed_sum"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        if name.endswith("cluster_usage"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    for name, parameter in model.named_parameters():
        if name.startswith(_LAST):
            parameter.data *= 1e-4
    model.config.eos_token_id = None
    model.generation_config.eos_token_id = None
    save_tiny(model, folder)
    path = folder / "generation_config.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))
    return model
