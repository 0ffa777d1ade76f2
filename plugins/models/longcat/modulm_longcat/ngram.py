"""LongCat-Flash-Lite (Meituan, arXiv 2601.21204): LongCat-Flash whose embedding also looks up the
last few tokens together, hashed into tables of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch, MtpLayer, StatePlan, StateSpec
from modulm.nn import Builder, Head, WeightNames
from modulm_layers import size
from modulm_layers.chunked_scan import initial_states
from modulm_longcat.longcat import LongcatConfig, LongcatFlashForCausalLM

__all__ = ["LongcatFlashNgramForCausalLM", "LongcatNgramConfig", "NgramEmbedding"]

#: States are fp32 numbers, which are exact up to here.
_MOST = 2**24


@frozen(kw_only=True)
class LongcatNgramConfig(LongcatConfig):
    """config.json of LongCat-Flash-Lite.

    emb_neighbor_num: tokens that are hashed together at most, itself included. emb_split_num:
    tables for each number of tokens. ngram_vocab_size_ratio: rows of a table, about, in multiples
    of the vocabulary.
    """

    ngram_vocab_size_ratio: int = size()
    emb_neighbor_num: int = size(least=2)
    emb_split_num: int = size()
    eos_token_id: int = size(2, least=0)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.hidden_size % self.tables:
            raise ValueError(
                f"emb_split_num: {self.tables} tables cannot share {self.hidden_size} dimensions"
            )
        if self.vocab_size >= _MOST:
            raise ValueError(f"vocab_size: {self.vocab_size} is implausible")

    @property
    def tables(self) -> int:
        """Number of tables for hashed tokens."""
        return self.emb_split_num * (self.emb_neighbor_num - 1)

    def rows(self, table: int) -> int:
        """Rows of a table, which is also what hashes are reduced by."""
        return self.ngram_vocab_size_ratio * self.vocab_size + 2 * table + 1


class NgramEmbedding(Module):
    """The mean of a token's vector and of those of the hashed tokens that end with it.

    Its state is a row's last tokens, plus one; 0 stands before the first. The end token neither
    takes part in hashes nor lets one reach beyond it.
    """

    def __init__(self, c: LongcatNgramConfig, b: Builder) -> None:
        super().__init__()
        self.words = b.embedding("embed_tokens", c.vocab_size, c.hidden_size)
        at, width = b.at("ngram_embeddings"), c.hidden_size // c.tables
        self.tables = ModuleList(
            at.embedding(f"embedders.{i}", c.rows(i), width) for i in range(c.tables)
        )
        self.projections = ModuleList(
            at.linear(f"post_projs.{i}", width, c.hidden_size, split=False) for i in range(c.tables)
        )
        self.reach, self.end = c.emb_neighbor_num, c.eos_token_id
        counts = [i // c.emb_split_num + 2 for i in range(c.tables)]
        powers = [
            [pow(c.vocab_size, j, c.rows(i)) if j < count else 0 for j in range(self.reach)]
            for i, count in enumerate(counts)
        ]
        device = b.shared.device
        self.powers = torch.tensor(powers).to(device)
        self.rows = torch.tensor([c.rows(i) for i in range(c.tables)]).to(device)
        self.cache = b.cache(StateSpec((("context", (self.reach - 1,), "float32"),)))

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, hidden]."""
        states, plan = batch.caches[self.cache]["context"], batch.plan(self.cache)
        ids = self.hashes(self._context(batch.tokens, states, plan))
        total = self.words(batch).float()
        for column, table, project in zip(
            ids.unbind(1), self.tables, self.projections, strict=True
        ):
            total = total + project(table.lookup(column.contiguous())).float()
        return (total / (1 + len(self.tables))).to(self.words.lookup(batch.tokens[:0]).dtype)

    def _context(self, tokens: Tensor, states: Tensor, plan: StatePlan) -> Tensor:
        """Return each token and those before it, plus one: [tokens, reach] int64; update states."""
        past, before = initial_states(states, plan), self.reach - 1
        parts = torch.split(tokens.float() + 1, list(plan.counts))
        rows = [torch.cat(row) for row in zip(past, parts, strict=True)]
        states[plan.slots] = torch.stack([row[len(row) - before :] for row in rows])
        for row, count, slot in plan.saves:
            states[slot] = rows[row][count : count + before]
        windows = [row.unfold(0, self.reach, 1).flip(1) for row in rows]
        return torch.cat(windows).long()

    def hashes(self, context: Tensor) -> Tensor:
        """context: [tokens, reach], as `_context` returns it -> rows of the tables, [tokens, n]."""
        known = (context > 0) & (context != self.end + 1)
        known = known.long().cumprod(1).unsqueeze(1)
        words = (context - 1).clamp(min=0).unsqueeze(1)
        terms = words * self.powers % self.rows[:, None] * known
        return terms.sum(-1) % self.rows


class LongcatFlashNgramForCausalLM(LongcatFlashForCausalLM):
    """LongCat-Flash-Lite with a language-model head."""

    config_type = LongcatNgramConfig
    takes_embeds = False
    oracle = "modulm_longcat.oracle:WithNgrams"

    @classmethod
    def weights(cls, config: LongcatConfig) -> WeightNames:
        names = super().weights(config)
        twice = r"^model\.ngram_embeddings\.word_embeddings\."
        return evolve(names, ignore=(*names.ignore, twice))

    @classmethod
    def mtp(cls, config: LongcatConfig) -> MtpLayer | None:
        return None

    def make_embedding(self, config: Any, b: Builder) -> Any:
        return NgramEmbedding(config, b)

    def make_head(self, config: Any, b: Builder) -> Head:
        embedding: Any = self.embed
        tied = embedding.words if config.tie_word_embeddings else None
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **super().tiny(),
            "architectures": ["LongcatFlashNgramForCausalLM"],
            "model_type": "longcat_flash_ngram",
            "ngram_vocab_size_ratio": 2,
            "emb_neighbor_num": 3,
            "emb_split_num": 2,
            "eos_token_id": 2,
        }
