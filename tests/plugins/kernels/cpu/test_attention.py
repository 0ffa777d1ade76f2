"""The paged cache and attention against their twins, each with its own cache layout."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.kernels.cpu.close import assert_close, poisoned

from modulm.ops import twins
from modulm_kernels_cpu import cache_shape

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Case:
    """A step of several sequences with keys and values in both caches."""

    def __init__(self, ops, lengths, fresh, heads=4, kv_heads=2, size=64, block=32, **kinds):
        dtype = kinds.get("dtype", torch.bfloat16)
        kv_dtype = kinds.get("kv_dtype", dtype)
        self.ops, self.size, self.block = ops, size, block
        width = max(-(-length // block) for length in lengths) + 1
        blocks = width * len(lengths) + 1
        self.tables = (torch.randperm(blocks - 1) + 1)[: width * len(lengths)].int()
        self.tables = self.tables.view(len(lengths), width)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.starts = torch.tensor([0, *fresh]).cumsum(0).int()
        shape = cache_shape(blocks, kv_heads, block, size)
        self.mine = torch.full(shape, torch.nan).to(kv_dtype)
        self.theirs = torch.zeros(blocks, block, kv_heads, 2 * size).to(kv_dtype)
        for row, length in enumerate(lengths):
            k, v = (torch.randn(length, kv_heads, size + 8).to(dtype)[..., :size] for _ in "kv")
            slots = self.slots(row, length)
            ops["write_kv"](k, v, self.mine, slots)
            twins.write_kv(k, v, self.theirs, slots)
        self.q = torch.randn(int(self.starts[-1]), heads, size).to(dtype)

    def slots(self, row, length):
        positions = torch.arange(length)
        return (
            self.tables[row][positions // self.block].long() * self.block + positions % self.block
        )

    def run(self, which, **options):
        attention, cache = (
            (self.ops["paged_attention"], self.mine)
            if which == "mine"
            else (twins.paged_attention, self.theirs)
        )
        out = poisoned(*self.q.shape, dtype=self.q.dtype)
        return attention(
            self.q, cache, self.tables, self.starts, self.lengths, self.size**-0.5, out, **options
        )

    def check(self, **options):
        assert_close(self.run("mine", **options), self.run("theirs", **options))


MIXES = {
    "one": ([1], [1]),
    "decode": ([70, 1, 33, 64, 200], [1, 1, 1, 1, 1]),
    "prefill": ([5, 130], [5, 130]),
    "mixed": ([100, 40, 31, 96], [17, 1, 31, 3]),
    "idle row": ([40, 50, 60], [1, 0, 2]),
    "long": ([1500, 1100], [1, 40]),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixes(ops, mix, dtype):
    Case(ops, *MIXES[mix], dtype=dtype).check()


@pytest.mark.parametrize("options", [
    {"window": 1}, {"window": 40}, {"window": 700}, {"softcap": 3.0}, {"causal": False},
    {"causal": False, "window": 20},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_options(ops, options, dtype):
    Case(ops, [100, 40, 31, 900], [17, 1, 31, 3], dtype=dtype).check(**options)


def test_sinks_and_alibi(ops):
    case = Case(ops, [100, 40, 31, 600], [17, 1, 31, 3])
    case.check(sinks=torch.randn(4) * 3)
    case.check(alibi=torch.rand(4), window=50)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block"), [
    (1, 1, 32, 32), (8, 8, 80, 32), (16, 1, 128, 64), (6, 2, 96, 96), (3, 1, 256, 128),
    (60, 1, 64, 32), (2, 2, 16, 32), (2, 1, 7, 32),
])  # fmt: skip
def test_shapes(ops, heads, kv_heads, size, block):
    for dtype in (torch.bfloat16, torch.float32):
        Case(ops, [150, 70], [9, 1], heads, kv_heads, size, block, dtype=dtype).check()


def test_fp8_cache(ops):
    Case(ops, [100, 40, 31, 96], [17, 1, 31, 3], kv_dtype=torch.float8_e4m3fn).check()


def test_a_bf16_cache_under_fp32_queries(ops):
    case = Case(ops, [100, 40], [17, 1], dtype=torch.float32, kv_dtype=torch.bfloat16)
    torch.testing.assert_close(case.run("mine"), case.run("theirs"), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [0, 300])
def test_a_row_is_the_same_in_every_batch(ops, library, window):
    """One token alone, in a chunk or in a whole prefill; on one thread or on many."""
    case = Case(ops, [1400, 700], [1400, 700])
    whole = case.run("mine", window=window)
    for count in (1, 2, 5):
        library.set_threads(count)
        for position in (3, 63, 64, 511, 512, 699):
            for fresh in (1, 2, 20):
                first = max(position + 1 - fresh, 0)
                some = case.q[first : position + 1]
                out = poisoned(*some.shape, dtype=some.dtype)
                ops["paged_attention"](
                    some, case.mine, case.tables[:1],
                    torch.tensor([0, len(some)]).int(), torch.tensor([position + 1]).int(),
                    case.size**-0.5, out, window=window,
                )  # fmt: skip
                assert torch.equal(out, whole[first : position + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("norm", "turned"), [(True, 64), (False, 64), (True, 0), (False, 32)])
def test_qkv_prepare(ops, dtype, neox, norm, turned):
    heads, kv_heads, size, block = 4, 2, 64, 32
    table = torch.randn(100, turned) if turned else None
    kind = dtype if neox else torch.float32
    weights = [torch.randn(size).to(kind) for _ in "qk"] if norm else [None, None]
    for tokens in (0, 1, 40):
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size + 16).to(dtype)[:, :-16]
        slots, positions = torch.randperm(64)[:tokens], torch.randint(100, (tokens,))
        fused = torch.zeros(cache_shape(2, kv_heads, block, size), dtype=dtype)
        apart = fused.clone()
        out = poisoned(tokens, heads, size, dtype=dtype)
        ops["qkv_prepare"](
            qkv, *weights, 1e-6, table, positions, slots, fused, heads, kv_heads, neox, out, 1.0
        )
        twin_cache = torch.zeros(2, block, kv_heads, 2 * size, dtype=dtype)
        wanted = twins.qkv_prepare(
            qkv,
            *weights,
            1e-6,
            table,
            positions,
            slots,
            twin_cache,
            heads,
            kv_heads,
            neox,
            None,
            1.0,
        )
        assert_close(out, wanted)
        held = twin_cache.view(-1, kv_heads, 2 * size)[slots]
        ops["write_kv"](held[..., :size], held[..., size:], apart, slots)
        assert_close(fused, apart)


def test_negative_slots_are_skipped(ops):
    cache = torch.zeros(cache_shape(2, 1, 32, 32), dtype=torch.bfloat16)
    x = torch.ones(2, 1, 32, dtype=torch.bfloat16)
    ops["write_kv"](x, x, cache, torch.tensor([-1, 3]))
    assert int(cache.count_nonzero()) == 64


def test_refusals(ops):
    q = torch.randn(1, 4, 64).bfloat16()
    cache = torch.zeros(cache_shape(2, 2, 32, 64), dtype=torch.bfloat16)
    one = torch.tensor([1], dtype=torch.int32)
    arguments = [q, cache, one[None], torch.tensor([0, 1]).int(), one, 1.0, torch.empty_like(q)]
    for place, value, message in (
        (0, q[:, :3], "q has 3 heads"),
        (1, cache.int(), "cache must be"),
        (2, one, "block_tables must be"),
        (4, one.long(), "context_lens must be"),
        (6, q[:, :2], "out must be"),
    ):
        broken = [*arguments]
        broken[place] = value
        with pytest.raises(ValueError, match=f"^{message}"):
            ops["paged_attention"](*broken)
    with pytest.raises(ValueError, match="^block_size must be"):
        cache_shape(2, 2, 16, 64)
