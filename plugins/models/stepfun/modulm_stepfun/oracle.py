"""Reference for tests of Step 3: transformers' Mixtral with factored queries and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Linear, Sequential

from modulm_layers.testing import Converted

__all__ = ["AsMixtral"]

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
            **config,
            "model_type": "mixtral",
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "intermediate_size": config["moe_intermediate_size"],
            "num_local_experts": config["moe_num_experts"],
            "num_experts_per_tok": config["moe_top_k"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
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
            else:
                layer.mlp = dense(config["intermediate_size"])
        return model.float().eval()


def _add(block: Any, arguments: tuple[Tensor, ...], mixed: Any) -> Any:
    """Add the shared expert to the others."""
    both = block.share_expert(arguments[0])
    return (mixed[0] + both, *mixed[1:]) if isinstance(mixed, tuple) else mixed + both
