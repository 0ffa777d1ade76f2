"""CSM's depth decoder: the codes of one frame, one after the other."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.nn import Builder
from modulm.nn.embedding import Embedding
from modulm_layers import DecoderConfig, GatedMLP, size
from modulm_speakers.codec import FrameAttention, FrameDecoder, FrameLayer

__all__ = ["DepthConfig", "DepthDecoder"]


@frozen(kw_only=True)
class DepthConfig(DecoderConfig):
    """`depth_decoder_config`."""

    vocab_size: int = size(2051)
    hidden_size: int = size(1024)
    intermediate_size: int | None = size(8192)
    num_hidden_layers: int = size(4)
    num_attention_heads: int = size(8)
    num_key_value_heads: int | None = size(2)
    max_position_embeddings: int = size(33)
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    backbone_hidden_size: int = size(2048)
    num_codebooks: int = size(32, least=2)


def _layer(c: DepthConfig, b: Builder) -> FrameLayer:
    return FrameLayer(
        b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
        FrameAttention(c, b.at("self_attn")),
        b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
        GatedMLP(b.at("mlp"), c.hidden_size, c.inner_size, c.hidden_act, bias=c.mlp_bias),
    )


class DepthDecoder(FrameDecoder):
    """table: the embeddings of all codes, a codebook after the other."""

    heads: Tensor

    def __init__(self, c: DepthConfig, b: Builder, table: Embedding) -> None:
        super().__init__(c, c.num_codebooks)
        self.table, self.size = table, c.vocab_size
        inner = b.at("model")
        self.projector = inner.linear(
            "inputs_embeds_projector", c.backbone_hidden_size, c.hidden_size, split=False
        )
        self.layers = ModuleList(
            _layer(c, inner.at(f"layers.{index}")) for index in range(c.num_hidden_layers)
        )
        self.norm = inner.rms_norm("norm", c.hidden_size, c.rms_norm_eps)
        shape = (c.num_codebooks - 1, c.hidden_size, c.vocab_size)
        b.parameter("codebooks_head.weight", self, "heads", shape)

    def embed(self, codes: Tensor, codebook: int) -> Tensor:
        embedded: Tensor = self.table.lookup(codes + codebook * self.size)
        return embedded

    def logits(self, state: Tensor, codebook: int) -> Tensor:
        return state @ self.heads[codebook - 1]

    def project(self, x: Tensor) -> Tensor:
        projected: Tensor = self.projector(x)
        return projected
