"""Nemotron-H Puzzle (NVIDIA, 2026): Nemotron-H whose layers have sizes of their own, from a search
for the smallest that answer as well (arXiv 2411.19146).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Factory, evolve, field, frozen

from modulm.contracts.model import MtpLayer
from modulm_layers import size, tiny_config
from modulm_nemotron.nemotron_h import NemotronHConfig, NemotronHForCausalLM

__all__ = ["NemotronHPuzzleConfig", "NemotronHPuzzleForCausalLM"]

_KINDS = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "mlp": "mlp",
    "moe": "moe",
}
#: Keys of config.json that a layer of each kind may have instead of the model's.
_OWN: Mapping[str, frozenset[str]] = {
    "mamba": frozenset({"ssm_state_size"}),
    "attention": frozenset({"sliding_window"}),
    "mlp": frozenset({"intermediate_size"}),
    "moe": frozenset(
        {
            "n_routed_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "moe_latent_size",
            "routed_scaling_factor",
            "n_group",
            "topk_group",
            "norm_topk_prob",
        }
    ),
}


def _kinds(blocks: tuple[dict[str, Any], ...], key: str) -> tuple[str, ...]:
    """The kind of each layer. Raises ValueError for unknown kinds and keys."""
    for index, block in enumerate(blocks):
        kind = block.get("block_type")
        if kind not in _KINDS:
            raise ValueError(f"{key}: layer {index}: block_type: {kind!r} is unknown")
        set_keys = {name for name, value in block.items() if value is not None}
        if other := sorted(set_keys - _OWN[kind] - {"block_type"}):
            raise ValueError(f"{key}: layer {index}: {other[0]}: not supported yet")
    return tuple(_KINDS[block["block_type"]] for block in blocks)


def _own_kinds(config: NemotronHPuzzleConfig) -> tuple[str, ...]:
    return _kinds(config.block_configs, "block_configs")


def _draft_kinds(config: NemotronHPuzzleConfig) -> tuple[str, ...]:
    return _kinds(config.mtp_block_configs, "mtp_block_configs")


@frozen(kw_only=True)
class NemotronHPuzzleConfig(NemotronHConfig):
    """config.json of Nemotron-H Puzzle: `block_configs` has a table for each layer, with its
    `block_type` and the keys whose values differ from the model's.
    """

    block_configs: tuple[dict[str, Any], ...] = ()
    mtp_block_configs: tuple[dict[str, Any], ...] = ()
    num_hidden_layers: int = size(Factory(lambda self: len(self.block_configs), takes_self=True))
    hybrid_override_pattern: str | None = field(default=None, converter=lambda _: None)
    layer_types: tuple[str, ...] | None = Factory(_own_kinds, takes_self=True)
    mtp_layers_block_type: tuple[str, ...] = Factory(_draft_kinds, takes_self=True)
    sliding_window: int | None = size(None, least=0)

    def __attrs_post_init__(self) -> None:
        if len(self.block_configs) != self.num_hidden_layers:
            raise ValueError(
                f"block_configs: {len(self.block_configs)} entries for "
                f"{self.num_hidden_layers} layers"
            )
        super().__attrs_post_init__()

    def window(self, index: int) -> int | None:
        return self.sliding_window or None

    def of_layer(self, index: int) -> NemotronHPuzzleConfig:
        block = self.block_configs[index]
        own = {k: v for k, v in block.items() if v is not None and k != "block_type"}
        return evolve(self, **{"sliding_window": None, **own})

    def of_drafts(self) -> NemotronHPuzzleConfig:
        blocks = self.mtp_block_configs
        return evolve(
            self,
            block_configs=blocks,
            num_hidden_layers=len(blocks),
            layer_types=self.mtp_layers_block_type,
        )


class NemotronHPuzzleForCausalLM(NemotronHForCausalLM):
    """Nemotron-H Puzzle with a language-model head; further layers draft (`mtp`)."""

    config_type = NemotronHPuzzleConfig
    oracle = "modulm_nemotron.oracle:AsNemotronH"

    @classmethod
    def mtp(cls, config: NemotronHPuzzleConfig) -> MtpLayer | None:
        return super().mtp(config) if config.mtp_block_configs else None

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        few = {"n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
        shared = {"moe_shared_expert_intermediate_size": 40}
        many = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        return tiny_config(
            "nemotron_h_puzzle",
            "NemotronHPuzzleForCausalLM",
            num_hidden_layers=6,
            block_configs=[
                {"block_type": "mamba"},
                {"block_type": "moe", **few, **shared},
                {"block_type": "attention", "sliding_window": 12},
                {"block_type": "mamba", "ssm_state_size": 8},
                {"block_type": "attention"},
                {"block_type": "moe", **many, **shared, "moe_latent_size": 40},
            ],
            head_dim=16,
            ssm_state_size=12,
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            chunk_size=16,
        )
