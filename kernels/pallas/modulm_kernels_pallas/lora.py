"""The op `add_lora` in programs: stacks of fixed shape, from which each token's slot chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import Tensor

from modulm.errors import UnsupportedError
from modulm_adapters import lora_ops
from modulm_kernels_pallas.bridge import array_of, assign, is_array, numpy_of, tensor_of

__all__ = ["AdapterStack", "add_lora", "stack_of", "using_slots"]

_STACK = "jax_stack"
_slots: list[Any] = [None]


class AdapterStack:
    """The adapters of a layer in all slots, on the device.

    down: [slots + 1, rank, inputs], or [slots + 1, entries, rank] for embedding tables. up: [slots
    + 1, rank, outputs]. The rank is that of all pieces of an adapter together. Slot 0 is zero.
    """

    def __init__(self, table: Any, rank: int, outputs: int, embeds: bool, place: Any) -> None:
        self._table, self._embeds, self._place = table, embeds, place
        slots, most = table.addresses.shape[:2]
        total = rank * most
        down = (slots, table.inputs, total) if embeds else (slots, total, table.inputs)
        dtype = numpy_of(table.addresses.new_zeros(1, dtype=table.dtype)).dtype
        self._held: list[tuple[Any, ...]] = [()] * slots
        self.down = tensor_of(place(np.zeros(down, dtype)))
        self.up = tensor_of(place(np.zeros((slots, total, outputs), dtype)))
        setattr(table, _STACK, self)

    def refresh(self) -> None:
        """Send the adapters of slots that have changed."""
        changed = [
            slot
            for slot, pieces in enumerate(self._table.pieces)
            if pieces is not self._held[slot] and (pieces or self._held[slot])
        ]
        if not changed:
            return
        down, up = np.array(array_of(self.down)), np.array(array_of(self.up))
        for slot in changed:
            down[slot], up[slot] = 0, 0
            first = 0
            for piece in self._table.pieces[slot]:
                end = first + piece.up.shape[0]
                columns = slice(piece.start, piece.start + piece.up.shape[1])
                up[slot, first:end, columns] = numpy_of(piece.up)
                if self._embeds:
                    down[slot, :, first:end] = numpy_of(piece.down)
                else:
                    down[slot, first:end] = numpy_of(piece.down)
                first = end
            self._held[slot] = self._table.pieces[slot]
        assign(self.down, self._place(down))
        assign(self.up, self._place(up))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Tensors that programs take as arguments."""
        return self.down, self.up


def stack_of(table: Any) -> AdapterStack | None:
    """Return the stack of a `LoraTable`, None if it has none yet."""
    return getattr(table, _STACK, None)


@contextmanager
def using_slots(slots: jax.Array | None) -> Iterator[None]:
    """Trace a program in which tokens use these slots: [tokens] int32."""
    _slots.append(slots)
    try:
        yield
    finally:
        _slots.pop()


def add_lora(out: Tensor, x: Tensor, groups: Any, table: Any) -> None:
    """The op `add_lora`: up^T (down x) of each token's slot, in fp32, rounded once.

    Slots are computed one after another, since there are few; tokens of other slots add zero.
    """
    if not is_array(out):
        lora_ops.add_lora(out, x, groups, table)
        return
    stack, slots = stack_of(table), _slots[-1]
    if stack is None or slots is None:
        raise UnsupportedError("device tpu: adapters here are not supported yet")
    inputs, down, up = array_of(x), array_of(stack.down), array_of(stack.up)
    total = array_of(out).astype(jnp.float32)

    def add(slot: Any, sums: jax.Array) -> jax.Array:
        one = down[slot].astype(jnp.float32)
        if jnp.issubdtype(inputs.dtype, jnp.integer):
            narrow = one[inputs]
        else:
            narrow = jnp.dot(inputs.astype(jnp.float32), one.T, precision="highest")
        own = jnp.where((slots == slot)[:, None], narrow, 0.0)
        return sums + jnp.dot(own, up[slot].astype(jnp.float32), precision="highest")

    total = jax.lax.fori_loop(1, down.shape[0], add, total)
    assign(out, total.astype(array_of(out).dtype))
