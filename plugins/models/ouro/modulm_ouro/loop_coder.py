"""IQuest Coder V1 Loop (IQuest Lab, 2025): Llama's layers run twice. In the second run a gate per
head mixes attention over all keys of the first run with attention over the last keys of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.attention import AttentionInputs, AttentionSpec
from modulm.contracts.model import Batch
from modulm.nn import Builder
from modulm_layers import (
    AttentionNames,
    DecoderConfig,
    PreNormLayer,
    only,
    size,
    standard_mlp,
    tiny_config,
)
from modulm_ouro.looped import LoopedAttention, LoopedForCausalLM

__all__ = ["IQuestLoopCoderConfig", "IQuestLoopCoderForCausalLM", "IQuestLoopCoderLayer"]


@frozen(kw_only=True)
class IQuestLoopCoderConfig(DecoderConfig):
    """config.json of IQuest Coder V1 Loop.

    loop_window_size: tokens that a query sees of the later runs' keys, itself included.
    """

    loop_num: int = size(2)
    loop_window_size: int = size(64)
    dual_chunk_attention_config: dict[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, attention_bias=(False,), dual_chunk_attention_config=(None,))


class GatedLoopAttention(LoopedAttention):
    """Attention whose later runs also read the first run's keys and values.

    gates: builder at the layer's gates, a map of each head's rotated query to one number.
    """

    first_run: tuple[Tensor, Tensor]
    gate_weight: Tensor
    gate_bias: Tensor

    def __init__(self, c: IQuestLoopCoderConfig, b: Builder, index: int, gates: Builder) -> None:
        self.window = c.loop_window_size
        super().__init__(c, b, index, c.loop_num)
        shard = b.shard(c.heads)
        gates.cut_parameter("weight", self, "gate_weight", (shard,), (c.head_size,))
        gates.cut_parameter("bias", self, "gate_bias", (shard,))
        self.loop = 0

    def make_cache(
        self, b: Builder, spec: AttentionSpec, kv_heads: int, names: AttentionNames
    ) -> None:
        loops, self.loops = self.loops, 1
        super().make_cache(b, spec, kv_heads, names)
        self.loops, near = loops, evolve(spec, window=self.window)
        copies = max(b.shared.mesh.tensor.size // kv_heads, 1)
        made = [b.at(f"loop_{i}").attention_cache(near, copies=copies) for i in range(1, loops)]
        self.near = [(self.cache, self.backend), *made]

    def select(self, loop: int) -> None:
        self.loop = loop

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        qkv = self.qkv(x)
        inputs, _ = self._constant or self._bind(qkv, batch.positions)
        q, k, v = self._project(qkv, batch.positions)
        if not self.loop:
            self.first_run = (k, v)
        near = self._attend(self.loop, q, k, v, batch, inputs)
        if not self.loop:
            return self.project_out(near, x)
        whole = self._attend(0, q, *self.first_run, batch, inputs)
        logits = (q.float() * self.gate_weight.float()).sum(-1) + self.gate_bias.float()
        # fp64, since fp32 rounds by how many numbers there are (`modulm_layers.recurrence`).
        gate = logits.double().sigmoid().unsqueeze(-1).to(q.dtype)
        return self.project_out(whole * gate + near * (1 - gate), x)

    def _attend(
        self, loop: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, inputs: AttentionInputs
    ) -> Tensor:
        """Attend to the keys and values of a run; those of this step are stored, maybe again."""
        (cache, backend), out = self.near[loop], q.new_empty(q.shape)
        backend.forward(q, k, v, batch.caches[cache], batch.plan(cache), out, inputs)
        return out


class IQuestLoopCoderLayer(PreNormLayer):
    """Llama's block with gated attention in later runs."""

    def __init__(self, c: IQuestLoopCoderConfig, b: Builder, index: int) -> None:
        root = b.prefix.rpartition(".layers.")[0]
        gates = evolve(b, prefix=f"{root}.gate_projections.{index}")
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            GatedLoopAttention(c, b.at("self_attn"), index, gates),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class IQuestLoopCoderForCausalLM(LoopedForCausalLM):
    """IQuest Coder V1 Loop with a language-model head."""

    api = 1
    config_type = IQuestLoopCoderConfig
    layer = IQuestLoopCoderLayer
    loops_key = "loop_num"
    oracle = "modulm_ouro.oracle:AsGatedLlama"

    @property
    def normed_between(self) -> bool:
        return False

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "iquestloopcoder",
            "IQuestLoopCoderForCausalLM",
            num_hidden_layers=2,
            loop_num=3,
            loop_window_size=8,
        )
