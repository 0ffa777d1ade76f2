"""How a file's tensors become a model's: new names, and changes of the converter to undo."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch import Tensor

from modulm_quant_gguf.container import Model, TensorInfo
from modulm_quant_gguf.types import NAMED, Kind, dequantize

__all__ = ["STORED", "Entry", "joined", "linear", "plain", "rows", "unpermuted"]

#: Name of the weights that the method stores, in blocks or plain numbers. It is not "weight",
#: because models apply their own layout changes to "weight", and those are undone already.
STORED = "ggml"

Change = Callable[[Sequence[Tensor]], Tensor]


@frozen(eq=False)
class Entry:
    """A tensor of the model, computed by `change` from the file's tensors `infos`.

    kind: the block type if blocks stay as they are, else a type of plain numbers.
    """

    name: str
    infos: tuple[TensorInfo, ...]
    kind: Kind
    change: Change
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes that are read for it."""
        return sum(info.bytes for info in self.infos)

    def read(self, model: Model) -> Tensor:
        """Return the tensor, of `shape` and `dtype`."""
        return self.change([model.read(info.name) for info in self.infos])


def _only(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


def linear(path: str, info: TensorInfo, change: Change = _only) -> Entry:
    """Return the entry for a linear layer's weight: rows as stored, optionally reordered."""
    blank = torch.empty(info.stored, dtype=info.dtype, device="meta")
    shape = tuple(change([blank]).shape)
    return Entry(f"{path}.{STORED}", (info,), info.kind, change, shape, info.dtype)


def joined(path: str, infos: Sequence[TensorInfo], shape: tuple[int, ...], change: Change) -> Entry:
    """Return the entry for a linear layer's weight in plain numbers, computed in fp32."""

    def compute(tensors: Sequence[Tensor]) -> Tensor:
        return change([dequantize(p.kind, t) for p, t in zip(infos, tensors, strict=True)])

    name = f"{path}.{STORED}"
    return Entry(name, tuple(infos), NAMED["F32"], compute, shape, torch.float32)


def plain(name: str, infos: Sequence[TensorInfo], change: Change = _only) -> Entry:
    """Return the entry for a tensor that is not a linear weight, computed in fp32."""

    def compute(tensors: Sequence[Tensor]) -> Tensor:
        return change([dequantize(p.kind, t) for p, t in zip(infos, tensors, strict=True)])

    blanks = [torch.empty(info.shape, device="meta") for info in infos]
    shape = tuple(change(blanks).shape)
    return Entry(name, tuple(infos), NAMED["F32"], compute, shape, torch.float32)


def rows(first: int, last: int) -> Change:
    """Return a change that selects some rows."""
    return lambda tensors: tensors[0][first:last]


def unpermuted(heads: int) -> Change:
    """Return a change that undoes the converter's reordering of rows for rotary embeddings.

    The converter puts numbers that rotate together side by side; models have them half a head
    apart.
    """

    def change(tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        pairs = torch.unflatten(tensor, 0, (heads, -1, 2))
        return pairs.transpose(1, 2).reshape(tensor.shape)

    return change
