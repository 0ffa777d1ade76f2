"""References for tests: transformers' Mixtral with Step 3's queries and shared experts, its Llama
with Step 1's biases, its Step 3.7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Sequential

from modulm_layers.testing import Converted, rotary

__all__ = ["AsMixtral", "AsStep37", "WithRoots"]

_NAMES = {
    "q_proj.0.": "q_proj.",
    "q_proj.1.": "inter_norm.",
    "q_proj.2.": "wq.",
    ".mlp.experts.gate_up_proj": ".moe.gate_up_proj",
    ".mlp.experts.down_proj": ".moe.down_proj.weight",
    ".mlp.gate.": ".moe.gate.",
    ".mlp.share_expert.": ".share_expert.",
}


class AsMixtral(Converted):
    """transformers' Mixtral; the first layer has Llama's dense block."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "rms_norm_eps": 1e-5,
            **config,
            "model_type": "mixtral",
            "sliding_window": None,
            "intermediate_size": config["moe_intermediate_size"],
            "num_local_experts": config["moe_num_experts"],
            "num_experts_per_tok": config["moe_top_k"],
            "rope_parameters": rotary(config),
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        stored = dict(self.renamed(weights, _NAMES))
        for name in [name for name in stored if name.endswith("gate_up_proj")]:
            gate, up = stored.pop(name).chunk(2, dim=1)
            at = name.removesuffix("gate_up_proj")
            stored |= {f"{at}gate_proj.weight": gate, f"{at}up_proj.weight": up}
        return stored

    def _model(self, config: Mapping[str, Any]) -> Any:
        from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP
        from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

        def dense(inner: int) -> Any:
            return LlamaMLP(LlamaConfig(hidden_size=hidden, intermediate_size=inner))

        model, hidden = super()._model(config), config["hidden_size"]
        width = config["head_dim"] * config["num_attention_heads"]
        for index, layer in enumerate(model.model.layers):
            shared = config["share_q_dim"]
            layer.self_attn.q_proj = Sequential(
                Linear(hidden, shared, bias=False),
                MixtralRMSNorm(shared, 1e-5),
                Linear(shared, width, bias=False),
            )
            if index:
                layer.mlp.share_expert = dense(config["share_expert_dim"])
                layer.mlp.register_forward_hook(_add)
                if not config.get("norm_expert_weight", False):
                    layer.mlp.gate.register_forward_hook(_unnormed)
            else:
                layer.mlp = dense(config["intermediate_size"])
        return model.float().eval()


def _unnormed(router: Any, arguments: Any, routed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Weigh the chosen experts by their probabilities among all."""
    logits, _, chosen = routed
    return logits, logits.float().softmax(-1).gather(-1, chosen), chosen


def _sigmoids(router: Any, arguments: Any, routed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Weigh the chosen experts by their sigmoids, whose sum is not 1."""
    logits, _, chosen = routed
    return logits, logits.float().sigmoid().gather(-1, chosen), chosen


def _add(block: Any, arguments: tuple[Tensor, ...], mixed: Any) -> Any:
    """Add the shared expert to the others."""
    both = block.share_expert(arguments[0])
    return (mixed[0] + both, *mixed[1:]) if isinstance(mixed, tuple) else mixed + both


class AsStep37(Converted):
    """The text model of transformers' Step 3.7 with a language-model head."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return config

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        names = {
            ".mlp.gate.weight": ".moe.gate.weight",
            ".mlp.gate.e_score_correction_bias": ".moe.router_bias",
            ".mlp.experts.gate_up_proj": ".moe.gate_up_proj",
            ".mlp.experts.down_proj": ".moe.down_proj.weight",
            ".mlp.shared_experts.": ".share_expert.",
        }
        stored = dict(self.renamed(weights, names))
        for name in [name for name in stored if name.endswith(".moe.gate_up_proj")]:
            gate, up = stored.pop(name).chunk(2, dim=1)
            at = name.removesuffix("gate_up_proj")
            stored |= {f"{at}gate_proj.weight": gate, f"{at}up_proj.weight": up}
        return stored

    def _model(self, config: Mapping[str, Any]) -> Any:
        from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
        from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

        settings = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
        theirs = Step3p7TextConfig(**settings, attn_implementation="eager")
        model = _WithHead(Step3p7TextModel(theirs).float(), theirs).eval()
        if config.get("tie_word_embeddings"):
            model.lm_head.weight = model.model.embed_tokens.weight
        for layer in () if config.get("norm_expert_weight", True) else model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(_sigmoids)
        return model


class _WithHead(Module):
    def __init__(self, model: Any, config: Any) -> None:
        super().__init__()
        self.model, self.config = model, config
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Any:
        states = self.model(tokens).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(states))


class WithRoots(Converted):
    """transformers' Llama whose attention has no rotary positions but Step 1's biases."""

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        heads = config["num_attention_groups"]
        return {
            "rms_norm_eps": 1e-5,
            **config,
            "model_type": "llama",
            "num_key_value_heads": heads,
        }

    def store(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return weights

    def _model(self, config: Mapping[str, Any]) -> Any:
        model = super()._model(config)
        heads = config["num_attention_heads"]
        slopes = torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)])
        for layer in model.model.layers:
            layer.self_attn.forward = _rooted(layer.self_attn, slopes)
        return model


def _rooted(attention: Any, slopes: Tensor) -> Callable[..., tuple[Tensor, None]]:
    def forward(hidden_states: Tensor, **inputs: Any) -> tuple[Tensor, None]:
        x, size = hidden_states[0], attention.head_dim
        q, k, v = (
            getattr(attention, f"{name}_proj")(x).view(len(x), -1, size).transpose(0, 1)
            for name in "qkv"
        )
        k, v = (part.repeat_interleave(len(q) // len(k), 0) for part in (k, v))
        at = torch.arange(len(x))
        apart = at[:, None] - at
        scores = q @ k.transpose(1, 2) / size**0.5
        scores = scores - slopes[:, None, None] * apart.clamp_min(0).float().sqrt()
        weights = scores.masked_fill(apart < 0, -torch.inf).softmax(-1)
        out: Tensor = attention.o_proj((weights @ v).transpose(0, 1).flatten(1))
        return out[None], None

    return forward
