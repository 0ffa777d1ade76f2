"""Gives a model of transformers weight slots, so that modulm loads, cuts and quantizes its weights.

Linear layers, embeddings and the head are made by the builder. Other parameters get slots of their
own, cut as transformers' plan says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from modulm.contracts.quantization import Shard
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Embedding, Linear, RMSNorm
from modulm.nn.weight_slots import Part, Slot, Unit
from modulm_layers import GatedMLP
from modulm_transformers.bridged_attention import BridgedAttention
from modulm_transformers.conversions import Conversions, Source
from modulm_transformers.layers import (
    BridgedExperts,
    BridgedLinear,
    BridgedMLP,
    BridgedNorm,
    ElsewhereLayer,
)
from modulm_transformers.plans import RankPlan, cuts
from modulm_transformers.recognized import gated_block, gated_experts, rms_norm_of
from modulm_transformers.recognized_attention import plain_attention

__all__ = ["add_slots"]


def add_slots(
    whole: Any, build: Builder, plan: RankPlan, conversions: Conversions
) -> Mapping[int, Embedding]:
    """Replace the linear layers of a bare model by modulm's, and give every other parameter a slot.

    Returns our tables by the identities of the library's. Raises UnsupportedError for what only the
    library can load.
    """
    placement = _Placement(whole, build, plan, conversions)
    placement.run()
    return placement.embeddings


class _Placement:
    """The state of `add_slots`."""

    def __init__(
        self, whole: Any, build: Builder, plan: RankPlan, conversions: Conversions
    ) -> None:
        self.whole, self.build, self.plan, self.conversions = whole, build, plan, conversions
        self.places: dict[int, list[tuple[Module, str]]] = {}
        for module in whole.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.places.setdefault(id(parameter), []).append((module, name))
        head = whole.get_output_embeddings()
        self.head = head if type(head) is torch.nn.Linear else None
        self.tables: dict[int, Embedding] = {}
        self.embeddings: dict[int, Embedding] = {}
        #: Numbers of dimensions of a head that the model may rotate.
        self.rotated = {
            2 * m.inv_freq.shape[-1]
            for m in whole.modules()
            if isinstance(getattr(m, "inv_freq", None), Tensor)
        }
        self.tied = self.head is not None and self._is_tied(self.head)
        strict = set(whole._keep_in_fp32_modules_strict or ())
        narrow = set(whole._keep_in_fp32_modules or ())
        half = build.shared.dtype == torch.float16
        self.wide = tuple(strict | (narrow if half else set()))

    def run(self) -> None:
        replaced: set[int] = set()
        for path, module in list(self.whole.named_modules()):
            if id(module) in replaced:
                continue
            for name, child in list(module.named_children()):
                at = f"{path}.{name}" if path else name
                if (attention := self._attention(at, child)) is not None:
                    replaced.add(id(child))
                    setattr(module, name, attention)
                elif isinstance(child, torch.nn.Embedding):
                    self._embedding(at, child)
                elif (block := self._block(at, child)) is not None:
                    setattr(module, name, block)
        modules = list(self.whole.named_modules())
        for path, module in modules:
            for name, child in list(module.named_children()):
                if type(child) is torch.nn.Linear:
                    setattr(module, name, self._linear(f"{path}.{name}" if path else name, child))
        for path, module in self.whole.named_modules():
            if not isinstance(module, Linear | RMSNorm | torch.nn.Embedding):
                self._tensors(path, module)
            if self.plan.sums(path) and not isinstance(module, BridgedExperts):
                module.register_forward_hook(partial(_summed, self.plan.group))
            if self.plan.divides(path):
                module.register_forward_pre_hook(partial(_divided, self.plan.group.size))
        self._leave_out_layers()

    def _builder(self, path: str) -> Builder:
        return self.build.stage(self.plan.is_here(path, tied=self.tied))

    def _is_tied(self, linear: torch.nn.Linear) -> bool:
        return len(self.places[id(linear.weight)]) > 1

    def _block(self, path: str, module: Module) -> Module | None:
        """modulm's block for one that computes the same, or None."""
        style, b = self.plan.style, self._builder(path)
        if not style(path) and (norm := rms_norm_of(module)) is not None:
            (weight,) = module.parameters()
            shared = len(self.places[id(weight)]) > 1 or self._is_wide(path, weight)
            eps, offset = norm
            size = len(weight)
            return None if shared else BridgedNorm(b.rms_norm(path, size, eps, offset=offset))
        if (experts := self._experts(path, module)) is not None:
            return experts
        styles = tuple(style(f"{path}.{part}") for part in ("gate_proj", "up_proj", "down_proj"))
        cut = self.plan.group.size == 1 or styles == ("colwise", "colwise", "rowwise")
        if not cut or (block := gated_block(module)) is None:
            return None
        return BridgedMLP(
            GatedMLP(b.at(path), block.hidden, block.inner, block.act, bias=block.bias)
        )

    def _attention(self, path: str, module: Module) -> BridgedAttention | None:
        """modulm's attention for a module that computes the same, or None."""
        plain = plain_attention(module, self.rotated)
        if plain is None or self.plan.sums(path) or self.plan.divides(path):
            return None
        names, style = (plain.q, plain.k, plain.v), self.plan.style
        linears: list[torch.nn.Linear] = [module.get_submodule(name) for name in names]
        shared = any(len(self.places[id(linear.weight)]) > 1 for linear in linears)
        if shared or any(self.conversions.parts_of(f"{path}.{name}") for name in names):
            return None
        if self.plan.group.size > 1:
            cut = tuple(style(f"{path}.{name}") for name in (*names, plain.out))
            if cut != ("colwise", "colwise", "colwise", "rowwise") or plain.order == "whole":
                return None
            norms = [module.get_submodule(name) for name in plain.norms]
            if any(w.dim() > 1 for norm in norms for w in norm.parameters()):
                return None
        b, q = self._builder(path).at(path), linears[0]
        sizes = {name: linear.out_features for name, linear in zip(names, linears, strict=True)}
        least = (plain.head_dim, plain.head_dim, plain.value_dim)
        try:
            layer = b.linear("qkv_proj", q.in_features, sizes, bias=q.bias is not None, least=least)
        except UnsupportedError:  # its parts are not quantized alike
            return None
        attention = BridgedAttention(module, plain, layer, b.ops)
        for name in plain.norms:
            if (norm := self._block(f"{path}.{name}", attention.get_submodule(name))) is not None:
                setattr(attention, name, norm)
        return attention

    def _experts(self, path: str, module: Module) -> BridgedExperts | None:
        """modulm's stack of experts for one that computes the same, or None."""
        block = gated_experts(module)
        if block is None:
            return None
        names = self.conversions
        default = f"{path}.{{expert}}.{{part}}"
        both = names.expert_names(f"{path}.gate_up_proj") or (default, ("gate_proj", "up_proj"))
        one = names.expert_names(f"{path}.down_proj") or (default, ("down_proj",))
        if (len(both[1]), len(one[1])) != (2, 1):
            return None
        b, n = self._builder(path), block.experts
        sizes = dict.fromkeys(both[1], block.inner)
        gate_up = b.experts(f"{path}.gate_up_proj", n, block.hidden, sizes, both[0])
        sizes = dict.fromkeys(one[1], block.hidden)
        down = b.experts(f"{path}.down_proj", n, block.inner, sizes, one[0], rows=True)
        return BridgedExperts(b, gate_up, down, n, block.act)

    # Tables.

    def _embedding(self, path: str, table: torch.nn.Embedding) -> None:
        """Load a table by the builder; the library's module keeps using it as its weight."""
        owners = self.places[id(table.weight)]
        if owners[0][0] is not table:
            raise UnsupportedError(f"{path}: not supported yet: a table that two modules share")
        b = self._builder(path)
        inner = b.embedding(path, table.num_embeddings, table.embedding_dim)
        self.tables[id(table.weight)] = self.embeddings[id(table)] = inner
        b.after(inner, partial(_use_table, table, inner))

    # Linear layers.

    def _linear(self, path: str, linear: torch.nn.Linear) -> BridgedLinear:
        b, bias, style = self._builder(path), linear.bias is not None, self.plan.style(path)
        inputs, outputs = linear.in_features, linear.out_features
        if linear is self.head:
            table = self.tables.get(id(linear.weight))
            if self.tied and table is None:
                raise UnsupportedError(f"{path}: not supported yet: tied to no embedding")
            head = b.head(path, inputs, outputs, tied=table, bias=bias)
            return BridgedLinear(head, outputs)
        if self._is_tied(linear):
            raise UnsupportedError(f"{path}: not supported yet: layers that share a weight")
        parts = self.conversions.parts_of(path)
        if parts and style:
            raise UnsupportedError(f"{path}: not supported yet: fused weights cut over ranks")
        if parts:
            return BridgedLinear(self._fused(b, path, linear, parts), outputs)
        if style in ("rowwise", "rowwise_split_input"):
            whole = style == "rowwise_split_input"
            shard = self.plan.group.shard(inputs, path) if whole else None
            return BridgedLinear(
                b.row_linear(path, inputs, outputs, bias=bias), outputs, inputs=shard
            )
        if style == "packed_colwise":
            layer = b.pieces(path, inputs, (outputs // 2, outputs // 2), bias=bias)
            return BridgedLinear(layer, layer.spec.outputs)
        if style not in ("", "colwise", "colwise_gather_output"):
            raise UnsupportedError(f"{path}: not supported yet: {style} linear layers")
        least = self._unit(path, outputs)
        layer = b.linear(path, inputs, outputs, bias=bias, split=bool(style), least=least)
        gather = self.plan.group if style == "colwise_gather_output" else None
        return BridgedLinear(layer, outputs if gather else layer.spec.outputs, gather=gather)

    def _fused(
        self, b: Builder, path: str, linear: torch.nn.Linear, parts: tuple[str, ...]
    ) -> Linear:
        """A layer whose checkpoint may hold its parts, of equal size."""
        size = linear.out_features // len(parts)
        names = dict.fromkeys(parts, size)
        return b.linear(path, linear.in_features, names, bias=linear.bias is not None, split=False)

    def _unit(self, path: str, outputs: int) -> int | None:
        """The outputs that belong to one head of keys, which ranks do not cut further."""
        parent, _, name = path.rpartition(".")
        if self.plan.group.size == 1 or name not in ("k_proj", "v_proj"):
            return None
        size = getattr(self.whole.get_submodule(parent), "head_dim", None)
        return size if isinstance(size, int) and outputs % size == 0 else None

    # Other parameters.

    def _tensors(self, path: str, module: Module) -> None:
        """Slots for a module's own parameters and stored buffers."""
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            owners = self.places.get(id(parameter), [(module, name)])
            full = f"{path}.{name}" if path else name
            if len(owners) > 1:
                raise UnsupportedError(f"{full}: not supported yet: modules that share a parameter")
            style = self.plan.style(full) or self._style_of(path)
            self._slot(full, module, name, parameter, style)
        for name, buffer in list(module._buffers.items()):
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            del module._buffers[name]
            self._slot(f"{path}.{name}" if path else name, module, name, buffer, "")

    def _style_of(self, path: str) -> str:
        style = self.plan.style(path)
        return "" if self.plan.sums(path) else style

    def _slot(self, full: str, module: Module, name: str, tensor: Tensor, style: str) -> None:
        shape, group = tuple(tensor.shape), self.plan.group
        if self.plan.mesh.expert.size > 1 and "experts" in full and len(shape) == 3:
            raise UnsupportedError(f"enable_expert_parallel: not supported yet: {full}")
        dtype = torch.float32 if self._is_wide(full, tensor) else tensor.dtype
        cut = cuts(style, shape, group, full)
        local = list(shape)
        if cut is not None:
            local[cut[0]] = sum(shard.size for shard in cut[1])
        module.register_parameter(name, _blank(local, dtype))
        whole = Source(full, shape, tuple(slice(0, size) for size in shape))
        ways = [_way([whole], cut)]
        if sources := self.conversions.sources(full, shape):
            ways.insert(0, _way(sources, cut))
        slot = Slot(module, name, tuple(local), dtype, tuple(ways))
        self._builder(full).shared.units.append(Unit(full, module, [slot]))

    def _is_wide(self, full: str, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and any(name in full for name in self.wide)

    # Stages.

    def _leave_out_layers(self) -> None:
        """Replace what other stages have."""
        plan = self.plan
        if plan.here is None:
            return
        layers = self.whole.get_submodule(plan.layers)
        for index, layer in enumerate(layers):
            if index not in plan.here:
                layers[index] = ElsewhereLayer(layer)
        base = self.whole.get_submodule(plan.base)
        if not plan.mesh.pipeline.last and hasattr(base, "norm"):
            base.norm = ElsewhereLayer(base.norm)


def _blank(shape: list[int], dtype: torch.dtype) -> Parameter:
    return Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def _way(
    sources: list[Source] | Any, cut: tuple[int, tuple[Shard, ...]] | None
) -> tuple[Part, ...]:
    """The parts by which stored tensors fill this rank's part of a parameter."""
    parts: list[Part] = []
    for source in sources:
        if cut is None:
            parts.append(Part(source.name, source.shape, (), source.region, source.transform))
            continue
        dim, shards = cut
        before = len(source.region) - len(source.shape)
        covered, at = source.region[dim], 0
        for shard in shards:
            first = max(covered.start, shard.start)
            last = min(covered.stop, shard.start + shard.size)
            if first < last:
                target = list(source.region)
                target[dim] = slice(at + first - shard.start, at + last - shard.start)
                inside = (slice(None),) * max(dim - before, 0)
                piece = (*inside, slice(first - covered.start, last - covered.start))
                parts.append(
                    Part(source.name, source.shape, piece, tuple(target), source.transform)
                )
            at += shard.size
    return tuple(parts)


def _use_table(table: torch.nn.Embedding, inner: Embedding) -> None:
    """Use the builder's table as the weight of the library's module."""
    weight = inner._parameters.get("weight")
    if weight is None or weight.shape != table.weight.shape:
        weight = Parameter(inner.method.dequantize(inner, inner.spec), requires_grad=False)
    table.register_parameter("weight", weight)


def _summed(group: Any, module: Module, inputs: Any, output: Tensor) -> Tensor:
    summed: Tensor = group.all_reduce(output)
    return summed


def _divided(ranks: int, module: Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (inputs[0] / ranks, *inputs[1:])
