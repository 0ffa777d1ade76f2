"""What the builder records of weights: names of parts, and each rank's share of them."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from modulm.errors import UnsupportedError
from modulm.nn import Builder, Shared
from modulm.ops import bind
from modulm.parallel import Mesh, ProcessGroup
from modulm.plugins import manager
from modulm_layers import Rope
from modulm_quant_none.method import Plain, PlainConfig


def builder(rank=0, ranks=1):
    platform = manager.current().load("platforms", "cpu")()
    ops = bind()
    method = Plain(PlainConfig(), platform, ops)
    shared = Shared(
        dtype=torch.float32,
        device=torch.device("cpu"),
        ops=ops,
        mesh=Mesh(ProcessGroup(rank, ranks)),
        max_length=16,
        choose_method=lambda spec: method,
        choose_backend=lambda spec: None,
        kv_dtype="float32",
    )
    return Builder(shared)


def filled(build, stored, whole=False):
    """The parameters of the builder's last layer, filled from tensors by name."""
    unit = build.shared.units[-1]
    for slot in unit.slots:
        for part in slot.ways[int(whole)]:
            assert tuple(stored[part.name].shape) == part.shape
            slot.fill(part, stored[part.name], torch.device("cpu"))
    return dict(unit.module.named_parameters())


def checkpoint():
    torch.manual_seed(0)
    parts = {"q": torch.randn(8, 6), "k": torch.randn(4, 6), "v": torch.randn(4, 6)}
    stored = {f"layer.{name}.weight": t for name, t in parts.items()}
    stored |= {f"layer.{name}.bias": torch.randn(len(t)) for name, t in parts.items()}
    for kind in ("weight", "bias"):
        stored[f"layer.qkv.{kind}"] = torch.cat([stored[f"layer.{n}.{kind}"] for n in parts])
    return stored


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fused_layer_takes_its_parts_or_the_whole_cut_by_heads(ranks, whole):
    stored = checkpoint()
    for rank in range(ranks):
        build = builder(rank, ranks)
        build.at("layer").linear("qkv", 6, {"q": 8, "k": 4, "v": 4}, bias=True)
        tensors = filled(build, stored, whole)
        for kind in ("weight", "bias"):
            shares = [stored[f"layer.{n}.{kind}"].chunk(ranks)[rank] for n in ("q", "k", "v")]
            assert torch.equal(tensors[kind], torch.cat(shares))


def test_a_row_layer_takes_a_share_of_the_inputs_and_the_whole_bias():
    stored = {"o.weight": torch.randn(5, 8), "o.bias": torch.randn(5)}
    for rank in range(2):
        build = builder(rank, 2)
        layer = build.row_linear("o", 8, 5, bias=True)
        tensors = filled(build, stored)
        assert torch.equal(tensors["weight"], stored["o.weight"].chunk(2, dim=1)[rank])
        assert torch.equal(tensors["bias"], stored["o.bias"])
        assert layer.reduce is build.shared.mesh.tensor


def test_experts_stack_what_is_stored_one_by_one():
    stored = {
        f"moe.experts.{e}.{part}.weight": torch.randn(3, 4)
        for e in range(2)
        for part in ("w1", "w3")
    }
    build = builder()
    build.at("moe").experts("stack", 2, 4, {"w1": 3, "w3": 3}, "experts.{expert}.{part}")
    tensors = filled(build, stored)["weight"]
    for e in range(2):
        pair = [stored[f"moe.experts.{e}.{part}.weight"] for part in ("w1", "w3")]
        assert torch.equal(tensors[e], torch.cat(pair))


def test_what_cannot_be_cut_evenly_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"layer\.up: 7 cannot be split across 2 ranks"):
        builder(0, 2).at("layer").linear("up", 6, 7)


def test_a_table_of_angles_is_made_once_per_kind():
    build = builder()
    table = build.rope(Rope(8))
    assert build.at("elsewhere").rope(Rope(8)) is table
    assert build.rope(evolve(Rope(8), theta=5.0)) is not table
