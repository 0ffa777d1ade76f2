"""Qwen3-Omni's talker (arXiv 2509.17765): a decoder with experts that speaks the thinker's answer.

It samples the first code of each frame; a small decoder over the codes of one frame gives the
others. Its input is, at each position, the sum of a frame's codes and one text token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, read_config
from modulm.nn.embedding import Embedding, Head
from modulm_layers import DecoderForCausalLM, GatedMLP, PreNormLayer, size
from modulm_layers.activation import activation
from modulm_qwen.moe import QwenMoeConfig, SharedExperts
from modulm_qwen.qwen3 import Qwen3Config, qwen3_attention
from modulm_speakers.codec import FrameAttention, FrameDecoder, FrameLayer
from modulm_speakers.model import CODES, GIVEN, STATES, TEXTS

__all__ = ["Talker", "TalkerConfig"]

_SECTIONS = (24, 20, 20)


@frozen(kw_only=True)
class TalkerTextConfig(QwenMoeConfig):
    """`text_config` of the talker: all layers have experts."""

    vocab_size: int = size(3072)
    hidden_size: int = size(1024)
    intermediate_size: int | None = size(2048)
    num_hidden_layers: int = size(20)
    num_attention_heads: int = size(16)
    num_key_value_heads: int | None = size(2)
    moe_intermediate_size: int = size(384)
    num_experts_per_tok: int = size(8)
    num_experts: int = size(128)
    shared_expert_intermediate_size: int = size()


@frozen(kw_only=True)
class PredictorConfig(Qwen3Config):
    """`code_predictor_config`."""

    vocab_size: int = size(2048)
    hidden_size: int = size(1024)
    intermediate_size: int | None = size(3072)
    num_hidden_layers: int = size(5)
    num_attention_heads: int = size(16)
    num_key_value_heads: int | None = size(8)


@frozen(kw_only=True)
class TalkerKeys:
    """The other keys of `talker_config`. speaker_id: voice -> its code."""

    num_code_groups: int = size(32, least=2)
    thinker_hidden_size: int = size(2048)
    accept_hidden_layer: int = size(18)
    codec_eos_token_id: int = 4198
    codec_nothink_id: int = 4203
    codec_think_bos_id: int = 4204
    codec_think_eos_id: int = 4205
    codec_pad_id: int = 4196
    codec_bos_id: int = 4197
    speaker_id: dict[str, int] | None = None


@frozen(eq=False, kw_only=True)
class TalkerConfig:
    """`talker_config`. text, predictor: of its two decoders."""

    keys: TalkerKeys
    text: TalkerTextConfig
    predictor: PredictorConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read the table. Raises CheckpointError."""
        text = dict(table.get("text_config") or {})
        # Positions have three axes, which take turns whatever the file says.
        rope = dict(text.pop("rope_scaling", None) or text.get("rope_parameters") or {})
        rope.setdefault("mrope_section", list(_SECTIONS))
        text["rope_parameters"] = {**rope, "mrope_interleaved": True}
        keys = read_config(dict(table), TalkerKeys, file)
        predictor = dict(table.get("code_predictor_config") or {})
        config = cls(
            keys=keys,
            text=read_config(text, TalkerTextConfig, file),
            predictor=read_config(predictor, PredictorConfig, file),
        )
        if config.predictor.hidden_size != config.text.hidden_size:
            raise CheckpointError(
                f"{file}: talker_config: hidden_size of text_config and of code_predictor_config "
                f"differ: {config.text.hidden_size} and {config.predictor.hidden_size}"
            )
        return config


class TalkerLayer(PreNormLayer):
    """Qwen 3's block with experts and a shared one."""

    def __init__(self, c: TalkerTextConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            qwen3_attention(c, b, index),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            SharedExperts(c, b),  # type: ignore[arg-type]
        )


class _Projection(Module):
    """Brings vectors of the thinker to the talker's width."""

    def __init__(self, b: Builder, inputs: int, c: TalkerTextConfig) -> None:
        super().__init__()
        self.up = b.linear("linear_fc1", inputs, c.inner_size, bias=True, split=False)
        self.act = activation(c.hidden_act, b.ops)
        self.down = b.linear("linear_fc2", c.inner_size, c.hidden_size, bias=True, split=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs] -> [n, hidden]."""
        out: Tensor = self.down(self.act(self.up(x)))
        return out


class _Inputs(Module):
    """Embeds what stands at each position: a text token or a state, and a frame.

    thinker: embeds text tokens, [n] -> [n, width]; set once the thinker is built.
    """

    thinker: Callable[[Tensor], Tensor]

    def __init__(self, c: TalkerConfig, b: Builder) -> None:
        super().__init__()
        text, groups, width = c.text, c.keys.num_code_groups, c.keys.thinker_hidden_size
        self.first = b.embedding("model.codec_embedding", text.vocab_size, text.hidden_size)
        at, size_ = b.at("code_predictor.model"), c.predictor.vocab_size
        self.others = ModuleList(
            at.embedding(f"codec_embedding.{index}", size_, text.hidden_size)
            for index in range(groups - 1)
        )
        self.text_projection = _Projection(b.at("text_projection"), width, text)
        self.state_projection = _Projection(b.at("hidden_projection"), width, text)

    def table(self, codebook: int) -> Embedding:
        """The table of a codebook."""
        table: Any = self.others[codebook - 1] if codebook else self.first
        return table

    def forward(self, batch: Batch) -> Tensor:
        """Embed the tokens of rows that speak: [tokens, hidden]."""
        codes, texts = batch.extras[CODES], batch.extras[TEXTS]
        x = torch.where(
            (texts >= 0)[:, None], self.text_projection(self.thinker(texts.clamp(min=0))), 0.0
        )
        if (states := batch.extras.get(STATES)) is not None:
            projected = self.state_projection(states.to(x.dtype))
            x = torch.where(batch.extras[GIVEN][:, None], projected, x)
        for codebook, own in enumerate(codes.unbind(1)):
            embedded = self.table(codebook).lookup(own.clamp(min=0))
            x = x + torch.where((own >= 0)[:, None], embedded, 0.0)
        return x


def _predictor_layer(c: PredictorConfig, b: Builder) -> FrameLayer:
    at = b.at("self_attn")
    norms = [at.rms_norm(name, c.head_size, c.rms_norm_eps) for name in ("q_norm", "k_norm")]
    return FrameLayer(
        b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
        FrameAttention(c, at, (norms[0], norms[1])),
        b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
        GatedMLP(b.at("mlp"), c.hidden_size, c.inner_size, c.hidden_act, bias=c.mlp_bias),
    )


class _Predictor(FrameDecoder):
    """Chooses the codes after a frame's first one."""

    def __init__(self, c: TalkerConfig, b: Builder, inputs: _Inputs) -> None:
        p = c.predictor
        super().__init__(p, c.keys.num_code_groups)
        object.__setattr__(self, "inputs", inputs)  # of the talker
        at = b.at("model")
        self.layers = ModuleList(
            _predictor_layer(p, at.at(f"layers.{index}")) for index in range(p.num_hidden_layers)
        )
        self.norm = at.rms_norm("norm", p.hidden_size, p.rms_norm_eps)
        self.heads = ModuleList(
            b.linear(f"lm_head.{index}", p.hidden_size, p.vocab_size, split=False)
            for index in range(c.keys.num_code_groups - 1)
        )

    def embed(self, codes: Tensor, codebook: int) -> Tensor:
        inputs: Any = self.inputs
        embedded: Tensor = inputs.table(codebook).lookup(codes)
        return embedded

    def logits(self, state: Tensor, codebook: int) -> Tensor:
        logits: Tensor = self.heads[codebook - 1](state)
        return logits


class Talker(DecoderForCausalLM):
    """The decoder of first codes, and the predictor of the others. config: of all of the talker."""

    api = 1
    layer = TalkerLayer
    root: ClassVar[str] = "model"
    embed: _Inputs

    def __init__(self, config: TalkerConfig, build: Builder) -> None:
        self._whole = config
        super().__init__(config.text, build)
        self.predictor = _Predictor(config, build.at("code_predictor"), self.embed)

    def make_embedding(self, config: Any, b: Builder) -> Any:
        top = evolve(b, prefix=b.prefix.removesuffix(f".{self.root}"))
        return _Inputs(self._whole, top)

    def make_head(self, config: Any, b: Builder) -> Head:
        return b.head("codec_head", config.hidden_size, config.vocab_size)

    @classmethod
    def tiny(cls) -> dict[str, Any]:
        raise UnsupportedError(
            "a talker has no checkpoints of its own: use those of the model that it speaks for"
        )
