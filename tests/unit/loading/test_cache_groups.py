"""Layers with other specs that keep what they keep by another layer's block table."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve

from modulm.contracts.attention import AttentionSpec
from modulm.contracts.executor import Plan
from modulm.contracts.model import CacheSpec, StateSpec
from modulm.engine.kv_cache.sizing import allocate
from modulm.engine.worker.input_batch import BatchBuilder, GroupPlanner
from modulm.errors import UnsupportedError
from modulm.loading.cache_groups import group_caches
from modulm.ops import bind
from modulm.plugins import manager
from modulm.testing.paged_attention import ReferenceAttention, paged_attention

SPEC = AttentionSpec(4, 2, 16, 0.25, "float32", "float32")
INDEX = AttentionSpec(2, 1, 8, 0.5, "float32", "float32")
STATE = StateSpec((("s", (4,), "float32"),))


@pytest.fixture(scope="module")
def cpu():
    return manager.current().load("platforms", "cpu")()


def grouped(cpu, *caches, sizes=(16, 16)):
    specs = {c.spec: None for c in caches if isinstance(c.spec, AttentionSpec)}
    backends = {
        spec: ReferenceAttention(spec, cpu, bind(), size)
        for spec, size in zip(specs, sizes, strict=False)
    }
    return group_caches(caches, backends, 64)


def test_a_follower_is_in_the_group_with_a_cache_of_its_own(cpu):
    caches = [
        CacheSpec("0.attn", SPEC),
        CacheSpec("0.indexer", INDEX, follows="0.attn"),
        CacheSpec("1.attn", SPEC),
        CacheSpec("1.indexer", INDEX, follows="1.attn"),
        CacheSpec("2.attn", evolve(SPEC, window=32)),
    ]
    whole, windowed = groups = grouped(cpu, *caches, sizes=(16, 16, 16))
    assert (whole.layers, windowed.layers) == ((0, 2), (4,))
    assert [layers for _, layers in whole.followers] == [(1, 3)]
    assert whole.block_bytes == 2 * (16 * 2 * 32 * 4 + 16 * 16 * 4)
    caches_allocated, owners = allocate(caches, groups, (5, 7), cpu)
    assert owners == (0, 2, 0, 2, 1)
    assert [x.shape for x in caches_allocated[:2]] == [(5, 16, 2, 32), (5, 16, 1, 16)]
    assert len({x.data_ptr() for x in caches_allocated}) == 5


def test_a_follower_attends_where_the_leaders_blocks_are(cpu):
    caches = [CacheSpec("attn", SPEC), CacheSpec("indexer", INDEX, follows="attn")]
    groups = grouped(cpu, *caches)
    caches_allocated, owners = allocate(caches, groups, (9,), cpu)
    planners = GroupPlanner.all(groups)
    builder = BatchBuilder(planners, caches_allocated, owners, rows=4, tokens=64, platform=cpu)
    table = np.array([[7, 3], [2, 0]], dtype=np.int32)
    plan = Plan(
        step=0,
        rows=np.array([0, 1], dtype=np.int32),
        starts=np.zeros(2, dtype=np.int32),
        counts=np.array([20, 5], dtype=np.int32),
        tokens=np.arange(25),
        tables=(table,),
        samples=np.ones(2, dtype=bool),
    )
    batch = builder.build(plan, np.array([19, 24]))
    for index, spec in enumerate((SPEC, INDEX)):
        q, k, v = (
            torch.randn(25, heads, spec.head_dim)
            for heads in (spec.heads, spec.kv_heads, spec.kv_heads)
        )
        attended = torch.empty_like(q)
        backend = planners[owners[index]].backend
        backend.forward(q, k, v, batch.caches[index], batch.plan(index), attended)
        cached = batch.caches[index][[7, 3]].flatten(0, 1)[:20]
        assert torch.equal(cached, torch.cat([k, v], -1)[:20])
        expected = torch.zeros(2, 32, *cached.shape[1:])
        expected[0, :20], expected[1, :5] = cached, torch.cat([k, v], -1)[20:]
        starts, lens = torch.tensor([0, 20, 25]), torch.tensor([20, 5])
        rows = torch.tensor([[0], [1]])
        wanted = paged_attention(
            q, expected, rows, starts, lens, spec.scale, torch.empty_like(attended)
        )
        assert torch.allclose(attended, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("caches", "sizes", "message"),
    [
        ([CacheSpec("i", INDEX, follows="a")], (16,), "i: a is not an earlier attention layer"),
        (
            [CacheSpec("a", STATE), CacheSpec("i", INDEX, follows="a")],
            (16,),
            "a is not an earlier attention layer",
        ),
        (
            [CacheSpec("a", evolve(SPEC, window=8)), CacheSpec("i", INDEX, follows="a")],
            (16, 16),
            "i attends beyond the window of a",
        ),
        (
            [CacheSpec("a", SPEC), CacheSpec("i", INDEX, follows="a")],
            (16, 32),
            "16 tokens per block, but its backend reference needs 32",
        ),
    ],
)
def test_what_cannot_follow(cpu, caches, sizes, message):
    with pytest.raises(UnsupportedError, match=message):
        grouped(cpu, *caches, sizes=sizes)
