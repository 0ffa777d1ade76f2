"""Gemma 3n for text (Google, 2025): four residual streams, of which each layer computes one.

AltUp (Baykal et al., arXiv 2301.13310) predicts the others. A low-rank branch runs parallel to
attention (LAuReL, arXiv 2411.07501); gates of the first layers are sparse.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch
from modulm.nn import Builder, Embedding, Head, WeightNames
from modulm_gemma4.attention import SharedKeyValues, attention, shared_names
from modulm_gemma4.config import Gemma3nConfig
from modulm_gemma4.inputs import LayerInputs
from modulm_layers import DecoderForCausalLM, GatedMLP, activation, tiny_config

__all__ = ["AltUp", "Gemma3nForCausalLM", "Gemma3nLayer", "Laurel", "SparseMLP"]


class AltUp(Module):
    """AltUp: predicts and corrects the streams [n, tokens, hidden] around a layer that computes
    one.
    """

    output_scale: Tensor

    def __init__(self, c: Gemma3nConfig, b: Builder) -> None:
        super().__init__()
        self.streams, self.active, hidden = c.altup_num_inputs, c.altup_active_idx, c.hidden_size
        self.ops, self.scale, self.scaled = b.ops, 1.0 / hidden, c.altup_correct_scale
        n = self.streams
        self.norm = b.rms_norm("router_norm", hidden, c.rms_norm_eps)
        self.router = b.linear("modality_router", hidden, n, split=False)
        self.prediction = b.linear("prediction_coefs", n, n * n, split=False)
        self.correction = b.linear("correction_coefs", n, n, split=False)
        b.parameter("correct_output_scale", self, "output_scale", (hidden,))

    def predict(self, x: Tensor) -> Tensor:
        """Predict each stream from all of them."""
        n = self.streams
        maps = self.prediction(self._mixture(x[self.active])).view(-1, n, n).permute(1, 2, 0)
        predicted = x.clone()
        for source in range(n):
            predicted += maps[:, source].unsqueeze(-1) * x[source]
        return predicted

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Correct the streams by the error of the computed one [tokens, hidden]."""
        weights = self.correction(self._mixture(computed)).t() + 1.0
        moved: Tensor = weights.unsqueeze(-1) * (computed - predicted[self.active])
        return predicted + moved

    def seen(self, x: Tensor) -> Tensor:
        """The computed stream, scaled for the per-layer input."""
        active = x[self.active]
        return active * self.output_scale if self.scaled else active

    def _mixture(self, x: Tensor) -> Tensor:
        routed = self.router(self.ops.scale(self.norm(x), self.scale))
        return torch.tanh(routed.float()).to(x.dtype)


class Laurel(Module):
    """x + norm(right(left(x)))."""

    def __init__(self, c: Gemma3nConfig, b: Builder) -> None:
        super().__init__()
        self.ops, hidden, rank = b.ops, c.hidden_size, c.laurel_rank
        self.left = b.linear("linear_left", hidden, rank, split=False)
        self.right = b.linear("linear_right", rank, hidden, split=False)
        self.norm = b.rms_norm("post_laurel_norm", hidden, c.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> the same shape."""
        both: Tensor = self.ops.add(x, self.norm(self.right(self.left(x))))
        return both


class SparseMLP(GatedMLP):
    """A feed-forward block that keeps only gates above a quantile of a normal distribution."""

    def __init__(self, c: Gemma3nConfig, b: Builder, index: int) -> None:
        inner = int(c.per_layer("intermediate_size")[index])
        super().__init__(b, c.hidden_size, inner, c.hidden_activation)
        self.group = b.shared.mesh.tensor
        cut = float(c.per_layer("activation_sparsity_pattern")[index])
        self.deviations = NormalDist().inv_cdf(cut) if cut else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> the same shape."""
        if self.deviations is None:
            return super().forward(x)
        gate, up = self.gate_up(x).chunk(2, -1)
        wide = self.group.all_gather(gate).float()
        deviation, mean = torch.std_mean(wide, dim=-1, keepdim=True, unbiased=False)
        gate = (gate.float() - (mean + deviation * self.deviations)).relu().to(x.dtype)
        out: Tensor = self.down(self.act(torch.cat([gate, up], -1)))
        return out


class Gemma3nLayer(Module):
    """Attention plus a low-rank branch, feed-forward, then the layer's per-token input."""

    def __init__(self, c: Gemma3nConfig, b: Builder, index: int) -> None:
        super().__init__()
        hidden, eps, width = c.hidden_size, c.rms_norm_eps, c.hidden_size_per_layer_input
        self.ops = b.ops
        self.altup = AltUp(c, b.at("altup"))
        self.laurel = Laurel(c, b.at("laurel"))
        self.attn_norm = b.rms_norm("input_layernorm", hidden, eps)
        self.attn = attention(c, b, index)
        self.attn_post = b.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp_norm = b.rms_norm("pre_feedforward_layernorm", hidden, eps)
        self.mlp = SparseMLP(c, b.at("mlp"), index)
        self.mlp_post = b.rms_norm("post_feedforward_layernorm", hidden, eps)
        self.gate = b.linear("per_layer_input_gate", hidden, width, split=False)
        self.act = activation(c.hidden_activation, b.ops)
        self.widen = b.linear("per_layer_projection", width, hidden, split=False)
        self.own_post = b.rms_norm("post_per_layer_input_norm", hidden, eps)

    def forward(
        self, x: Tensor, layer_input: Tensor, batch: Batch, shared: dict[str, SharedKeyValues]
    ) -> Tensor:
        """x: [streams, tokens, hidden] -> the same shape; layer_input: [tokens, width]."""
        predicted = self.altup.predict(x)
        active = predicted[self.altup.active]
        normed = self.attn_norm(active)
        attended = self.ops.add(active, self.attn_post(self.attn(normed, batch, shared)))
        stream = (attended + self.laurel(normed)) * 2.0**-0.5
        stream = self.ops.add(stream, self.mlp_post(self.mlp(self.mlp_norm(stream))))
        x = self.altup.correct(predicted, stream)
        x[1:] += self.own_post(self.widen(self.act(self.gate(self.altup.seen(x))) * layer_input))
        return x


class Gemma3nForCausalLM(DecoderForCausalLM):
    """Gemma 3n (text) with a language-model head."""

    api = 1
    takes_embeds = False
    config_type = Gemma3nConfig
    layer = Gemma3nLayer

    def __init__(self, config: Gemma3nConfig, build: Builder) -> None:
        super().__init__(config, build)
        b, hidden = build.at(self.root), config.hidden_size
        self.inputs = LayerInputs(config, b)
        self.spread, self.gather = (
            ModuleList(
                b.linear(f"altup_{name}.{i}", hidden, hidden, split=False)
                for i in range(config.altup_num_inputs - 1)
            )
            for name in ("projections", "unembed_projections")
        )

    @classmethod
    def weights(cls, config: Gemma3nConfig) -> WeightNames:
        return WeightNames(ignore=shared_names(config))

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        hidden = config.hidden_size
        return b.embedding("embed_tokens", config.vocab_size, hidden, scale=hidden**0.5)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed if config.tie_word_embeddings else None
        cap = config.final_logit_softcapping or 0.0
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied, cap=cap)

    def forward(self, batch: Batch) -> Tensor:
        embedded: Tensor = self.embed(batch)
        layer_inputs = self.inputs(embedded, batch.tokens).unbind(1)
        size = _size(embedded)
        x = torch.stack([embedded, *(_sized(map_(embedded), size) for map_ in self.spread)])
        shared: dict[str, SharedKeyValues] = {}
        for layer, vector in zip(self.layers, layer_inputs, strict=True):
            x = layer(x, vector, batch, shared)
        size = _size(x[0])
        total = x[0]
        for map_, stream in zip(self.gather, x[1:], strict=True):
            total = total + _sized(map_(stream), size)
        normed: Tensor = self.norm(total / x.shape[0])
        return normed

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "gemma3n_text",
            "Gemma3nForCausalLM",
            num_hidden_layers=5,
            intermediate_size=[96, 96, 64, 96, 64],
            head_dim=16,
            sliding_window=12,
            layer_types=[
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=500,
            hidden_size_per_layer_input=8,
            altup_num_inputs=3,
            laurel_rank=12,
            activation_sparsity_pattern=[0.6, 0.6, 0.0, 0.0, 0.6],
            final_logit_softcapping=10.0,
        )


def _size(x: Tensor) -> Tensor:
    """The root mean square of each row: [tokens, 1] fp32."""
    return x.float().square().mean(-1, keepdim=True).sqrt()


def _sized(x: Tensor, size: Tensor) -> Tensor:
    """Scale the rows of x to the magnitude of `size`."""
    return (x.float() * size / _size(x).clamp(min=1e-5**0.5)).to(x.dtype)
