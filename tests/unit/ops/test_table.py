"""The op table: best provider first, twins for the rest, refusals kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from modulm.contracts.kernels import KernelProvider
from modulm.contracts.platform import Probe
from modulm.ops import bind, twins


class Marked(KernelProvider):
    """Marks what it computed by returning its own name."""

    api = 1

    def __init__(self, name, ops, refused=None):
        self.name, self._ops, self._refused = name, ops, refused or {}

    @classmethod
    def probe(cls, platform):
        return Probe(1, "always")

    def ops(self):
        return {op: (lambda *_: self.name) for op in self._ops}

    def rejects(self, op, **facts):
        return self._refused.get(op) if facts.get("dtype") == "float16" else None


def test_without_providers_every_op_is_its_twin():
    ops = bind()
    assert ops.rms_norm is twins.rms_norm
    assert set(ops.providers.values()) == {"torch"}
    assert set(twins.__all__) <= set(ops.providers)


def test_the_first_provider_wins_and_the_twin_fills_the_gaps():
    ops = bind([Marked("fast", ["rotary"]), Marked("slow", ["rotary", "rms_norm"])])
    assert (ops.rotary(), ops.rms_norm(), ops.providers["layer_norm"]) == ("fast", "slow", "torch")


def test_a_refusal_moves_the_op_to_the_next_one_and_is_recorded():
    fast = Marked("fast", ["rotary"], {"rotary": "no fp16 here"})
    assert bind([fast], dtype="bfloat16").rotary() == "fast"
    ops = bind([fast, Marked("slow", ["rotary"])], dtype="float16")
    assert ops.rotary() == "slow"
    assert ops.refusals == {"rotary": "fast: no fp16 here"}


def test_an_op_that_only_a_provider_has_is_bound():
    assert bind([Marked("fast", ["whole_layer"])]).whole_layer() == "fast"


def test_an_unknown_op_names_the_ones_there_are():
    with pytest.raises(AttributeError, match=r"no op is called 'rmsnorm'.*rms_norm"):
        _ = bind().rmsnorm


@pytest.mark.parametrize("neox", [True, False])
def test_rotary_turns_pairs_by_the_angle_of_the_position(neox):
    q = torch.randn(3, 2, 6)
    k = torch.randn(3, 1, 6)
    angles = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8]])
    table = torch.cat([angles.cos(), angles.sin()], -1)
    before = q.clone()
    twins.rotary(q, k, torch.tensor([2, 0, 3]), table, neox)
    first, second = ((0, 2), (1, 3)) if neox else ((0, 1), (2, 3))
    for pair, angle in zip((first, second), (0.7, 0.8), strict=True):
        x, y = before[2, 1, pair[0]], before[2, 1, pair[1]]
        turn = torch.tensor(angle)
        torch.testing.assert_close(q[2, 1, pair[0]], x * turn.cos() - y * turn.sin())
        torch.testing.assert_close(q[2, 1, pair[1]], y * turn.cos() + x * turn.sin())
    assert torch.equal(q[..., 4:], before[..., 4:])


def test_experts_equal_a_feed_forward_block_per_token_and_choice():
    x, weights = torch.randn(7, 4), torch.rand(7, 2)
    ids = torch.tensor([[0, 2], [2, 3], [3, 0], [2, 0], [0, 3], [3, 2], [2, 3]])
    gate_up, down = torch.randn(4, 6, 4), torch.randn(4, 4, 3)
    biases = torch.randn(4, 6), torch.randn(4, 4)
    expected = torch.zeros(7, 4)
    for row, chosen in enumerate(ids.tolist()):
        for choice, e in enumerate(chosen):
            gate, up = (gate_up[e] @ x[row] + biases[0][e]).chunk(2)
            gate, up = gate.clamp(max=0.7), up.clamp(-0.7, 0.7)
            inner = (up + 1) * gate / (1 + torch.exp(-1.5 * gate))
            expected[row] += weights[row, choice] * (down[e] @ inner + biases[1][e])
    got = twins.fused_experts(
        x, weights, ids, gate_up, down, act="clamped_swiglu", alpha=1.5, limit=0.7,
        gate_up_bias=biases[0], down_bias=biases[1],
    )  # fmt: skip
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        twins.fused_experts(x[:1], weights[:1], ids[:1], gate_up, down, act="gelu_tanh"),
        sum(
            weights[0, i] * F.gelu(g, approximate="tanh").mul(u) @ down[e].T
            for i, e in enumerate(ids[0].tolist())
            for g, u in [(gate_up[e] @ x[0]).chunk(2)]
        )[None],
    )


def test_group_limited_routing_stays_in_the_best_groups():
    logits = torch.tensor([[9.0, -9.0, 5.0, 5.0, 1.0, 1.0]])
    weights, ids = twins.moe_route(
        logits, 2, scoring="sigmoid", groups=3, top_groups=1, group_score="top2", scale=2.0
    )
    assert sorted(ids[0].tolist()) == [2, 3]
    torch.testing.assert_close(weights.sum(), torch.tensor(2.0))


def test_ops_that_share_a_format_come_from_one_provider():
    halfway = Marked("halfway", ["linear", "pack_linear"])
    whole = Marked("whole", ["linear", "pack_linear", "unpack_linear"])
    assert bind([halfway]).linear is twins.linear
    assert bind([halfway]).refusals["linear"] == "halfway: has no unpack_linear beside it"
    ops = bind([halfway, whole])
    assert (ops.linear(), ops.pack_linear()) == ("whole", "whole")
    picky = Marked("picky", ["linear", "pack_linear", "unpack_linear"], {"linear": "no fp16"})
    assert bind([picky], dtype="float16").pack_linear is twins.pack_linear
