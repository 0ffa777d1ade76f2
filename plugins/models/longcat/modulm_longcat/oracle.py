"""Reference for tests of LongCat-Flash-Lite: transformers' LongCat-Flash on embeddings that are
computed token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modulm_layers.testing import Converted, split_experts

__all__ = ["WithNgrams"]


def _sizes(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The rows of each table, and how many tokens it hashes."""
    split, most = config["emb_split_num"], config["emb_neighbor_num"]
    first = config["ngram_vocab_size_ratio"] * config["vocab_size"] + 1
    return [(first + 2 * i, i // split + 2) for i in range(split * (most - 1))]


class WithNgrams(Converted):
    """transformers' LongCat-Flash."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config, "model_type": "longcat_flash"}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return split_experts(weights)

    def _model(self, config: Mapping[str, Any]) -> Any:
        model, sizes = super()._model(config), _sizes(config)
        hidden, added = config["hidden_size"], nn.Module()
        width = hidden // len(sizes)
        added.embedders = nn.ModuleList(nn.Embedding(rows, width) for rows, _ in sizes)
        added.post_projs = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in sizes)
        model.model.ngram_embeddings = added
        return model.eval()

    @torch.no_grad()
    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Tensor:
        """Compute logits: [tokens, vocabulary] fp32."""
        model = self._model(config)
        self._read(config, model, weights)
        added, vectors = model.model.ngram_embeddings, []
        for at, token in enumerate(tokens):
            parts = [model.model.embed_tokens.weight[token]]
            for i, (rows, count) in enumerate(_sizes(config)):
                hashed = 0
                for back in range(min(count, at + 1)):
                    if tokens[at - back] == config["eos_token_id"]:
                        break
                    hashed += tokens[at - back] * config["vocab_size"] ** back
                parts.append(added.post_projs[i](added.embedders[i].weight[hashed % rows]))
            vectors.append(torch.stack(parts).mean(0))
        logits: Tensor = model(inputs_embeds=torch.stack(vectors)[None]).logits[0]
        return logits
