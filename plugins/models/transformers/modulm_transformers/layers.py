"""modulm's layers in the place of transformers'."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from modulm.contracts.quantization import Shard
from modulm.nn import Builder, Linear, RMSNorm
from modulm.parallel import ProcessGroup
from modulm_layers import GatedMLP
from modulm_layers.activation import gate_name

__all__ = ["BridgedExperts", "BridgedLinear", "BridgedMLP", "BridgedNorm", "ElsewhereLayer"]


class BridgedLinear(Module):
    """A modulm linear layer in place of transformers'; supports any leading dimensions.

    inputs: this rank's part of an input that all ranks have whole; None if the input is already
    cut. gather: the ranks whose outputs are concatenated, if the model's code needs all of them.
    """

    def __init__(
        self,
        layer: Linear,
        outputs: int,
        *,
        inputs: Shard | None = None,
        gather: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.inputs, self.gather = layer, inputs, gather
        self.in_features = layer.spec.inputs if inputs is None else inputs.total
        self.out_features = outputs
        self._ready = False

    @property
    def loaded(self) -> bool:
        """Whether the layer has its weights."""
        parameters = self.layer._parameters.values()
        return not any(parameter is not None and parameter.is_meta for parameter in parameters)

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs], dequantized: some models read its dtype or multiply by it."""
        if not self.loaded:
            dtype = getattr(torch, self.layer.spec.dtype)
            return torch.zeros(self.out_features, self.in_features, dtype=dtype)
        return self.layer.dequantize()

    @property
    def bias(self) -> Tensor | None:
        return self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., inputs] -> [..., outputs]. Returns zeros before the weights are loaded."""
        if not self._ready:
            self._ready = self.loaded
            if not self._ready:
                return x.new_zeros(*x.shape[:-1], self.out_features)
        if self.inputs is not None:
            x = x[..., self.inputs.start : self.inputs.start + self.inputs.size]
        out: Tensor = self.layer(x.reshape(-1, x.shape[-1]))
        if self.gather is not None:
            out = self.gather.all_gather(out)
        return out.view(*x.shape[:-1], self.out_features)


class BridgedNorm(Module):
    """modulm's RMS norm in place of transformers'."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    @property
    def weight(self) -> Tensor | None:
        """[size], without the offset."""
        return self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> the same shape; x itself before the weight is loaded."""
        weight = self.norm.weight
        if weight is not None and weight.is_meta:
            return x
        out: Tensor = self.norm(x.reshape(-1, x.shape[-1]))
        return out.view(x.shape)


class BridgedMLP(Module):
    """modulm's gated feed-forward block in place of transformers'."""

    def __init__(self, block: GatedMLP) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden] -> the same shape; x itself before the weights are loaded."""
        if any(parameter.is_meta for parameter in self.block.gate_up.parameters()):
            return x
        out: Tensor = self.block(x.reshape(-1, x.shape[-1]))
        return out.view(x.shape)


class BridgedExperts(Module):
    """modulm's stacked experts in place of transformers'."""

    def __init__(self, b: Builder, gate_up: Linear, down: Linear, experts: int, act: str) -> None:
        super().__init__()
        self.gate_up, self.down, self.experts = gate_up, down, experts
        self.act = gate_name(act)
        self.fused = b.fused_experts(gate_up, down)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: [tokens, hidden]; indices, weights: [tokens, choices]. Returns [tokens,
        hidden]; the input itself before the weights are loaded. Indices past the last expert stand
        for none.
        """
        if any(parameter.is_meta for parameter in self.gate_up.parameters()):
            return hidden_states
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        none = top_k_index >= self.experts
        weights = top_k_weights.float().masked_fill(none, 0)
        gate_up, down = self.gate_up, self.down
        mixed: Tensor = self.fused(
            x,
            weights,
            top_k_index.masked_fill(none, 0),
            gate_up.method.experts(gate_up),
            down.method.experts(down),
            gate_up_bias=None,
            down_bias=None,
            act=self.act,
        )
        if down.reduce is not None:
            mixed = down.reduce.all_reduce(mixed)
        return mixed.view(hidden_states.shape)


class ElsewhereLayer(Module):
    """Stands in for a layer of another pipeline stage: returns its input.

    Other attributes are those of the layer, since models choose masks by them.
    """

    def __init__(self, layer: Module) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """hidden_states: [1, tokens, hidden] -> the same."""
        return hidden_states
