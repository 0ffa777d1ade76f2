"""Recurrent layers: states advance token by token, or all rows at once.

Steps of one token per row are single operations over all rows. Other steps pass over their tokens
on the device, so their shapes do not depend on the lengths of rows: with the kernel `scan` on one
TPU, elsewhere in a loop of XLA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.recording import Recordable
from modulm.contracts.state import StatePlan
from modulm_kernels_pallas.bridge import array_of, assign, tensor_of
from modulm_kernels_pallas.scan import (
    Body,
    Events,
    channel_body,
    conv_body,
    delta_body,
    scan,
    selective_body,
)
from modulm_kernels_pallas.spread import kernel_use

__all__ = ["ScanPlan", "causal_conv", "delta_rule", "selective_scan"]

#: Channels of Mamba 1 that are one of a scan's heads, if they can be divided.
_CHANNELS = 128
#: A slot that no cache has; what is written there is dropped.
_NOWHERE = np.iinfo(np.int32).max


@frozen(eq=False)
class ScanPlan(Recordable):
    """A `StatePlan` whose shapes depend only on the rows and tokens of a step.

    sources, slots: [rows] int32, where states are read and written. fresh: [rows] bool. owners:
    [tokens] int32, row of each token. firsts: [tokens] bool, first tokens of rows. ends, saves:
    [tokens] int32, slots for the state after a token: after the last ones of rows, and those of
    `StatePlan.saves`.
    """

    sources: Tensor
    slots: Tensor
    fresh: Tensor
    owners: Tensor
    firsts: Tensor
    ends: Tensor
    saves: Tensor

    @classmethod
    def of(cls, plan: StatePlan) -> ScanPlan:
        """Convert a plan. Its tensors are on the host."""
        counts = np.array(plan.counts, np.int32)
        rows, tokens = len(counts), int(counts.sum())
        starts = np.cumsum(counts) - counts
        slots = plan.slots.numpy().astype(np.int32)
        sources = slots if plan.sources is None else plan.sources.numpy().astype(np.int32)
        ends, saves = (np.full(tokens, _NOWHERE, np.int32) for _ in range(2))
        ends[starts + counts - 1] = slots
        for row, before, slot in plan.saves:
            saves[starts[row] + before - 1] = slot
        firsts = np.zeros(tokens, bool)
        firsts[starts] = True
        owners = np.repeat(np.arange(rows, dtype=np.int32), counts)
        arrays = sources, slots, plan.fresh.numpy(), owners, firsts, ends, saves
        return cls(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))

    def key(self) -> str:
        return "scan"

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.sources, self.slots, self.fresh, self.owners, self.firsts, self.ends, self.saves,
        )  # fmt: skip

    def over(self, tensors: Sequence[Tensor], tables: Sequence[Tensor] = ()) -> ScanPlan:
        return ScanPlan(*tensors)


#: (states of n rows, inputs of one token of each) -> (their new states, outputs).
_Advance = Callable[[Any, Any], tuple[Any, Any]]


class _Kernel(NamedTuple):
    """How the kernel `scan` computes what an `_Advance` does, with the same result.

    inputs: [tokens, heads, _]. constants: [heads, _, _]. shape: of a state with its heads.
    """

    body: Body
    inputs: tuple[Any, ...]
    constants: tuple[Any, ...]
    shape: tuple[int, int, int]
    width: int


def _scan(
    states: Tensor, plan: ScanPlan, advance: _Advance, inputs: Any, kernel: _Kernel | None
) -> jax.Array:
    """Advance the states of a step's rows over their tokens; returns the outputs [tokens, ...]."""
    sources, slots, fresh, owners, firsts, ends, saves = map(array_of, plan.tensors())
    cache = array_of(states)
    shape = (-1, *[1] * (cache.ndim - 1))
    initial = jnp.where(fresh.reshape(shape), jnp.zeros((), cache.dtype), cache[sources])
    if len(owners) == len(slots):
        state, outputs = advance(initial, inputs)
        assign(states, cache.at[slots].set(state.astype(cache.dtype)))
        return jnp.asarray(outputs)
    how = kernel_use()
    if kernel is not None and how is not None:
        written, outputs = _in_kernel(cache, initial, plan, kernel, interpret=how == "interpret")
        assign(states, written)
        return outputs

    def token(carry: Any, now: Any) -> Any:
        state, cache = carry
        own, owner, first, end, save = now
        state = jnp.where(first, initial[owner], state)
        one = jax.tree.map(lambda part: part[None], own)
        after, output = advance(state[None], one)
        state = after[0].astype(cache.dtype)
        cache = cache.at[save].set(state, mode="drop").at[end].set(state, mode="drop")
        return (state, cache), output[0]

    per_token = inputs, owners, firsts, ends, saves
    (_, cache), outputs = jax.lax.scan(token, (initial[0], cache), per_token)
    assign(states, cache)
    return jnp.asarray(outputs)


def _in_kernel(
    cache: jax.Array, initial: jax.Array, plan: ScanPlan, kernel: _Kernel, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Advance with the kernel; returns the cache and the outputs."""
    _, slots, _, owners, firsts, ends, saves = map(array_of, plan.tensors())
    slot = jnp.where(ends == _NOWHERE, saves, ends)
    places = jnp.where(slot == _NOWHERE, len(slot), jnp.arange(len(slot)))
    targets = slot[jax.lax.cummin(places, reverse=True)]
    events = Events(owners, firsts.astype(jnp.int32), targets)
    written, outputs = scan(
        kernel.body, initial.reshape(-1, *kernel.shape), cache.reshape(-1, *kernel.shape), events,
        kernel.inputs, kernel.constants, kernel.width, interpret=interpret,
    )  # fmt: skip
    # A row's last state may have to be saved, too, in another slot.
    (lasts,) = jnp.nonzero(ends != _NOWHERE, size=len(slots))
    changed = written.reshape(cache.shape)
    return changed.at[saves[lasts]].set(changed[ends[lasts]], mode="drop"), outputs


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, states: Tensor, plan: Any
) -> Tensor:
    """The op `causal_conv`."""
    taps = array_of(weight)[:, 0].astype(jnp.float32).T

    def advance(state: Any, now: Any) -> tuple[Any, Any]:
        window = jnp.concatenate([state, now[:, None].astype(state.dtype)], axis=1)
        return window[:, 1:], (window.astype(jnp.float32) * taps).sum(1)

    inputs = array_of(x)
    held = array_of(states)
    kernel = _Kernel(
        conv_body, (inputs.astype(held.dtype).astype(jnp.float32)[:, None],), (taps[None],),
        (1, *held.shape[1:]), inputs.shape[1],
    )  # fmt: skip
    wide = _scan(states, plan, advance, inputs, kernel).reshape(inputs.shape)
    if bias is not None:
        wide = wide + array_of(bias).astype(jnp.float32)
    result = jax.nn.silu(wide) if silu else wide
    return tensor_of(result.astype(array_of(x).dtype))


def selective_scan(
    x: Tensor,
    step: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    states: Tensor,
    plan: Any,
    bias: Tensor | None = None,
    limit: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """The op `selective_scan`."""
    inputs = array_of(x).astype(jnp.float32)
    dt = jnp.clip(_softplus(step, bias), *limit)
    a = -jnp.exp(array_of(a_log))
    heads = inputs.shape[1]
    b_wide, c_wide = (
        jnp.repeat(part, heads // part.shape[1], axis=1).astype(jnp.float32)
        for part in map(array_of, (b, c))
    )

    def advance(state: Any, now: Any) -> tuple[Any, Any]:
        drive, rate, own_b, own_c = now
        decay = jnp.exp(rate[..., None] * a)[:, :, None]
        state = state * decay + drive[..., None] * own_b[:, :, None]
        return state, (state * own_c[:, :, None]).sum(-1)

    drive, kernel = inputs * dt[..., None], None
    size = inputs.shape[2]
    if size > 1 and a.shape[1] == 1:
        parts = drive, jnp.exp(dt[..., None] * a), b_wide, c_wide
        kernel = _Kernel(selective_body, parts, (), (heads, size, b_wide.shape[2]), size)
    elif size == 1 and b.shape[1] == 1 and a.shape[1] == b_wide.shape[2]:
        kernel = _channel_kernel(drive[..., 0], dt, a, b_wide, c_wide)
    y = _scan(states, plan, advance, (drive, dt, b_wide, c_wide), kernel).reshape(inputs.shape)
    return tensor_of(y + array_of(skip)[:, None] * inputs)


def _channel_kernel(
    drive: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array
) -> _Kernel:
    """Return the kernel of Mamba 1: drive, dt: [tokens, channels]; a: [channels, size]."""
    channels, size = a.shape
    each = _CHANNELS if channels % _CHANNELS == 0 else channels
    groups = channels // each
    split = (x.reshape(len(x), groups, each) for x in (drive, dt))
    shared = (x[:, :groups] for x in (b, c))
    rates = a.reshape(groups, each, size)
    return _Kernel(channel_body, (*split, *shared), (rates,), (groups, each, size), each)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    step: Tensor,
    a_log: Tensor,
    bias: Tensor,
    states: Tensor,
    plan: Any,
    reach: float = 1.0,
) -> Tensor:
    """The op `delta_rule`."""
    values = array_of(v).astype(jnp.float32)
    queries, keys = (
        jnp.repeat(_unit(array_of(part)), values.shape[1] // part.shape[1], axis=1)
        for part in (q, k)
    )
    moved = reach * jax.nn.sigmoid(array_of(beta).astype(jnp.float32))
    fade = -jnp.exp(array_of(a_log)) * _softplus(step, bias)

    def advance(state: Any, now: Any) -> tuple[Any, Any]:
        query, key, value, share, decay = now
        state = state * jnp.exp(decay)[..., None, None]
        held = (key[..., None] * state).sum(2)
        change = (value - held) * share[..., None]
        state = state + key[..., None] * change[:, :, None]
        return state, (query[..., None] * state).sum(2)

    scaled = queries * q.shape[-1] ** -0.5
    factors = jnp.stack([moved, jnp.exp(fade)], -1)
    shape = (*keys.shape[1:], values.shape[2])
    kernel = _Kernel(delta_body, (scaled, keys, values, factors), (), shape, values.shape[2])
    return tensor_of(_scan(states, plan, advance, (scaled, keys, values, moved, fade), kernel))


def _softplus(step: Tensor, bias: Tensor | None) -> jax.Array:
    wide = array_of(step).astype(jnp.float32)
    return jax.nn.softplus(wide if bias is None else wide + array_of(bias))


def _unit(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.square(wide).sum(-1, keepdims=True) + 1e-6)
