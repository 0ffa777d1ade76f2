"""References for tests: transformers' Llama, whose layers run several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modulm_layers.testing import Converted

__all__ = ["AsGatedLlama", "AsLlama", "AsLoopedLlama"]


def _masks(count: int, reach: int) -> Tensor:
    """Zero where a token sees another one, at most `reach` of the last ones: [1, 1, n, n]."""
    seen = torch.ones(count, count).tril().triu(1 - reach).bool()
    return torch.zeros(count, count).masked_fill(~seen, -torch.inf)[None, None]


class AsLoopedLlama(Converted):
    """transformers' Llama, normed after each of `num_loops` runs."""

    loops = "num_loops"

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"rms_norm_eps": 1e-5, **config, "model_type": "llama"}

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return weights

    @torch.no_grad()
    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Tensor:
        """Compute logits: [tokens, vocabulary] fp32."""
        model = self._model(config)
        self._read(config, model, weights)
        inner, count = model.model, len(tokens)
        x = inner.embed_tokens(torch.tensor([list(tokens)]))
        turns = inner.rotary_emb(x, torch.arange(count)[None])
        for loop in range(config[self.loops]):
            x = self._run(config, inner, x, turns, loop)
        logits: Tensor = model.lm_head(self._last(inner, x))[0]
        return logits

    def _last(self, inner: Any, x: Tensor) -> Tensor:
        return x

    def _run(
        self, config: Mapping[str, Any], inner: Any, x: Tensor, turns: Any, loop: int
    ) -> Tensor:
        mask = _masks(x.shape[1], x.shape[1])
        for layer in inner.layers:
            x = self._layer(layer, x, {"position_embeddings": turns, "attention_mask": mask})
        last = loop == config[self.loops] - 1
        normed: Tensor = inner.norm(x) if last or not config.get("skip_loop_final_norm") else x
        return normed

    def _layer(self, layer: Any, x: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        x = x + layer.self_attn(hidden_states=layer.input_layernorm(x), **inputs)[0]
        out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return out


class AsLlama(AsLoopedLlama):
    """transformers' Llama with two more norms per layer."""

    loops = "total_ut_steps"

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"rms_norm_eps": 1e-6, **config, "model_type": "llama"}

    def _model(self, config: Mapping[str, Any]) -> Any:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        model = super()._model(config)
        for layer in model.model.layers:
            for name in ("input_layernorm_2", "post_attention_layernorm_2"):
                eps = model.config.rms_norm_eps
                layer.add_module(name, LlamaRMSNorm(config["hidden_size"], eps))
        return model

    def _layer(self, layer: Any, x: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        seen, _ = layer.self_attn(hidden_states=layer.input_layernorm(x), **inputs)
        x = x + layer.input_layernorm_2(seen)
        mixed = layer.mlp(layer.post_attention_layernorm(x))
        out: Tensor = x + layer.post_attention_layernorm_2(mixed)
        return out


class AsGatedLlama(AsLoopedLlama):
    """transformers' Llama; later runs mix two attentions by the equations of LoopCoder's card."""

    loops = "loop_num"

    def __init__(self) -> None:
        self._first: list[tuple[Tensor, Tensor]] = []

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"rms_norm_eps": 1e-6, **config, "model_type": "llama"}

    def _model(self, config: Mapping[str, Any]) -> Any:
        model, heads = super()._model(config), config["num_attention_heads"]
        size = model.config.head_dim
        gates = [nn.Linear(size, heads) for _ in range(config["num_hidden_layers"])]
        model.model.gate_projections = nn.ModuleList(gates)
        return model

    def _last(self, inner: Any, x: Tensor) -> Tensor:
        normed: Tensor = inner.norm(x)
        return normed

    def _run(
        self, config: Mapping[str, Any], inner: Any, x: Tensor, turns: Any, loop: int
    ) -> Tensor:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        count = x.shape[1]
        if not loop:
            self._first = []
        for place, layer in enumerate(inner.layers):
            normed, at = layer.input_layernorm(x), layer.self_attn
            q, k, v = (
                project(normed)[0].unflatten(-1, (-1, at.head_dim)).transpose(0, 1)
                for project in (at.q_proj, at.k_proj, at.v_proj)
            )
            q, k = (part[0] for part in apply_rotary_pos_emb(q[None], k[None], *turns))
            k, v = (part.repeat_interleave(len(q) // len(k), 0) for part in (k, v))
            if not loop:
                self._first.append((k, v))
                seen = _attend(q, k, v, count)
            else:
                gates = inner.gate_projections[place]
                logits = torch.stack([gates(head)[:, i] for i, head in enumerate(q)])
                gate = logits.sigmoid()[..., None]
                whole = _attend(q, *self._first[place], count)
                seen = gate * whole + (1 - gate) * _attend(q, k, v, config["loop_window_size"])
            x = x + at.o_proj(seen.transpose(0, 1).flatten(1))[None]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x


def _attend(q: Tensor, k: Tensor, v: Tensor, reach: int) -> Tensor:
    """q, k, v: [heads, tokens, size] -> the same shape."""
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 + _masks(q.shape[1], reach)[0]
    return scores.softmax(-1) @ v
