"""Reference for tests of Baichuan: transformers' Llama, with ALiBi where needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modulm_layers.testing import Converted

__all__ = ["AsLlama"]


class AsLlama(Converted):
    """transformers' Llama; for ALiBi without positions and with distances in the mask."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config, "model_type": "llama"}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = dict(weights)
        for name in [name for name in weights if ".q_proj." in name]:
            parts = [stored.pop(name.replace("q_proj", f"{n}_proj")) for n in "qkv"]
            stored[name.replace("q_proj", "W_pack")] = torch.cat(parts)
        return stored

    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Tensor:
        normed = config.get("norm_head")
        if config["vocab_size"] == 125696 if normed is None else normed:
            weights = {**weights, "lm_head.weight": F.normalize(weights["lm_head.weight"])}
        if "BaiChuanForCausalLM" in config["architectures"]:
            return super().logits(config, weights, tokens)
        model = self._model(config)
        self._read(config, model, weights)
        at, heads = torch.arange(len(tokens)), config["num_attention_heads"]
        slopes = 2.0 ** (-8 * (torch.arange(heads) + 1) / heads)
        mask = slopes[:, None, None] * (at[None, :] - at[:, None])
        mask = mask.masked_fill(at[None, :] > at[:, None], torch.finfo(torch.float32).min)
        logits: Tensor = model(
            torch.tensor([list(tokens)]),
            attention_mask=mask[None],
            position_ids=torch.zeros(1, len(tokens), dtype=torch.int64),
        ).logits[0]
        return logits
