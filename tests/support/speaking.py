"""Tiny checkpoints that speak, with random codecs, in the published layouts: CSM, Qwen3-Omni."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from modulm.testing.checkpoints import save_tiny, tiny_model

__all__ = ["ARCHITECTURE", "OMNI", "OMNI_25", "make_csm", "make_omni", "make_omni25"]

ARCHITECTURE = "CsmForConditionalGeneration"
OMNI, OMNI_25 = "Qwen3OmniMoeForConditionalGeneration", "Qwen2_5OmniForConditionalGeneration"
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


def make_omni(folder: Path, tokenizer: Any) -> Any:
    """Write a tiny Qwen3-Omni to a folder; returns the model of transformers that it was written
    from. Its talker chooses the most likely codes.
    """
    user, assistant = (
        tokenizer.encode(role, add_special_tokens=False)[0] for role in ("user", "assistant")
    )
    model = tiny_model(OMNI, user_token_id=user, assistant_token_id=assistant)
    last, codec = model.code2wav.decoder[-1].conv, model.code2wav
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(64, (1, codec.config.num_quantizers, 60), generator=generator)
    with torch.no_grad():
        while codec(codes).abs().max() > 0.4:
            last.weight *= 0.5
            last.bias *= 0.5
    save_tiny(model, folder)
    path = folder / "generation_config.json"
    table = {"eos_token_id": 2, "talker_do_sample": False, "talker_max_new_tokens": 14}
    path.write_text(json.dumps(table))
    return model


def make_omni25(folder: Path) -> Any:
    """Write a tiny Qwen2.5-Omni, with two voices; as `make_omni`."""
    model = tiny_model(OMNI_25)
    vocoder, dit = model.token2wav.code2wav_bigvgan_model, model.config.token2wav_config.dit_config
    with torch.no_grad():
        mel = torch.randn(1, dit.mel_dim, 20)
        while vocoder(mel).abs().max() > 0.5:
            vocoder.conv_post.weight *= 0.5
    for number, name in enumerate(("Chelsie", "Ethan")):
        generator = torch.Generator().manual_seed(number)
        model.speaker_map[name] = {
            "bos_token": 501,
            "cond": torch.randn(1, dit.enc_emb_dim, generator=generator),
            "ref_mel": torch.randn(1, 20, dit.mel_dim, generator=generator),
        }
    save_tiny(model, folder)
    torch.save(model.speaker_map, folder / "spk_dict.pt")
    path = folder / "generation_config.json"
    table = {"eos_token_id": 2, "talker_do_sample": False, "talker_max_new_tokens": 14}
    path.write_text(json.dumps(table))
    return model
