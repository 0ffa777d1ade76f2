"""Recurrent ops in XLA against their twins, with intermediate states."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.samples import parametrize_sample

from modulm.contracts.state import StatePlan
from modulm_layers import recurrence as twins

jax = pytest.importorskip("jax", reason="JAX is not installed; make setup installs it")

from modulm_kernels_pallas import recurrence, scan  # noqa: E402
from modulm_kernels_pallas.bridge import array_of, tensor_of  # noqa: E402
from modulm_kernels_pallas.spread import interpreted  # noqa: E402

SLOTS = 9


def plan_of(counts: tuple[int, ...], saves: tuple[tuple[int, int, int], ...]) -> StatePlan:
    rows = len(counts)
    return StatePlan(
        slots=torch.arange(1, rows + 1),
        fresh=torch.tensor([row % 2 == 1 for row in range(rows)]),
        query_starts=torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32)),
        counts=counts,
        sources=torch.tensor([4, 5, 6][:rows]),
        saves=saves,
    )


#: States are saved within rows and at the end of one.
PLANS = [
    plan_of((2, 5, 1), ((1, 3, 7), (0, 1, 8))),
    plan_of((1, 1, 1), ()),
    plan_of((3, 4), ((1, 4, 7), (0, 1, 8), (0, 2, 3))),
]


#: Ops; "channel_scan" is `selective_scan` with a decay for each number of a state (Mamba 1).
OPS = ("delta_rule", "selective_scan", "channel_scan", "causal_conv")


def arguments(op: str, tokens: int) -> tuple[list[Any], torch.Tensor, dict[str, Any]]:
    """Tensors before the states, the states, and what follows the plan."""
    torch.manual_seed(1)
    draw = torch.randn
    if op == "causal_conv":
        return [draw(tokens, 6), draw(6, 1, 4), draw(6), True], draw(SLOTS, 3, 6), {}
    if op == "selective_scan":
        tensors = [
            draw(tokens, 4, 3), draw(tokens, 4), draw(4, 1), draw(tokens, 2, 5),
            draw(tokens, 2, 5), draw(4),
        ]  # fmt: skip
        return tensors, draw(SLOTS, 4, 3, 5), {"bias": draw(4), "limit": (0.1, 2.0)}
    if op == "channel_scan":
        tensors = [
            draw(tokens, 6, 1), draw(tokens, 6), draw(6, 5), draw(tokens, 1, 5),
            draw(tokens, 1, 5), draw(6),
        ]  # fmt: skip
        return tensors, draw(SLOTS, 6, 1, 5), {"bias": draw(6)}
    tensors = [
        draw(tokens, 2, 4), draw(tokens, 2, 4), draw(tokens, 4, 3), draw(tokens, 4),
        draw(tokens, 4), draw(4), draw(4),
    ]  # fmt: skip
    return tensors, draw(SLOTS, 4, 4, 3), {"reach": 1.5}


@parametrize_sample(
    "op, plan, kernel",
    [(op, plan, plan is not PLANS[1]) for plan in PLANS for op in OPS]
    + [(op, PLANS[0], False) for op in OPS],
    16,
)
def test_recurrent_ops_equal_their_twins(op: str, plan: StatePlan, kernel: bool) -> None:
    before, states, after = arguments(op, int(plan.query_starts[-1]))
    op = op.replace("channel", "selective")
    scan = recurrence.ScanPlan.of(plan)

    def run(tensors: Any, states: Any, more: Any, planned: Any) -> Any:
        wrapped = jax.tree.map(lambda x: tensor_of(x) if hasattr(x, "shape") else x, tensors)
        held = tensor_of(states)
        options = {name: tensor_of(x) if hasattr(x, "shape") else x for name, x in more.items()}
        own = scan.over([tensor_of(x) for x in planned])
        with interpreted() if kernel else nullcontext():
            result = getattr(recurrence, op)(*wrapped, held, own, **options)
        return array_of(result), array_of(held)

    tensors = [x.numpy() for x in before if isinstance(x, torch.Tensor)]
    constants = [x for x in before if not isinstance(x, torch.Tensor)]
    fixed = {name: x for name, x in after.items() if not isinstance(x, torch.Tensor)}
    moved = {name: x.numpy() for name, x in after.items() if isinstance(x, torch.Tensor)}
    got, changed = jax.jit(lambda t, s, m, p: run([*t, *constants], s, {**m, **fixed}, p))(
        tensors, states.numpy(), moved, [x.numpy() for x in scan.tensors()]
    )
    expected = getattr(twins, op)(*before, states, plan, **after)
    # fp32, in which segments of the twin sum in another order.
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-4)
    np.testing.assert_allclose(changed, states, atol=1e-5, rtol=1e-4)


BODIES = {
    "conv": (scan.conv_body, (1, 3, 2048), [(1, 2048)], [(4, 2048)]),
    "selective": (scan.selective_body, (16, 64, 128), [(16, 64), (16, 1), *[(16, 128)] * 2], []),
    "channel": (
        scan.channel_body,
        (16, 128, 16),
        [*[(16, 128)] * 2, *[(16, 16)] * 2],
        [(16, 128, 16)],
    ),
    "delta": (scan.delta_body, (16, 128, 128), [*[(16, 128)] * 3, (16, 2)], []),
}


@parametrize_sample("name", BODIES, 4)
def test_scans_are_lowered_for_tpus(name: str) -> None:
    body, state, inputs, constants = BODIES[name]

    def shape(*sizes: int, dtype: str = "float32") -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    events = scan.Events(*[shape(40, dtype="int32")] * 3)
    width = inputs[0][1] if name != "delta" else state[2]
    exported = jax.export.export(
        jax.jit(lambda *arrays: scan.scan(body, *arrays, width)), platforms=["tpu"]
    )(
        shape(4, *state), shape(9, *state), events, [shape(40, *x) for x in inputs],
        [shape(*x) if name == "channel" else shape(1, *x) for x in constants],
    )  # fmt: skip
    assert "tpu_custom_call" in str(exported.mlir_module())
