"""The blocks that model files are written with.

A model file states the mathematics; the `Builder` that its modules are made with knows dtype,
device, ranks, quantization, attention backend and the names of the weights.
"""

from modulm.nn.activation import activation, gated
from modulm.nn.attention import Attention, AttentionNames
from modulm.nn.builder import Builder, Parts, Shared
from modulm.nn.config import DecoderConfig, read_config, size
from modulm.nn.decoder import (
    DecoderForCausalLM,
    ParallelLayer,
    PreNormLayer,
    standard_attention,
    standard_mlp,
    tiny_config,
)
from modulm.nn.embedding import Embedding, Head, LearnedPositions
from modulm.nn.encoder import BidirectionalAttention, Encoder, Segment, segments
from modulm.nn.linear import Linear
from modulm.nn.mla import LatentAttention
from modulm.nn.mlp import GatedMLP, PlainMLP
from modulm.nn.moe import ExpertNames, Gate, MoE, Routing
from modulm.nn.names import Rewrite, WeightNames, split_heads, transpose
from modulm.nn.norm import LayerNorm, Norm, RMSNorm
from modulm.nn.rope import Rope, cos_sin, parse_rope
from modulm.nn.routed import RoutedConfig, routed_experts, without_drafts
from modulm.nn.ssm import CausalConv, StateSpaceMixer, recur, single_rank

__all__ = [
    "Attention",
    "AttentionNames",
    "BidirectionalAttention",
    "Builder",
    "CausalConv",
    "DecoderConfig",
    "DecoderForCausalLM",
    "Embedding",
    "Encoder",
    "ExpertNames",
    "Gate",
    "GatedMLP",
    "Head",
    "LatentAttention",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "MoE",
    "Norm",
    "ParallelLayer",
    "Parts",
    "PlainMLP",
    "PreNormLayer",
    "RMSNorm",
    "Rewrite",
    "Rope",
    "RoutedConfig",
    "Routing",
    "Segment",
    "Shared",
    "StateSpaceMixer",
    "WeightNames",
    "activation",
    "cos_sin",
    "gated",
    "parse_rope",
    "read_config",
    "recur",
    "routed_experts",
    "segments",
    "single_rank",
    "size",
    "split_heads",
    "standard_attention",
    "standard_mlp",
    "tiny_config",
    "transpose",
    "without_drafts",
]
