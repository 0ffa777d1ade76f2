"""Intern-S2 Preview and Mobius: Qwen3.5 with experts, whose encoder of time series is not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import asdict, evolve, fields, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch, MtpLayer
from modulm.errors import UnsupportedError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import GatedMLP, size
from modulm_qwen.moe import make_experts
from modulm_qwen.qwen3_5 import Qwen35MoeConfig, Qwen35MoeForCausalLM, Qwen35MoeLayer
from modulm_qwen.qwen3_next import (
    GatedDeltaNet,
    delta_mtp,
    gated_attention,
    offset_norm,
)
from modulm_qwen.vl import Qwen35MoeForConditionalGeneration, QwenVLConfig
from modulm_towers import TextConfig

__all__ = [
    "InternS2MobiusConfig",
    "InternS2MobiusForConditionalGeneration",
    "InternS2PreviewConfig",
    "InternS2PreviewForConditionalGeneration",
    "MobiusTextForCausalLM",
]


@frozen(eq=False, kw_only=True)
class InternS2PreviewConfig(QwenVLConfig):
    """config.json of Intern-S2 Preview: Qwen3.5's keys under a model type of its own."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        name, kind = "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"
        parts = {
            "text_config": {**(table.get("text_config") or {}), "model_type": f"{kind}_text"},
            "vision_config": {**(table.get("vision_config") or {}), "model_type": kind},
        }
        return super().from_table(
            {**table, **parts, "architectures": [name], "model_type": kind}, file
        )


class InternS2PreviewForConditionalGeneration(Qwen35MoeForConditionalGeneration):
    """Intern-S2 Preview, of images and videos."""

    config_type: ClassVar[type] = InternS2PreviewConfig

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        return evolve(names, ignore=(r"^(model\.)?time_series\.", *names.ignore))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {
            "architectures": ["InternS2PreviewForConditionalGeneration"],
            "model_type": "interns2_preview",
        }
        return {**super().tiny(), **names}


@frozen(kw_only=True)
class _MobiusKeys:
    """num_blocks: sets of experts, which the layers take in turns. layer_scale: whether learned
    factors scale the branches.
    """

    num_blocks: int = size()
    layer_scale: bool = False


@frozen(kw_only=True)
class _MobiusTextConfig(Qwen35MoeConfig):
    """`text_config` of Mobius: Qwen3.5's keys with those of `_MobiusKeys`."""

    num_blocks: int = size()
    layer_scale: bool = False


class _SharedExpert(Module):
    """A layer's own expert with a learned gate, beside a set of routed ones."""

    def __init__(self, c: _MobiusTextConfig, b: Builder, experts: Module) -> None:
        super().__init__()
        inner, self.ops = c.shared_expert_intermediate_size, b.ops
        # Several layers run the same experts; the model owns them.
        object.__setattr__(self, "experts", experts)
        self.shared = GatedMLP(b.at("shared_expert"), c.hidden_size, inner, c.hidden_act)
        self.gate = b.linear("shared_expert_gate", c.hidden_size, 1, split=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        experts: Any = self.__dict__["experts"]
        mixed: Tensor = self.ops.add(experts(x), self.shared(x), self.gate(x))
        return mixed


class _MobiusLayer(Module):
    """Delta rule or gated attention, then experts, each scaled and added to the stream."""

    attn_scale: Tensor
    mlp_scale: Tensor

    def __init__(self, c: _MobiusTextConfig, b: Builder, index: int, experts: Module) -> None:
        super().__init__()
        self.attn_norm = offset_norm(c, b, "input_layernorm")
        self.attn: Any = (
            GatedDeltaNet(c, b.at("linear_attn"))
            if c.recurrent(index)
            else gated_attention(c, b, index)
        )
        self.mlp_norm = offset_norm(c, b, "post_attention_layernorm")
        self.mlp = _SharedExpert(c, b.at("mlp"), experts)
        self.scaled = c.layer_scale
        if self.scaled:
            b.parameter("attn_layer_scale", self, "attn_scale", (1, 1, c.hidden_size))
            b.parameter("ffn_layer_scale", self, "mlp_scale", (1, 1, c.hidden_size))

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x, residual = self.attn_norm.add(x, residual)
        seen = self.attn(x, batch)
        x, residual = self.mlp_norm.add(
            seen * (1 + self.attn_scale[0]) if self.scaled else seen, residual
        )
        mixed = self.mlp(x)
        return mixed * (1 + self.mlp_scale[0]) if self.scaled else mixed, residual


class MobiusTextForCausalLM(Qwen35MoeForCausalLM):
    """Mobius's text model, whose layers share sets of experts; it is not registered."""

    config_type = _MobiusTextConfig

    def __init__(self, config: Any, build: Builder) -> None:
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                "pipeline_parallel_size: not supported yet: layers of several stages share experts"
            )
        at = build.at("model.meta_mlp")
        banks = [make_experts(config, at.at(str(i))) for i in range(config.num_blocks)]
        # The base class uses these modules before they can be submodules.
        self.__dict__["_banks"] = banks
        super().__init__(config, build)
        self.banks = ModuleList(banks)

    def layer(self, c: Any, b: Builder, index: int) -> _MobiusLayer:
        """A layer with the set of experts whose turn it is."""
        return _MobiusLayer(c, b, index, self.__dict__["_banks"][index % c.num_blocks])

    @classmethod
    def mtp(cls, config: Any) -> MtpLayer | None:
        return delta_mtp(config, Qwen35MoeLayer)


@frozen(eq=False, kw_only=True)
class InternS2MobiusConfig(InternS2PreviewConfig):
    """config.json of Intern-S2 Mobius."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        read = super().from_table(table, file)
        keys = read_config(dict(table.get("text_config") or {}), _MobiusKeys, file)
        known = {
            field.name: getattr(read.text.text, field.name) for field in fields(Qwen35MoeConfig)
        }
        inner = _MobiusTextConfig(**known, **asdict(keys))
        text = TextConfig(
            MobiusTextForCausalLM, inner, read.text.name, read.text.has_own_quantization
        )
        return evolve(read, text=text)


class InternS2MobiusForConditionalGeneration(InternS2PreviewForConditionalGeneration):
    """Intern-S2 Mobius, of images and videos."""

    config_type: ClassVar[type] = InternS2MobiusConfig

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = super().tiny()
        names = {
            "architectures": ["InternS2MobiusForConditionalGeneration"],
            "model_type": "interns2_mobius",
        }
        text = {**table["text_config"], "num_blocks": 2, "layer_scale": True}
        return {**table, **names, "text_config": text}
