"""Mamba (Gu and Dao, arXiv 2312.00752): selective state spaces instead of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch, StateSpec
from modulm.nn import Builder, Embedding, Norm, WeightNames
from modulm_layers import CausalConv, DecoderConfig, DecoderForCausalLM, only, size

__all__ = [
    "MambaConfig",
    "MambaForCausalLM",
    "MambaLayer",
    "MambaMixer",
    "MixerLayer",
    "RecurrentForCausalLM",
    "mamba_mixer",
    "narrow_rank",
]


def narrow_rank(key: str, value: Any, hidden: int) -> int:
    """Rank of the step-size projection from `key`; "auto" means a sixteenth of `hidden`.

    Raises ValueError that names the key.
    """
    if value == "auto":
        return -(-hidden // 16)
    if type(value) is not int or value < 1:
        raise ValueError(f'{key}: {value!r} is neither "auto" nor a count')
    return value


@frozen(kw_only=True)
class MambaConfig(DecoderConfig):
    """config.json of Mamba.

    Without attention, the maximum length is the trained length. `time_step_rank` is the rank of the
    step-size projection.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"layer_norm_epsilon": "rms_norm_eps"}

    intermediate_size: int | None = size(None)
    num_attention_heads: int = size(1)
    state_size: int = size(16)
    expand: int = size(2)
    conv_kernel: int = size(4, least=2)
    time_step_rank: Any = "auto"
    use_bias: bool = False
    use_conv_bias: bool = True
    residual_in_fp32: bool = True
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        narrow_rank("time_step_rank", self.time_step_rank, self.hidden_size)
        only(self, intermediate_size=(None, self.expand * self.hidden_size))

    @property
    def inner_size(self) -> int:
        return self.expand * self.hidden_size

    @property
    def rank(self) -> int:
        """The rank of the step-size projection."""
        return narrow_rank("time_step_rank", self.time_step_rank, self.hidden_size)


class MambaMixer(Module):
    """A state of `state` numbers per channel; step size, b and c depend on the input.

    `rank` is the rank of the step-size projection. `norms` are applied to its output, b and c, in
    families that have them.
    """

    a_log: Tensor
    skip: Tensor

    def __init__(
        self,
        b: Builder,
        *,
        hidden: int,
        inner: int,
        state: int,
        rank: int,
        width: int,
        act: str = "silu",
        bias: bool = False,
        conv_bias: bool = True,
        norms: Sequence[Norm] = (),
    ) -> None:
        super().__init__()
        self.parts, self.norms = [rank, state, state], ModuleList(norms)
        shards = (b.shard(inner),)
        self.project = b.pieces("in_proj", hidden, [inner, inner], bias=bias)
        self.conv = CausalConv(b, "conv1d", inner, width, bias=conv_bias, act=act)
        self.select = b.row_linear("x_proj", inner, sum(self.parts))
        self.step = b.linear("dt_proj", rank, inner, bias=True)
        b.cut_parameter("A_log", self, "a_log", shards, (state,), torch.float32)
        b.cut_parameter("D", self, "skip", shards, dtype=torch.float32)
        self.out = b.row_linear("out_proj", inner, hidden, bias=bias)
        recurrent_state = ("state", (shards[0].size, 1, state), "float32")
        self.cache = b.cache(StateSpec((("conv", self.conv.state, b.dtype), recurrent_state)))
        self.ops = b.ops

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        cache, plan = batch.caches[self.cache], batch.plan(self.cache)
        inputs, gate = self.project(x).chunk(2, -1)
        inputs = self.conv(inputs, cache["conv"], plan)
        step, b, c = self._select(inputs)
        y = self.ops.selective_scan(
            inputs.unsqueeze(-1),
            self.step(step),
            self.a_log,
            b.unsqueeze(1),
            c.unsqueeze(1),
            self.skip,
            cache["state"],
            plan,
        )
        mixed: Tensor = self.out(self.ops.multiply(y.squeeze(-1), gate, "silu"))
        return mixed

    def _select(self, inputs: Tensor) -> Sequence[Tensor]:
        """Project to low-rank step sizes [tokens, rank], b and c [tokens, state]."""
        parts: Sequence[Tensor] = self.select(inputs).split(self.parts, -1)
        if not self.norms:
            return parts
        return [norm(part) for norm, part in zip(self.norms, parts, strict=True)]


def mamba_mixer(c: MambaConfig, b: Builder, norms: Sequence[Norm] = ()) -> MambaMixer:
    """Build the mixer from Mamba's keys."""
    return MambaMixer(
        b,
        hidden=c.hidden_size,
        inner=c.inner_size,
        state=c.state_size,
        rank=c.rank,
        width=c.conv_kernel,
        act=c.hidden_act,
        bias=c.use_bias,
        conv_bias=c.use_conv_bias,
        norms=norms,
    )


class MixerLayer(Module):
    """Norm and mixer; the residual stream may be fp32."""

    def __init__(self, norm: Norm, mixer: Module, *, fp32: bool) -> None:
        super().__init__()
        self.norm, self.mixer, self.ops, self.fp32 = norm, mixer, norm.ops, fp32

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        if residual is None and self.fp32 and x.dtype != torch.float32:
            return self.mixer(self.norm(x), batch), self.ops.cast(x, torch.float32)
        x, residual = self.norm.add(x, residual)
        return self.mixer(x, batch), residual


class MambaLayer(MixerLayer):
    """One layer of Mamba."""

    def __init__(self, c: MambaConfig, b: Builder, index: int) -> None:
        norm = b.rms_norm("norm", c.hidden_size, c.rms_norm_eps)
        super().__init__(norm, mamba_mixer(c, b.at("mixer")), fp32=c.residual_in_fp32)


class RecurrentForCausalLM(DecoderForCausalLM):
    """The base class of both versions."""

    api = 1
    root = "backbone"
    names = WeightNames(rename=((r"^backbone\.embedding\.", "backbone.embeddings."),))

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        return b.embedding("embeddings", config.vocab_size, config.hidden_size)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.rms_norm("norm_f", config.hidden_size, config.rms_norm_eps)


class MambaForCausalLM(RecurrentForCausalLM):
    """Mamba with a language-model head."""

    config_type: ClassVar[type] = MambaConfig
    layer: ClassVar[Any] = MambaLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["MambaForCausalLM"],
            "model_type": "mamba",
            "vocab_size": 512,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "state_size": 8,
            "conv_kernel": 4,
            "time_step_rank": 6,
        }
