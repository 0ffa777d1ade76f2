"""Reference for tests of Alice AI: transformers' Qwen3-Next with Kimi Linear's delta rule, experts
scored by sigmoids, and residuals by the equations of Attention Residuals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modulm_layers.testing import Converted, rotary

__all__ = ["AsQwen3Next"]


class _Experts(nn.Module):
    def __init__(self, config: Mapping[str, Any], settings: Any) -> None:
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextMLP

        super().__init__()
        hidden, count = config["hidden_size"], config["num_experts"]
        self.gate = nn.Linear(hidden, count, bias=False)
        self.gate.e_score_correction_bias = nn.Parameter(torch.zeros(count))
        inner = config["moe_intermediate_size"]
        self.experts = nn.ModuleList(Qwen3NextMLP(settings, inner) for _ in range(count))
        self.shared_expert = Qwen3NextMLP(settings, config["shared_expert_intermediate_size"])
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)
        self.top, self.unit = config["num_experts_per_tok"], config.get("norm_topk_prob", True)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.gate.e_score_correction_bias).topk(self.top, -1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        if self.unit:
            weights = weights / weights.sum(-1, keepdim=True)
        out = sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        return out + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)


class AsQwen3Next(Converted):
    """The layers of transformers, between which residuals are mixed here."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        part = config.get("partial_rotary_factor", 0.25)
        rope = rotary(config, partial_rotary_factor=part)
        return {**config, "model_type": "qwen3_next", "rope_parameters": rope}

    def _model(self, config: Mapping[str, Any]) -> Any:
        from transformers.models.kimi_linear import configuration_kimi_linear as kimi
        from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

        model = super()._model(config)
        delta = kimi.KimiLinearConfig(
            hidden_size=config["hidden_size"],
            num_hidden_layers=config["num_hidden_layers"],
            layer_types=config["layer_types"],
            linear_num_heads=config["linear_num_key_heads"],
            linear_head_dim=config["linear_key_head_dim"],
            linear_conv_kernel_dim=config.get("linear_conv_kernel_dim", 4),
            rms_norm_eps=config["rms_norm_eps"],
        )
        hidden = config["hidden_size"]
        for index, layer in enumerate(model.model.layers):
            if config["layer_types"][index] == "linear_attention":
                layer.linear_attn = KimiLinearDeltaAttention(delta, index).float()
                gate = layer.linear_attn.forget_gate  # made without values
                nn.init.uniform_(gate.A_log, 0.0, 2.0)
                nn.init.uniform_(gate.dt_bias, -5.0, -1.0)
            layer.mlp = _Experts(config, model.config)
            for name in ("attn_res", "mlp_res") if index else ("mlp_res",):
                layer.register_parameter(f"{name}_norm_weight", nn.Parameter(torch.ones(hidden)))
                layer.add_module(f"{name}_proj", nn.Linear(hidden, 1, bias=False))
        final = nn.Module()
        final.res_norm_weight = nn.Parameter(torch.ones(hidden))
        final.res_proj = nn.Linear(hidden, 1, bias=False)
        model.model.attnres_final = final
        return model.eval()

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = dict(weights)
        for name in weights:
            if name.endswith("linear_attn.conv1d.weight"):
                parts = stored.pop(name).chunk(3)
                for n, part in zip("qkv", parts, strict=True):
                    stored[name.replace("conv1d", f"{n}_conv1d")] = part
        return self.renamed(stored, {".forget_gate.": "."})

    @torch.no_grad()
    def logits(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Tensor:
        """Compute logits: [tokens, vocabulary] fp32."""
        model, eps = self._model(config), config["rms_norm_eps"]
        self._read(config, model, weights)
        inner, count = model.model, len(tokens)
        x = inner.embed_tokens(torch.tensor([list(tokens)]))
        turns = inner.rotary_emb(x, torch.arange(count)[None])
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        blocks, partial = [x], None
        for index, layer in enumerate(inner.layers):
            if index and not index % config["block_attn_res_block_size"]:
                blocks, partial = [*blocks, partial], None
            before = [] if partial is None else [partial]
            x = _mix([*blocks, *before], layer, "attn_res", eps) if index else blocks[0]
            x = layer.input_layernorm(x)
            if hasattr(layer, "linear_attn"):
                out = layer.linear_attn(x)
            else:
                out = layer.self_attn(x, position_embeddings=turns, attention_mask=mask)[0]
            partial = out if partial is None else partial + out
            x = _mix([*blocks, partial], layer, "mlp_res", eps)
            partial = partial + layer.mlp(layer.post_attention_layernorm(x))
        x = _mix([*blocks, partial], inner.attnres_final, "res", eps)
        logits: Tensor = model.lm_head(inner.norm(x))[0]
        return logits


def _mix(sources: list[Any], at: Any, name: str, eps: float) -> Tensor:
    """Softmax over sources of norm(source) * weight . query, times the sources."""
    values = torch.stack(sources)
    normed = values / (values.square().mean(-1, keepdim=True) + eps).sqrt()
    scores = getattr(at, f"{name}_proj")(normed * getattr(at, f"{name}_norm_weight"))
    return (scores.softmax(0) * values).sum(0)
