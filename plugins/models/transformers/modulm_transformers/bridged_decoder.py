"""Runs a decoder of transformers whose parts are all modulm's, without the library's code."""

from __future__ import annotations

from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.attention import AttentionBackend
from modulm.contracts.model import Batch
from modulm.nn import Builder, Embedding
from modulm_transformers.attention import Layers, Turn
from modulm_transformers.kept_scales import KeptScales
from modulm_transformers.recognized_decoder import Angles, DecoderParts, LayerParts

__all__ = ["BridgedDecoder"]


class AngleTable:
    """Angles of all positions, computed by the library's module; see `modulm.nn.RotaryTable`."""

    def __init__(self, kind: AngleKind) -> None:
        self.kind = kind
        self.cos_sin = torch.empty(0, kind.size, device="meta")

    def of_step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (table, row indices [tokens]) for a step."""
        return self.cos_sin, batch.positions

    @torch.inference_mode()
    def fill(self, rows: int, length: int, device: torch.device) -> None:
        """Compute `rows` positions."""
        angles, half = self.kind.angles, self.kind.size // 2
        where = next((b.device for b in angles.module.buffers()), device)
        own = slice(0, half) if self.kind.halved else slice(0, None, 2)
        parts = angles.compute(torch.arange(rows, device=where))
        self.cos_sin = torch.cat([part[:, own] for part in parts], -1).to(device)


@frozen
class AngleKind:
    """The angles of a module of the library; see `modulm.nn.RotaryKind`."""

    angles: Angles = field(eq=id)
    size: int
    halved: bool

    def table(self) -> AngleTable:
        """Create an empty table."""
        return AngleTable(self)


@frozen(eq=False)
class _Layer:
    parts: LayerParts
    where: tuple[int, AttentionBackend]
    table: Any


class BridgedDecoder:
    """Hidden states of a step, computed like `modulm_layers.DecoderForCausalLM`.

    embedding: ours. layers: where each attention module attends.
    """

    def __init__(
        self,
        build: Builder,
        parts: DecoderParts,
        embedding: Embedding,
        layers: Layers,
        scales: KeptScales,
    ) -> None:
        self.embedding, self.norm, self.scales = embedding, parts.norm.norm, scales
        self.layers = [
            _Layer(layer, layers[id(layer.attn)][0], _table(build, layer, angles))
            for layer, angles in zip(parts.layers, parts.angles, strict=True)
        ]

    def run(self, batch: Batch) -> Tensor:
        """Hidden states after the final norm: [tokens, hidden], or those of `batch.sample` alone if
        it is `only_sampled`.
        """
        x, residual = self.embedding(batch), None
        turns: dict[int, Turn] = {}
        last = self.layers[-1]
        for layer in self.layers:
            parts = layer.parts
            normed, residual = parts.attn_norm.norm.add(x, residual)
            turn = None
            if layer.table is not None:
                turn = turns.get(id(layer.table))
                if turn is None:
                    turn = turns[id(layer.table)] = Turn(*layer.table.of_step(batch))
            x = parts.attn.run(normed, batch, turn, layer.where, self.scales)
            if layer is last and batch.only_sampled and len(batch.sample):
                x, residual = x[batch.sample], residual[batch.sample]
            x, residual = parts.mlp_norm.norm.add(x, residual)
            x = _mixed(parts.mlp, x)
        out: Tensor = self.norm.add(x, residual)[0]
        return out


def _mixed(mlp: Module, x: Tensor) -> Tensor:
    out: Tensor = mlp(x[None])[0]
    return out


def _table(build: Builder, layer: LayerParts, angles: Angles | None) -> Any:
    if angles is None:
        return None
    cos, _ = angles.compute(torch.zeros(1, dtype=torch.long))
    return build.rope(AngleKind(angles, cos.shape[-1], layer.attn.plain.halved))
