"""Recurrent scans: states stay in VMEM while the tokens of a step pass.

One program advances the states of a block of heads by one token. The cache is written in place when
a row ends, or where its state is to be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

__all__ = ["Events", "channel_body", "conv_body", "delta_body", "scan", "selective_body"]

#: Heads of a program, if they can be divided.
_HEADS = 8
#: (states, inputs, constants of a block of heads) -> (their new states, outputs).
Body = Callable[[Any, Sequence[Any], Sequence[Any]], tuple[Any, Any]]


class Events(NamedTuple):
    """When states begin and where they are written; [tokens] int32 each.

    owners: row of each token. firsts: 1 for the first token of a row. targets: the slot of the next
    state that is written, that of this token included.
    """

    owners: jax.Array
    firsts: jax.Array
    targets: jax.Array


def scan(
    body: Body,
    initial: jax.Array,
    cache: jax.Array,
    events: Events,
    inputs: Sequence[jax.Array],
    constants: Sequence[jax.Array],
    width: int,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the cache [slots, heads, m, n] with all written states, and [tokens, heads, width].

    initial: [rows, heads, m, n], states before the step. inputs: [tokens, heads, _]. constants:
    [heads, _, _]. Sums are in fp32; states are rounded to the cache's dtype after each token.
    """
    heads, tokens = cache.shape[1], len(events.owners)
    block = _HEADS if heads % _HEADS == 0 else heads
    state = (1, block, *cache.shape[2:])
    specs = [pl.BlockSpec(state, lambda h, t, owners, *_: (owners[t], h, 0, 0))]
    specs += [pl.BlockSpec((1, block, x.shape[2]), lambda h, t, *_: (t, h, 0)) for x in inputs]
    specs += [pl.BlockSpec((block, *x.shape[1:]), lambda h, t, *_: (h, 0, 0)) for x in constants]
    specs.append(pl.BlockSpec(memory_space=pl.ANY))
    operands = [*events, initial, *inputs, *constants, cache]
    written, outputs = pl.pallas_call(
        partial(_advance, body=body, count=len(inputs)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(events),
            grid=(heads // block, tokens),
            in_specs=specs,
            out_specs=[
                pl.BlockSpec(state, lambda h, t, owners, firsts, targets: (targets[t], h, 0, 0)),
                pl.BlockSpec((1, block, width), lambda h, t, *_: (t, h, 0)),
            ],
            scratch_shapes=[pltpu.VMEM(state[1:], jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(cache.shape, cache.dtype),
            jax.ShapeDtypeStruct((tokens, heads, width), jnp.float32),
        ],
        input_output_aliases={len(operands) - 1: 0},
        interpret=interpret,
    )(*operands)
    return written, outputs


def _advance(
    owners: Any, firsts: Any, targets: Any, initial: Any, *refs: Any, body: Body, count: int
) -> None:
    *blocks, _, written, out, state = refs
    token = pl.program_id(1)

    @pl.when(firsts[token] == 1)
    def _() -> None:
        state[...] = initial[0].astype(jnp.float32)

    inputs = [block[0] for block in blocks[:count]]
    after, output = body(state[...], inputs, [block[...] for block in blocks[count:]])
    rounded = after.astype(written.dtype)
    written[0] = rounded
    state[...] = rounded.astype(jnp.float32)
    out[0] = output


def conv_body(states: Any, inputs: Sequence[Any], constants: Sequence[Any]) -> tuple[Any, Any]:
    """states: [1, taps - 1, channels]; inputs: x [1, channels]; constants: [1, taps, channels]."""
    window = jnp.concatenate([states[0], inputs[0]], axis=0)
    return window[None, 1:], (window * constants[0][0]).sum(0, keepdims=True)


def selective_body(states: Any, inputs: Sequence[Any], _: Sequence[Any]) -> tuple[Any, Any]:
    """states: [heads, channels, size]; inputs: dt x [heads, channels], decay [heads, 1], b and c
    [heads, size].
    """
    drive, decay, b, c = inputs
    after, outputs = [], []
    for head in range(len(states)):
        own = slice(head, head + 1)
        state = states[head] * decay[own] + _product(drive[own], b[own], 0, 0)
        after.append(state[None])
        outputs.append(_product(c[own], state, 1, 1))
    return jnp.concatenate(after), jnp.concatenate(outputs)


def channel_body(states: Any, inputs: Sequence[Any], constants: Sequence[Any]) -> tuple[Any, Any]:
    """Mamba 1, whose channels have decays for each number: "heads" are groups of channels.

    states: [groups, channels, size]; inputs: dt x and dt [groups, channels], b and c [groups,
    size]; constants: A [groups, channels, size].
    """
    drive, rate, b, c = inputs
    after, outputs = [], []
    for group in range(len(states)):
        own = slice(group, group + 1)
        # A product with ones moves channels from lanes to sublanes.
        decay = jnp.exp(_product(rate[own], jnp.ones_like(b[own]), 0, 0) * constants[0][group])
        state = states[group] * decay + _product(drive[own], b[own], 0, 0)
        after.append(state[None])
        outputs.append(_product(c[own], state, 1, 1))
    return jnp.concatenate(after), jnp.concatenate(outputs)


def delta_body(states: Any, inputs: Sequence[Any], _: Sequence[Any]) -> tuple[Any, Any]:
    """states: [heads, keys, values]; inputs: q and k [heads, keys], v [heads, values], and the
    share and decay [heads, 2].
    """
    q, k, v, factors = inputs
    after, outputs = [], []
    for head in range(len(states)):
        own = slice(head, head + 1)
        state = states[head] * factors[own, 1:]
        change = (v[own] - _product(k[own], state, 1, 0)) * factors[own, :1]
        state = state + _product(k[own], change, 0, 0)
        after.append(state[None])
        outputs.append(_product(q[own], state, 1, 0))
    return jnp.concatenate(after), jnp.concatenate(outputs)


def _product(x: Any, y: Any, left: int, right: int) -> Any:
    """Sum over dimension `left` of x and `right` of y, in fp32."""
    return jax.lax.dot_general(
        x, y, (((left,), (right,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
    )  # fmt: skip
