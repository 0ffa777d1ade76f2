"""Heads that choose the tokens of a block with regard to one another."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.nn import Builder, WeightNames
from modulm.nn.embedding import softcap
from modulm_speculator_dflash.backbone import (
    Block,
    DFlashConfig,
    DFlashHead,
    renamed_in_projection,
    reshaped,
)

__all__ = ["CandidateHead", "CorrelatedHead", "MarkovHead", "RefinedHead"]


class MarkovHead(DFlashHead):
    """DSpark: the token before adds a learned bias of low rank to a token's logits."""

    def __init__(self, config: DFlashConfig, build: Builder) -> None:
        super().__init__(config, build)
        b, rank = build.at("markov_head"), config.markov_rank
        self.before = b.embedding("markov_w1", config.vocab_size, rank)
        self.bias = b.linear("markov_w2", rank, self.vocabulary, split=False)

    def select(self, block: Block) -> Tensor:
        logits, token, chosen = self.block_logits(self.predictions(block)), block.anchors, []
        for step in range(logits.shape[1]):
            biased = logits[:, step] + self.scaled(self.bias(self.before.lookup(token)))
            token = self.in_target(biased.argmax(-1))
            chosen.append(token)
        return torch.stack(chosen, 1)

    def scaled(self, bias: Tensor) -> Tensor:
        """Scale a bias as the head's logits are scaled."""
        return bias if self.config.logit_scale == 1.0 else bias * self.config.logit_scale


def walk(candidates: Tensor, scores: Tensor) -> Tensor:
    """Follow the best candidates from the first token on: [rows, drafts] int64.

    candidates: [rows, drafts, k] int64. scores: [rows, drafts, k, k], by the candidate before.
    """
    rows, index, chosen = torch.arange(len(scores), device=scores.device), None, []
    for step in range(scores.shape[1]):
        of_row = scores[:, step, 0] if index is None else scores[rows, step, index]
        index = of_row.argmax(-1)
        chosen.append(candidates[rows, step, index])
    return torch.stack(chosen, 1)


class CandidateHead(DFlashHead):
    """DFlash 2: the likeliest tokens of neighbouring positions are scored in pairs."""

    def __init__(self, config: DFlashConfig, build: Builder) -> None:
        super().__init__(config, build)
        b, rank = build.at("candidate_selector"), config.selector_rank
        self.before = b.embedding("predecessor_codebook", config.vocab_size, rank)
        self.after = b.embedding("successor_codebook", config.vocab_size, rank)
        self.project = b.linear("hidden_projection", config.hidden_size, rank, split=False)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        tables = (r"^(candidate_selector\.\w+_codebook)$", r"\1.weight")
        return evolve(names, rename=(*names.rename, tables))

    def select(self, block: Block) -> Tensor:
        states, config = self.predictions(block), self.config
        logits = self.block_logits(states).float() * config.output_multiplier
        if config.final_logit_softcapping:
            logits = softcap(logits, config.final_logit_softcapping)
        best, candidates = logits.topk(config.selector_top_k, -1)
        first = block.anchors[:, None, None].expand_as(candidates[:, :1])
        before = self._table(self.before, torch.cat([first, candidates[:, :-1]], 1))
        after = self._table(self.after, candidates)
        projected = self.project(states.flatten(0, 1)).view(*states.shape[:2], 1, -1).float()
        edges = (before * projected) @ after.transpose(-1, -2)
        return walk(candidates, best[:, :, None] + edges)

    @staticmethod
    def _table(table: Any, tokens: Tensor) -> Tensor:
        entries: Tensor = table.lookup(tokens.flatten()).float()
        return entries.view(*tokens.shape, -1)


class RefinedHead(DFlashHead):
    """XPress: a causal mixer over the block refines all tokens in a few passes.

    Each pass adds a bias, computed from the block as the pass before left it, to the logits of a
    position's likeliest tokens.
    """

    mix: Tensor
    after: Tensor

    def __init__(self, config: DFlashConfig, build: Builder) -> None:
        super().__init__(config, build)
        b, rank, hidden = build.at("xpress_head"), config.xpress_rank, config.hidden_size
        self.block = config.xpress_block_size or config.block_size or 16
        inner = config.xpress_mlp_hidden

        def linear(name: str, inputs: int, outputs: int) -> Any:
            return b.linear(name, inputs, outputs, split=False)

        self.before = b.embedding("w1", config.vocab_size, rank)
        self.own, self.mean = linear("down_h", hidden, rank), linear("down_g", hidden, rank)
        self.join = linear("in_proj", 3 * rank, rank)
        self.gate = linear("mlp.gate_proj", rank, inner)
        self.up, self.down = (
            linear("mlp.up_proj", rank, inner),
            linear("mlp.down_proj", inner, rank),
        )
        b.parameter("mix.L", self, "mix", (rank, self.block, self.block))
        b.parameter("w2.weight", self, "after", (config.vocab_size, rank))

    def select(self, block: Block) -> Tensor:
        states = block.states
        logits = self.block_logits(states[:, 1:])
        count = min(self.config.xpress_topc or logits.shape[-1], logits.shape[-1])
        best, candidates = logits.topk(count, -1)
        tokens = torch.cat([block.anchors[:, None], logits.argmax(-1)], 1)
        mean = states.mean(1, keepdim=True).expand_as(states)
        fixed = torch.cat([_flat(self.own, states), _flat(self.mean, mean)], -1)
        weights = self.after[candidates]
        for _ in range(self.config.xpress_num_passes):
            before = torch.cat([block.anchors[:, None], tokens[:, :-1]], 1)
            latent = self._latent(before, fixed)[:, 1:]
            bias = (weights @ latent[..., None].to(weights.dtype)).squeeze(-1)
            pick = (best + bias).argmax(-1, keepdim=True)
            tokens = torch.cat([block.anchors[:, None], candidates.gather(-1, pick)[..., 0]], 1)
        return tokens[:, 1:]

    def _latent(self, before: Tensor, fixed: Tensor) -> Tensor:
        """before: [rows, tokens], the token before each; fixed: [rows, tokens, 2 rank]."""
        embedded = self.before.lookup(before.flatten()).view(*before.shape, -1)
        x = _flat(self.join, torch.cat([fixed, embedded], -1))
        count = x.shape[1]
        mix = self.mix[:, :count, :count].tril().to(x.dtype)
        x = x + torch.einsum("rij,bjr->bir", mix, x)
        inner = F.silu(_flat(self.gate, x)) * _flat(self.up, x)
        return x + _flat(self.down, inner)


class LatticeLayer(Module):
    """A layer over all candidates of a block, with biases by the distance of their positions."""

    def __init__(self, b: Builder, hidden: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.attn_norm = b.rms_norm("attn_norm", hidden, eps)
        self.qkv = b.linear("attn.in_proj", hidden, 3 * hidden, bias=True, split=False)
        self.out = b.linear("attn.out_proj", hidden, hidden, bias=True, split=False)
        self.mlp_norm = b.rms_norm("mlp_norm", hidden, eps)
        self.mlp = PlainMLP(b.at("mlp"), hidden, inner, hidden)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x: [rows, n, hidden]; bias: [heads, n, n]."""
        qkv = _flat(self.qkv, self.attn_norm(x)).view(*x.shape[:2], 3, self.heads, -1)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype)[None])
        x = x + _flat(self.out, seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class PlainMLP(Module):
    """Two linear layers with biases and SiLU between them."""

    def __init__(self, b: Builder, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.up = b.linear("up_proj", inputs, inner, bias=True, split=False)
        self.down = b.linear("down_proj", inner, outputs, bias=True, split=False)

    def forward(self, x: Tensor) -> Tensor:
        return _flat(self.down, F.silu(_flat(self.up, x)))


class CorrelatedHead(DFlashHead):
    """LiLiCorr: a small transformer over all candidates gives the scores of neighbouring pairs."""

    slots: Tensor
    ranks: Tensor
    distances: Tensor
    same: Tensor

    def __init__(self, config: DFlashConfig, build: Builder) -> None:
        super().__init__(config, build)
        b, width, eps = build.at("lilicorr"), config.hidden_size, config.rms_norm_eps
        hidden = config.lilicorr_hidden_size or width
        factors, heads = config.lilicorr_factor_dim, config.lilicorr_num_heads
        if config.block_size is None:
            raise ValueError("block_size: required by LiLiCorr heads")
        self.block, self.k = config.block_size, config.lilicorr_candidate_topk

        def linear(name: str, inputs: int, outputs: int) -> Any:
            return b.linear(name, inputs, outputs, bias=True, split=False)

        self.token = None if hidden == width else linear("token_proj", width, hidden)
        self.state = linear("pass_hidden_proj", width, hidden)
        self.feature_norm = b.layer_norm("feature_norm", 5, 1e-5)
        self.feature = PlainMLP(b.at("feature_mlp"), 5, hidden, hidden)
        self.context = linear("context_proj", width, hidden)
        self.layers_of_lattice = ModuleList(
            LatticeLayer(
                b.at(f"layers.{i}"), hidden, heads, int(hidden * config.lilicorr_mlp_ratio), eps
            )
            for i in range(config.lilicorr_num_layers)
        )
        self.output_norm = b.rms_norm("output_norm", hidden, eps)
        self.anchor_norm = b.rms_norm("anchor_norm", hidden, eps)
        self.factor = linear("factor_input_proj", 3 * hidden, hidden)
        self.outgoing = linear("out_head", hidden, factors)
        self.incoming = linear("in_head", hidden, factors)
        self.first = linear("anchor_out_head", hidden, factors)
        b.parameter("slot_embedding", self, "slots", (self.block - 1, 1, hidden))
        b.parameter("rank_embedding", self, "ranks", (self.k, hidden))
        b.parameter("relative_slot_bias", self, "distances", (heads, 2 * self.block - 1))
        b.parameter("same_slot_bias", self, "same", (heads,))

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names, block = super().weights(config), config.block_size or 1
        hidden = config.lilicorr_hidden_size or config.hidden_size
        shapes = (
            reshaped(r"^lilicorr\.slot_embedding$", block - 1, 1, hidden),
            reshaped(r"^lilicorr\.rank_embedding$", config.lilicorr_candidate_topk, hidden),
        )
        return evolve(
            names,
            rename=(*names.rename, *renamed_in_projection()),
            rewrite=(*shapes, *names.rewrite),
        )

    def select(self, block: Block) -> Tensor:
        states = self.predictions(block)
        logs, candidates = self.block_logits(states).float().log_softmax(-1).topk(self.k, -1)
        x = self._of().embeddings(candidates.flatten()).view(*candidates.shape, -1)
        x = x if self.token is None else _flat(self.token, x)
        x = x + _flat(self.state, states)[:, :, None]
        x = x + self.feature(_flat(self.feature_norm, self._features(logs).to(x.dtype)))
        x = x + self.slots[: states.shape[1]] + self.ranks
        bias = self._bias(states.shape[1])
        flat = x.flatten(1, 2)
        for layer in self.layers_of_lattice:
            flat = layer(flat, bias)
        x = self.output_norm(flat).view_as(x)
        anchor = self.anchor_norm(self.context(block.contexts.to(x.dtype)))
        beside = anchor[:, None, None].expand_as(x)
        inner = F.silu(_flat(self.factor, torch.cat([x, beside, x * beside], -1)))
        outgoing, incoming = self._unit(self.outgoing, inner), self._unit(self.incoming, inner)
        first = (self._unit(self.first, anchor)[:, None] * incoming[:, 0]).sum(-1)
        pairs = outgoing[:, :-1] @ incoming[:, 1:].transpose(-1, -2)
        start = first[:, None, None].expand(-1, 1, self.k, -1)
        return walk(candidates, torch.cat([start, pairs], 1).float())

    def _features(self, logs: Tensor) -> Tensor:
        """Describe each candidate: [rows, drafts, k] -> [rows, drafts, k, 5]."""
        order = torch.arange(self.k, device=logs.device, dtype=logs.dtype)
        parts = [
            logs,
            logs.exp(),
            logs - logs.amax(-1, keepdim=True),
            (order / max(self.k - 1, 1)).expand_as(logs),
            (order == 0).to(logs.dtype).expand_as(logs),
        ]
        return torch.stack(parts, -1)

    def _bias(self, count: int) -> Tensor:
        """Biases between all candidates of `count` positions: [heads, n, n]."""
        at = torch.arange(count, device=self.same.device).repeat_interleave(self.k)
        apart = at[:, None] - at[None]
        same = (apart == 0) * self.same[:, None, None]
        return self.distances[:, apart + self.block - 1] + same

    def _unit(self, project: Any, x: Tensor) -> Tensor:
        return F.normalize(_flat(project, x), dim=-1, eps=self.config.lilicorr_vector_eps)


def _flat(layer: Any, x: Tensor) -> Tensor:
    """Apply a linear layer to the last dimension: [..., inputs] -> [..., outputs]."""
    out: Tensor = layer(x.reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], -1)
