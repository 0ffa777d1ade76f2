"""A bank of low-rank adapters, as plain as can be: what the seam has to carry, and no speed.

An adapter is a safetensors file with, for each layer that it changes, `NAME.down` [rank, inputs]
and `NAME.up` [outputs, rank]; a pair of expert stacks goes by the name of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from attrs import field, frozen
from torch import Tensor

from modulm.contracts.adapter import AdaptedExperts, AdaptedLayer, AdapterBank
from modulm.contracts.kernels import Ops
from modulm.contracts.platform import Platform
from modulm.contracts.quantization import LinearSpec
from modulm.errors import CheckpointError

__all__ = ["FakeAdapters", "FakeAdaptersConfig"]


@frozen
class FakeAdaptersConfig:
    """`slots`: adapters in one step; `rank` of all of them; `kinds` of layers that they change."""

    slots: int = 2
    rank: int = 2
    kinds: tuple[str, ...] = field(
        default=("linear", "lm_head", "embedding", "router", "expert"), converter=tuple
    )


class FakeAdapters(AdapterBank):
    """Adds up(down(x)) of each token's slot to what a layer gives."""

    name = "fake"
    api = 1
    Config = FakeAdaptersConfig
    config: FakeAdaptersConfig

    def __init__(self, config: object, platform: Platform, ops: Ops) -> None:
        super().__init__(config, platform, ops)
        self.current: Tensor | None = None
        self.layers: dict[str, _Pair] = {}
        self._added: dict[str, dict[str, Tensor]] = {}

    @property
    def slots(self) -> int:
        return self.config.slots

    def layer(self, spec: LinearSpec) -> AdaptedLayer | None:
        if spec.kind not in self.config.kinds or spec.kind == "expert":
            return None
        table = spec.kind == "embedding"
        inputs, outputs = (spec.outputs, spec.inputs) if table else (spec.inputs, spec.outputs)
        return self._pair(spec, inputs, outputs)

    def experts(self, gate_up: LinearSpec, down: LinearSpec) -> AdaptedExperts | None:
        if "expert" not in self.config.kinds:
            return None
        pair = self._pair(gate_up, gate_up.inputs, down.outputs)

        def changed(
            base: Callable[..., Tensor], x: Tensor, *others: object, **more: object
        ) -> Tensor:
            return pair.add(x, base(x, *others, **more))

        return changed

    def _pair(self, spec: LinearSpec, inputs: int, outputs: int) -> _Pair:
        rank, slots = self.config.rank, self.slots + 1
        dtype, device = getattr(torch, spec.dtype), self.platform.device
        down = torch.zeros(slots, rank, inputs, dtype=dtype, device=device)
        up = torch.zeros(slots, outputs, rank, dtype=dtype, device=device)
        self.layers[spec.name] = _Pair(self, down, up)
        return self.layers[spec.name]

    def add(self, name: str, path: Path) -> None:
        from safetensors.torch import load_file

        tensors = load_file(path)
        for key, tensor in tensors.items():
            layer, _, side = key.rpartition(".")
            pair = self.layers.get(layer)
            if pair is None or side not in ("down", "up"):
                raise CheckpointError(f"{path}: {key}: the model has no such layer")
            wanted = list((pair.down if side == "down" else pair.up).shape[1:])
            if list(tensor.shape) != wanted:
                raise CheckpointError(f"{path}: {key} is {list(tensor.shape)}, not {wanted}")
        self._added[name] = tensors

    def remove(self, name: str) -> None:
        del self._added[name]

    def fill(self, slot: int, name: str) -> None:
        tensors = self._added[name]
        for layer, pair in self.layers.items():
            for side, held in (("down", pair.down), ("up", pair.up)):
                given = tensors.get(f"{layer}.{side}")
                held[slot] = 0 if given is None else given.to(held)

    def begin(self, slots: Tensor | None) -> None:
        self.current = slots


@frozen(eq=False)
class _Pair(AdaptedLayer):
    """down: [slots, rank, inputs]; up: [slots, outputs, rank]."""

    bank: FakeAdapters
    down: Tensor
    up: Tensor

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """x: [tokens, inputs], out: [tokens, outputs]."""
        slots = self.bank.current
        if slots is None:
            return out
        narrow = torch.einsum("tri,ti->tr", self.down[slots], x.to(self.down.dtype))
        return out + torch.einsum("tor,tr->to", self.up[slots], narrow).to(out.dtype)

    def apply(
        self, base: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, bias: Tensor | None
    ) -> Tensor:
        return self.add(x, base(x, bias))

    def embed(self, base: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        slots, out = self.bank.current, base(ids)
        if slots is None:
            return out
        narrow = self.down[slots, :, ids]
        return out + torch.einsum("tor,tr->to", self.up[slots], narrow)
