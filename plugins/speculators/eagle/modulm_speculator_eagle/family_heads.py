"""EAGLE heads with the layers of a model family: Mistral, Command R, MiniCPM, DeepSeek, Llama 4.

The layers are those of the family's package, so a head needs the package of its family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch
from modulm.nn import Builder, Rewrite, WeightNames, read_config
from modulm.plugins import manager
from modulm_layers import LatentAttention, Rope, size
from modulm_speculation.chain import HIDDEN
from modulm_speculator_eagle.heads import (
    Eagle3Head,
    Eagle3Layer,
    EagleConfig,
    Head,
    halves,
    without_shared,
)

if TYPE_CHECKING:
    from modulm.contracts.model import Model

__all__ = ["FAMILIES", "HEAD", "Family", "FamilyHead", "LatentEagle3Head", "family_of"]


@frozen
class Family:
    """How the heads of a family are built.

    model: the architecture whose layers they have. norms: of embedding and state, before `fc`.
    final: whether a norm follows the layers. layers: their weight name. fixed: keys of config.json
    that the heads replace. derived: returns more of them from the table.
    """

    model: str
    norms: tuple[str, ...] = ()
    final: bool = True
    layers: str = "layers"
    fixed: Mapping[str, Any] = {}
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda table: {}


def _minicpm_depth(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Scale a head's branches for `mup_denominator` layers instead of its own number."""
    numbers = [table.get(k, 1) for k in ("num_hidden_layers", "scale_depth", "mup_denominator")]
    if not all(isinstance(number, int | float) and number > 0 for number in numbers):
        raise ValueError(f"num_hidden_layers, scale_depth, mup_denominator: not numbers: {numbers}")
    layers, depth, denominator = numbers
    denominator = denominator if "mup_denominator" in table else layers
    return {"scale_depth": depth * (layers / denominator) ** 0.5}


#: By the architecture of a head.
FAMILIES: Mapping[str, Family] = {
    "EagleCohereForCausalLM": Family("CohereForCausalLM"),
    "EagleDeepSeekMTPModel": Family(
        "DeepseekV3ForCausalLM", ("enorm", "hnorm"), fixed={"first_k_dense_replace": 0}
    ),
    "EagleLlama4ForCausalLM": Family("Llama4ForCausalLM"),
    "EagleMiniCPMForCausalLM": Family(
        "MiniCPMForCausalLM",
        ("input_norm1", "input_norm2"),
        final=False,
        layers="eagle_layers",
        derived=_minicpm_depth,
    ),
    "EagleMistralForCausalLM": Family("MistralForCausalLM"),
    "EagleMistralLarge3ForCausalLM": Family("DeepseekV3ForCausalLM"),
}
#: Key of config.json that `FamilyHeadConfig` reads: the head's architecture.
HEAD = "eagle_head"


def family_of(table: Mapping[str, Any]) -> Family | None:
    """Return the family of a head's config.json; None if it has Llama's layers."""
    name = str(((table.get(HEAD) and [table[HEAD]]) or table.get("architectures") or [""])[0])
    family = FAMILIES.get(name)
    if family is not None and name == "EagleCohereForCausalLM" and "layer_types" in table:
        return evolve(family, model="Cohere2ForCausalLM")
    return family


@frozen(eq=False, kw_only=True)
class FamilyHeadConfig:
    """config.json of a head: its family, the family's keys, and what the checkpoint has."""

    family: Family
    driver: type[Model]
    layers: Any
    own_embedding: bool = False
    own_head: bool = False
    fc_bias: bool = False

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Parse the table. Raises CheckpointError."""
        family = family_of(table)
        if family is None:
            raise ValueError(f"{file}: {table.get(HEAD)} is no head of a family")
        driver: type[Model] = manager.current().load("models", family.model)
        keys = {**table, **family.fixed, **family.derived(table)}
        layers = read_config(keys, driver.config_type, file)
        own = {key: bool(table.get(key)) for key in ("own_embedding", "own_head", "fc_bias")}
        return cls(family=family, driver=driver, layers=layers, **own)

    hidden_size = property(lambda self: self.layers.hidden_size)
    vocab_size = property(lambda self: self.layers.vocab_size)
    max_length = property(lambda self: self.layers.max_length)
    sliding_window = property(lambda self: self.layers.sliding_window)
    draft_vocab_size = None


class FamilyHead(Head):
    """EAGLE 1 with a family's layers: they run on a projection of embedding and state."""

    config_type: ClassVar[type] = FamilyHeadConfig

    def __init__(self, config: FamilyHeadConfig, build: Builder) -> None:
        super().__init__(config, build)
        family, of, hidden = config.family, config.layers, config.hidden_size
        self.embed_fc = build.linear("embed_fc", hidden, hidden, split=False)
        self.state_fc = build.linear("state_fc", hidden, hidden, bias=config.fc_bias, split=False)
        self.norms = ModuleList(build.rms_norm(n, hidden, of.rms_norm_eps) for n in family.norms)
        driver: Any = config.driver
        self.layers = ModuleList(
            driver.layer(of, build.at(f"layers.{i}"), i) for i in range(of.num_hidden_layers)
        )
        self.norm = driver.make_norm(self, of, build) if family.final else None
        self._caches = tuple(build.shared.caches)

    @classmethod
    def weights(cls, config: FamilyHeadConfig) -> WeightNames:
        family, names = config.family, config.driver.weights(config.layers)
        rename = ((r"^model\.", ""), (r"^eagle_linear\.", "fc."))
        if family.layers != "layers":
            rename = (*rename, (rf"^{family.layers}\.", "layers."))
        fc = (
            Rewrite(r"^fc\.weight$", lambda _, t: halves(t, "embed_fc", "state_fc")),
            Rewrite(r"^fc\.bias$", lambda _, t: [("state_fc.bias", t)]),
        )
        ignore = () if family.final else (r"^norm\.",)
        own = evolve(names, rename=rename, ignore=ignore, rewrite=(*fc, *names.rewrite))
        return without_shared(own, config)

    def forward(self, batch: Batch) -> Tensor:
        x, state = self.embedded(batch.tokens), batch.extras[HIDDEN]
        if self.norms:
            x, state = self.norms[0](x), self.norms[1](state)
        x = self.ops.add(self.embed_fc(x), self.state_fc(state))
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        if self.norm is not None:
            return self.norm.add(x, residual)[0]
        return x if residual is None else self.ops.add(x, residual)


@frozen(kw_only=True)
class LatentEagleConfig(EagleConfig):
    """config.json of an EAGLE-3 head with DeepSeek's attention."""

    kv_lora_rank: int = size()
    q_lora_rank: int | None = size(None)
    qk_nope_head_dim: int = size()
    qk_rope_head_dim: int = size()
    v_head_dim: int = size()
    rope_interleave: bool = True

    @property
    def head_size(self) -> int:
        return self.qk_rope_head_dim

    def rope(self, layer_type: str = "") -> Rope:
        return evolve(super().rope(layer_type), neox=not self.rope_interleave)


class _WideLatentAttention(LatentAttention):
    """Latent attention that reads vectors of twice the width that it writes."""

    def _make_inputs(self, b: Builder, hidden: int, *more: Any) -> None:
        super()._make_inputs(b, 2 * hidden, *more)


class _LatentEagle3Layer(Eagle3Layer):
    """DeepSeek's layer without experts."""

    def make_attention(self, c: Any, b: Builder, index: int) -> None:
        kind = _WideLatentAttention if self.first else LatentAttention
        self.attn: Module = kind(
            b.at("self_attn"),
            hidden=c.hidden_size,
            heads=c.heads,
            rank=c.kv_lora_rank,
            nope=c.qk_nope_head_dim,
            value=c.v_head_dim,
            rope=c.rope(),
            q_rank=c.q_lora_rank,
            bias=c.attention_bias,
        )

    def inputs(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.cat([x, state], dim=-1)


class LatentEagle3Head(Eagle3Head):
    """EAGLE-3 with DeepSeek's attention (Kimi K2, DeepSeek V3)."""

    config_type: ClassVar[type] = LatentEagleConfig
    layer = _LatentEagle3Layer
    names = evolve(Eagle3Head.names, rewrite=())
