"""Intern-S1 Pro: Qwen3-VL with experts chosen in each group, and Fourier positions.

Fourier position embedding (arXiv 2412.17739): each angle's cosine and sine are learned mixtures of
those of all rotary angles, for each head of keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from attrs import evolve, fields, frozen
from torch import Tensor
from torch.nn import Module

from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import Attention, MoE, PreNormLayer, Routing, standard_mlp
from modulm_qwen.moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from modulm_qwen.vl import Qwen3VLMoeForConditionalGeneration, QwenVLConfig
from modulm_towers import TextConfig

__all__ = ["InternS1ProConfig", "InternS1ProForConditionalGeneration", "InternS1ProTextForCausalLM"]

#: Keys of `rope_scaling` that are not rotary settings.
_FOURIER = ("fope_init_factor", "fope_sep_head", "num_inv_freq")


@frozen(kw_only=True)
class _Keys:
    """router_n_groups: groups of experts, each with the same number of chosen ones."""

    router_n_groups: int = -1
    norm_topk_prob: bool = True


@frozen(kw_only=True)
class _TextConfig(Qwen3MoeConfig):
    """`text_config`: Qwen 3's keys with experts, and `_Keys`. num_inv_freq: angles that are mixed;
    None means those that turn at least once within the longest sequence.
    """

    router_n_groups: int = -1
    num_inv_freq: int | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        groups = self.router_n_groups
        if groups > 0 and (self.num_experts % groups or self.num_experts_per_tok % groups):
            raise ValueError(f"router_n_groups: {groups} groups do not divide the experts")

    def waves(self) -> Tensor:
        """[n] fp32: the angles of one position that are mixed."""
        rope = self.rope()
        waves = 1.0 / rope.theta ** (torch.arange(0, rope.size, 2, dtype=torch.float32) / rope.size)
        if self.num_inv_freq is not None:
            return waves[: self.num_inv_freq]
        return waves[waves > 2.0 * math.pi / self.max_position_embeddings]


class _Mixtures(Module):
    """The mixtures of cosines and of sines, which all layers share."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, c: _TextConfig, b: Builder) -> None:
        super().__init__()
        self.waves, self.pad = c.waves().to(b.shared.device), c.head_size // 2
        heads, size = b.shard(c.kv_heads, 1), len(self.waves)
        for name, attribute in (("cos_coef", "cosines"), ("sin_coef", "sines")):
            b.cut_parameter(name, self, attribute, (heads,), (size, size), dtype=torch.float32)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens] -> cosines and sines [tokens, heads of keys, head_dim / 2] fp32."""
        angles = positions[:, None].float() * self.waves
        mixed = (
            torch.einsum("tn,hnd->thd", values, mixture)
            for values, mixture in ((angles.cos(), self.cosines), (angles.sin(), self.sines))
        )
        # Dimensions without an angle have the value one in both.
        cosines, sines = (F.pad(x, (0, self.pad - x.shape[-1]), value=1.0) for x in mixed)
        return cosines, sines


class _Attention(Attention):
    """Attention with Fourier positions."""

    def __init__(self, c: _TextConfig, b: Builder, mixtures: _Mixtures, index: int) -> None:
        norms = (
            b.rms_norm("q_norm", c.head_size, c.rms_norm_eps),
            b.rms_norm("k_norm", c.head_size, c.rms_norm_eps),
        )
        super().__init__(
            b, hidden=c.hidden_size, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_size,
            bias=c.attention_bias, window=c.window(index), qk_norm=norms,
        )  # fmt: skip
        self.fusable = False
        # The model owns it.
        object.__setattr__(self, "mixtures", mixtures)

    def _project(
        self, qkv: Tensor, positions: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._project(qkv, positions, table)
        mixtures: Any = self.__dict__["mixtures"]
        cosines, sines = mixtures(positions)
        q = _turned(q.unflatten(1, (self.kv_heads, -1)), cosines[:, :, None], sines[:, :, None])
        return q.flatten(1, 2), _turned(k, cosines, sines), v


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the halves of the last axis by each other."""
    one, two = x.float().chunk(2, dim=-1)
    turned = torch.cat([one * cosines - two * sines, two * cosines + one * sines], dim=-1)
    return turned.to(x.dtype)


class _GroupedExperts(MoE):
    """Experts of which as many are chosen in each group."""

    def __init__(self, c: _TextConfig, b: Builder) -> None:
        super().__init__(
            b, hidden=c.hidden_size, inner=c.moe_intermediate_size, experts=c.num_experts,
            routing=Routing(c.num_experts_per_tok, renormalise=c.norm_topk_prob), act=c.hidden_act,
        )  # fmt: skip
        self.groups, self.each = c.router_n_groups, c.num_experts_per_tok // c.router_n_groups
        self.renormalises = c.norm_topk_prob

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [tokens, experts] -> weights [tokens, top_k] fp32 and expert ids."""
        scores = logits.float().softmax(-1).unflatten(-1, (self.groups, -1))
        weights, ids = scores.topk(self.each, dim=-1)
        first = torch.arange(self.groups, device=ids.device)[:, None] * scores.shape[-1]
        weights, ids = weights.flatten(1), (ids + first).flatten(1)
        return (weights / weights.sum(-1, keepdim=True) if self.renormalises else weights), ids


class _Layer(PreNormLayer):
    """Qwen 3's block with Fourier positions, and experts in its sparse layers."""

    def __init__(self, c: _TextConfig, b: Builder, index: int, mixtures: _Mixtures) -> None:
        if not c.sparse(index):
            mlp: Module = standard_mlp(c, b)
        elif c.router_n_groups > 0:
            mlp = _GroupedExperts(c, b.at("mlp"))
        else:
            mlp = MoE(
                b.at("mlp"), hidden=c.hidden_size, inner=c.moe_intermediate_size,
                experts=c.num_experts, act=c.hidden_act,
                routing=Routing(c.num_experts_per_tok, renormalise=c.norm_topk_prob),
            )  # fmt: skip
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            _Attention(c, b.at("self_attn"), mixtures, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            mlp,
        )


class InternS1ProTextForCausalLM(Qwen3MoeForCausalLM):
    """Intern-S1 Pro's text model; it is not registered."""

    config_type = _TextConfig
    #: torch's products, of angles with their mixtures, round by rows.
    batch_invariant = False

    def __init__(self, config: Any, build: Builder) -> None:
        mixtures = _Mixtures(config, build.at("model.rotary_emb"))
        # The base class uses the module before it can be a submodule.
        self.__dict__["_mixtures"] = mixtures
        super().__init__(config, build)
        self.mixtures = mixtures

    def layer(self, c: Any, b: Builder, index: int) -> _Layer:
        """A layer whose positions are those of all."""
        return _Layer(c, b, index, self.__dict__["_mixtures"])


@frozen(eq=False, kw_only=True)
class InternS1ProConfig(QwenVLConfig):
    """config.json of Intern-S1 Pro: Qwen3-VL's keys with experts, and those above."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        inner, vision = table.get("text_config"), table.get("vision_config")
        if not isinstance(inner, Mapping) or not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: text_config, vision_config: must be tables")
        rope = dict(inner.get("rope_scaling") or inner.get("rope_parameters") or {})
        if not rope.get("fope_sep_head"):
            raise CheckpointError(
                f"{file}: rope_scaling.fope_sep_head: must be true: each head has its positions"
            )
        plain = {key: value for key, value in rope.items() if key not in _FOURIER}
        plain = {"rope_type": "default", **plain}
        if "rope_theta" in inner:
            plain.setdefault("rope_theta", inner["rope_theta"])
        dropped = ("rope_scaling", "rope_theta")
        text = {key: value for key, value in inner.items() if key not in dropped}
        text |= {"model_type": "qwen3_vl_moe_text", "rope_parameters": plain}
        name = "Qwen3VLMoeForConditionalGeneration"
        read = super().from_table(
            {
                **table, "architectures": [name], "model_type": "qwen3_vl_moe",
                "text_config": text, "vision_config": {**vision, "model_type": "qwen3_vl_moe"},
            },
            file,
        )  # fmt: skip
        keys = read_config(dict(inner), _Keys, file)
        known = {part.name: getattr(read.text.text, part.name) for part in fields(Qwen3MoeConfig)}
        known["norm_topk_prob"] = keys.norm_topk_prob
        try:
            whole = _TextConfig(
                **known, router_n_groups=keys.router_n_groups, num_inv_freq=rope.get("num_inv_freq")
            )
        except ValueError as error:
            raise CheckpointError(f"{file}: text_config.{error}") from error
        own = read.text.has_own_quantization
        return evolve(read, text=TextConfig(InternS1ProTextForCausalLM, whole, read.text.name, own))


class InternS1ProForConditionalGeneration(Qwen3VLMoeForConditionalGeneration):
    """Intern-S1 Pro, of images and videos; its encoder of time series is not read."""

    config_type: ClassVar[type] = InternS1ProConfig
    axes = 1

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        return evolve(names, ignore=(r"^(model\.)?time_series\.", *names.ignore))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = super().tiny()
        fourier = {"fope_init_factor": 0.5, "fope_sep_head": True, "num_inv_freq": 6}
        text = {**table["text_config"], "router_n_groups": 2, "rope_theta": 10000.0}
        text = {**text, "rope_scaling": {"rope_type": "default", **fourier}}
        text = {**text, "model_type": "interns1_pro_text", "norm_topk_prob": True}
        names = {
            "architectures": ["InternS1ProForConditionalGeneration"],
            "model_type": "interns1_pro",
        }
        text_config = {key: value for key, value in text.items() if key != "rope_parameters"}
        return {**table, **names, "text_config": text_config}
