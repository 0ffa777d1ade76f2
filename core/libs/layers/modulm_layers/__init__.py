"""Layers that model files are built from.

A model file states the mathematics. The `Builder` (`modulm.nn`) passed to its layers knows the
dtype, device, ranks, quantization, attention backend and weight names.
"""

from modulm_layers.activation import activation, gated
from modulm_layers.attention import Attention, AttentionNames
from modulm_layers.bidirectional import (
    TextClasses,
    TextVectors,
    WholeRowAttention,
    WholeRowLatentAttention,
)
from modulm_layers.config import DecoderConfig, only, size
from modulm_layers.crossed import CrossAttention, CrossedLayer
from modulm_layers.decoder import (
    DecoderForCausalLM,
    ParallelLayer,
    PreNormLayer,
    SandwichLayer,
    standard_attention,
    standard_mlp,
    tiny_config,
)
from modulm_layers.delta import KimiDeltaRule
from modulm_layers.encoder import BidirectionalAttention, Encoder, Segment, segments
from modulm_layers.mla import LatentAttention
from modulm_layers.mlp import GatedMLP, PlainMLP
from modulm_layers.moe import ExpertChoice, ExpertNames, Gate, MoE, RouteTap, Routing
from modulm_layers.positions import LearnedPositions
from modulm_layers.relative import RelativePositions
from modulm_layers.rewrites import flatten, split_heads, transpose
from modulm_layers.rope import Rope, cos_sin, parse_rope
from modulm_layers.routed import (
    RoutedConfig,
    next_token_layer,
    routed_experts,
    without_drafts,
)
from modulm_layers.ssm import CausalConv, GatedNorm, StateSpaceMixer, recur

__all__ = [
    "Attention",
    "AttentionNames",
    "BidirectionalAttention",
    "CausalConv",
    "CrossAttention",
    "CrossedLayer",
    "DecoderConfig",
    "DecoderForCausalLM",
    "Encoder",
    "ExpertChoice",
    "ExpertNames",
    "Gate",
    "GatedMLP",
    "GatedNorm",
    "KimiDeltaRule",
    "LatentAttention",
    "LearnedPositions",
    "MoE",
    "ParallelLayer",
    "PlainMLP",
    "PreNormLayer",
    "RelativePositions",
    "Rope",
    "RouteTap",
    "RoutedConfig",
    "Routing",
    "SandwichLayer",
    "Segment",
    "StateSpaceMixer",
    "TextClasses",
    "TextVectors",
    "WholeRowAttention",
    "WholeRowLatentAttention",
    "activation",
    "cos_sin",
    "flatten",
    "gated",
    "next_token_layer",
    "only",
    "parse_rope",
    "recur",
    "routed_experts",
    "segments",
    "size",
    "split_heads",
    "standard_attention",
    "standard_mlp",
    "tiny_config",
    "transpose",
    "without_drafts",
]
