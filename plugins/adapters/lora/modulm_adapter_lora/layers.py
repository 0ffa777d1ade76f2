"""Wraps layers and expert stacks to apply adapters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from modulm.contracts.adapter import AdaptedLayer
from modulm.errors import EngineError
from modulm.ops import twins
from modulm_adapter_lora.prepared import LayerChange
from modulm_adapters.lora_ops import LoraPiece, LoraTable, SlotBlocks, SlotGroups

if TYPE_CHECKING:
    from modulm.contracts.kernels import Ops
    from modulm.contracts.quantization import LinearSpec

__all__ = ["LoraExperts", "LoraLayer", "Step"]

#: Rows of the identity matrix per call, to read a layer's weight.
_ROWS = 256


class Step:
    """The step's adapter data, shared by all layers of a bank.

    groups: the tokens by slot, None if no token uses an adapter. tokens: their number. special:
    whether a used slot needs more than the op. blocks: the tokens in tensors that stay in place,
    for kernels of recorded steps; None if there are none, or the step is too large.
    """

    def __init__(self, slots: int) -> None:
        self.held = SlotGroups(slots)
        self.groups: SlotGroups | None = None
        self.tokens = 0
        self.special = False
        self.blocks: SlotBlocks | None = None


class LoraLayer(AdaptedLayer):
    """Wraps a linear layer or an embedding."""

    def __init__(self, spec: LinearSpec, step: Step, ops: Ops, table: LoraTable) -> None:
        self.spec, self.step, self.ops, self.table = spec, step, ops, table
        self._by_blocks = ops.find("add_lora_blocks")
        self.changes: dict[int, LayerChange] = {}
        self.base: Callable[..., Tensor] | None = None
        #: Why no adapter can change this layer, or None.
        self.refused = ""
        self._squares: Tensor | None = None
        self._guard = threading.Lock()

    def finish(self, base: Callable[..., Tensor]) -> None:
        self.base, self._squares = base, None

    def bypass(self) -> None:
        self.refused = "the model takes this layer's weight apart"

    def put(self, slot: int, change: LayerChange | None, device: torch.device) -> None:
        """Put another adapter into the slot."""
        self.changes.pop(slot, None)
        low_rank = [] if change is None else change.pieces
        pieces = [LoraPiece(p.down.to(device), p.up.to(device), p.start) for p in low_rank]
        self.table.put(slot, pieces)
        if change is not None and change.special:
            self.changes[slot] = change

    def apply(
        self, base: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, bias: Tensor | None
    ) -> Tensor:
        out, groups = base(x, bias), self.step.groups
        if groups is not None and self._counts(x, groups):
            if self.step.special and self.changes:
                for slot, rows in groups.rows():
                    if slot in self.changes:
                        _apply_special(self.changes[slot], rows.to(x.device), x, bias, out)
            self._add(out, x, groups)
        return out

    def embed(self, base: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        out, groups = base(ids), self.step.groups
        if groups is not None and self._counts(ids, groups):
            if self.step.special and self.changes:
                for slot, rows in groups.rows():
                    if slot in self.changes:
                        _embed_special(self.changes[slot], rows.to(ids.device), ids, out)
            self._add(out, ids, groups)
        return out

    def _add(self, out: Tensor, x: Tensor, groups: SlotGroups) -> None:
        blocks = self.step.blocks
        if blocks is None or self._by_blocks is None:
            self.ops.add_lora(out, x, groups, self.table)
        else:
            self._by_blocks(out, x, blocks, self.table)

    def _counts(self, x: Tensor, groups: SlotGroups) -> bool:
        """Whether the rows are the step's tokens.

        Raises EngineError if they are not and an adapter of the step changes the layer.
        """
        if len(x) == self.step.tokens:
            return True
        self.refused = "it does not run once for each token"
        if any(self.table.pieces[slot] or slot in self.changes for slot, *_ in groups.used):
            raise EngineError(f"{self.spec.name}: an adapter cannot change it: {self.refused}")
        return False

    # For DoRA, which needs the weight; called outside of steps.

    @torch.inference_mode()
    def product(self, x: Tensor) -> Tensor:
        """Multiply inputs by the weight: [n, inputs] -> [n, outputs], or rows of an embedding."""
        if self.base is None:
            raise EngineError(f"{self.spec.name} has no weight yet")
        if x.dtype == torch.int64:
            return self.base(x)
        return self.base(x.to(getattr(torch, self.spec.dtype)), None)

    @torch.inference_mode()
    def squares(self) -> Tensor:
        """Compute the squared norms of the weight's rows: [outputs] fp32."""
        with self._guard:
            if self._squares is None:
                total = torch.zeros(self.spec.outputs)
                for first in range(0, self.spec.inputs, _ROWS):
                    count = min(_ROWS, self.spec.inputs - first)
                    unit = torch.zeros(count, self.spec.inputs)
                    unit[torch.arange(count), first + torch.arange(count)] = 1
                    total += self.product(unit).float().square().sum(0)
                self._squares = total
            return self._squares


def _apply_special(
    change: LayerChange, rows: Tensor, x: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Apply changes other than low-rank ones to the rows of one slot."""
    y, old = out[rows].float(), 0.0 if bias is None else bias.float()
    new = old
    if change.bias is not None and change.rebiased is not None:
        new = torch.where(change.rebiased, change.bias, torch.as_tensor(old))
    if change.scale is not None:
        y = (y - old) * change.scale + old
    if change.bias is not None:
        y = y + (new - old)
    if change.added is not None:
        y = y + change.added
    for start, weight in change.weights:
        at = slice(start, start + len(weight))
        addition = new[at] if isinstance(new, Tensor) else None
        part = F.linear(x[rows].to(weight.dtype), weight)
        y[:, at] = part.float() if addition is None else part.float() + addition
    out[rows] = y.to(out.dtype)


def _embed_special(change: LayerChange, rows: Tensor, ids: Tensor, out: Tensor) -> None:
    """The same for an embedding."""
    vectors = out[rows].float()
    if change.weights:
        vectors = change.weights[0][1][ids[rows]].float()
    if change.scale is not None:
        vectors = vectors * change.scale
    out[rows] = vectors.to(out.dtype)


class LoraExperts:
    """Wraps the op `fused_experts`: rows with an adapter run in fp32 with the changed weights of
    their experts, others run unchanged.
    """

    def __init__(self, gate_up: LinearSpec, down: LinearSpec, step: Step) -> None:
        self.specs, self.step = (gate_up, down), step
        self.changes: dict[int, tuple[LayerChange | None, LayerChange | None]] = {}

    def put(self, slot: int, changes: Mapping[str, LayerChange]) -> None:
        """Put another adapter into the slot."""
        gate_up, down = (changes.get(spec.name) for spec in self.specs)
        self.changes.pop(slot, None)
        if gate_up is not None or down is not None:
            self.changes[slot] = gate_up, down

    def __call__(
        self,
        base: Callable[..., Tensor],
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: object,
        down: object,
        **more: Any,
    ) -> Tensor:
        """Run the op; see `fused_experts`."""
        groups = self.step.groups
        out = base(x, weights, ids, gate_up, down, **more)
        if groups is None or not self.step.special or not self.changes:
            return out
        if len(x) != self.step.tokens:
            raise EngineError(f"{self.specs[0].name}: an adapter's experts run on other rows")
        for name in ("gate_up_bias", "down_bias"):
            if more.get(name) is not None:
                more[name] = more[name].float()
        more.pop("out", None)
        for slot, rows in groups.rows():
            if slot in self.changes:
                first, second = self.changes[slot]
                stacks = _Changed(gate_up, first), _Changed(down, second)
                at = rows.to(x.device)
                result = twins.fused_experts(x[at].float(), weights[at], ids[at], *stacks, **more)
                out[at] = result.to(out.dtype)
        return out


@frozen(eq=False)
class _Changed:
    """A stack of experts with an adapter's changes applied, in fp32."""

    stack: Any
    change: LayerChange | None

    def __getitem__(self, expert: int) -> Tensor:
        weight: Tensor = self.stack[expert].float()
        if self.change is None or expert not in self.change.experts:
            return weight
        weight = weight.clone()
        for piece in self.change.experts[expert]:
            rows = slice(piece.start, piece.start + piece.up.shape[1])
            weight[rows] += (piece.up.T @ piece.down).to(weight.device)
        for start, magnitude in self.change.magnitudes.get(expert, ()):
            rows = slice(start, start + len(magnitude))
            lengths = weight[rows].norm(dim=1)
            weight[rows] *= (magnitude.to(weight.device) / lengths)[:, None]
        return weight
