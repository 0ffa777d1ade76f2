"""The paged cache and attention against the reference, each with its own cache layout."""

from __future__ import annotations

import pytest
import torch
from samples import parametrize_sample
from tests.plugins.kernels.cpu.close import assert_close, poisoned

from modulm.testing.paged_attention import paged_attention, qkv_prepare, write_kv
from modulm_kernels_cpu import cache_shape

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Formats of a cache that are smaller than the keys and values.
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def rounded_to(x, dtype):
    """x: [tokens, heads, size] as a cache of `dtype` gives it back."""
    if dtype == torch.int8:
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        return (torch.round(x.float() / scale) * scale).to(x.dtype)
    return x.to(dtype).to(x.dtype)


class Case:
    """A step of several sequences with keys and values in both caches.

    `latent` is the rank of a cache whose values are the beginning of its keys.
    """

    def __init__(
        self, ops, lengths, fresh, heads=4, kv_heads=2, size=64, block=32, *,
        dtype=torch.bfloat16, kv_dtype=None, value_size=None, latent=0,
    ):  # fmt: skip
        self.ops, self.size, self.block = ops, size, block
        self.value_size = latent or value_size or size
        self.narrow = kv_dtype in NARROW
        kv_dtype = kv_dtype or dtype
        width = max(-(-length // block) for length in lengths) + 1
        blocks = width * len(lengths) + 1
        self.tables = (torch.randperm(blocks - 1) + 1)[: width * len(lengths)].int()
        self.tables = self.tables.view(len(lengths), width)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.starts = torch.tensor([0, *fresh]).cumsum(0).int()
        shape = cache_shape(blocks, kv_heads, block, size, 0 if latent else value_size, kv_dtype)
        poison = torch.full((*shape[:-1], shape[-1] * kv_dtype.itemsize), 255, dtype=torch.uint8)
        self.mine = poison.view(kv_dtype)
        stored = size if latent else size + self.value_size
        self.theirs = torch.zeros(blocks, block, kv_heads, stored).to(dtype)
        for row, length in enumerate(lengths):
            k = torch.randn(length, kv_heads, size + 8).to(dtype)[..., :size]
            v = torch.randn(length, kv_heads, self.value_size + 8).to(dtype)[..., :-8]
            slots = self.slots(row, length)
            ops["write_kv"](k, v, self.mine, slots)
            pair = (rounded_to(k, kv_dtype), rounded_to(v, kv_dtype)) if self.narrow else (k, v)
            write_kv(*pair, self.theirs, slots)
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
            else (paged_attention, self.theirs)
        )
        out = poisoned(*self.q.shape[:2], self.value_size, dtype=self.q.dtype)
        return attention(
            self.q, cache, self.tables, self.starts, self.lengths, self.size**-0.5, out, **options
        )

    def check(self, **options):
        mine, theirs = self.run("mine", **options), self.run("theirs", **options)
        if self.narrow:  # queries and weights are rounded to bf16
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
        else:
            assert_close(mine, theirs)


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


#: Caches beside the plain one, and the heads and sizes they are tried with.
KINDS = {
    "bf16": {},
    "fp32": {"dtype": torch.float32},
    "e4m3": {"kv_dtype": torch.float8_e4m3fn},
    "e5m2": {"kv_dtype": torch.float8_e5m2, "dtype": torch.float16},
    "int8": {"kv_dtype": torch.int8},
    "int8 of fp32": {"kv_dtype": torch.int8, "dtype": torch.float32},
    "latent": {"kv_heads": 1, "heads": 5, "size": 96, "latent": 64},
    "latent fp32": {"kv_heads": 1, "size": 80, "latent": 48, "dtype": torch.float32},
    "latent fp16": {"kv_heads": 1, "size": 40, "latent": 32, "dtype": torch.float16},
    "latent e4m3": {"kv_heads": 1, "size": 96, "latent": 64, "kv_dtype": torch.float8_e4m3fn},
    "short values": {"size": 96, "value_size": 40},
}


@parametrize_sample("options", [
    {"window": 1}, {"window": 40}, {"window": 700}, {"softcap": 3.0}, {"causal": False},
    {"causal": False, "window": 20}, {"sinks": True}, {"alibi": True},
    {"alibi": True, "sinks": True, "softcap": 5.0, "window": 50},
], every=2, ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_options(ops, options, kind):
    case = Case(ops, [100, 40, 31, 600], [17, 1, 31, 3], **KINDS[kind])
    heads = case.q.shape[1]
    options_of_layer = {"sinks": torch.randn(heads) * 3, "alibi": torch.rand(heads)}
    case.check(**{k: options_of_layer.get(k, v) for k, v in options.items()})


@parametrize_sample("kind", KINDS, every=2)
def test_long_prompts_and_long_contexts(ops, kind):
    Case(ops, [700, 1300, 5], [300, 2, 5], **KINDS[kind]).check()


def test_a_negative_scale(ops):
    case = Case(ops, [100, 40], [17, 1])
    out = poisoned(*case.q.shape, dtype=case.q.dtype)
    rest = (case.tables, case.starts, case.lengths, -0.2)
    wanted = paged_attention(case.q, case.theirs, *rest, torch.empty_like(out))
    assert_close(ops["paged_attention"](case.q, case.mine, *rest, out), wanted)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block"), [
    (1, 1, 32, 32), (8, 8, 80, 32), (16, 1, 128, 64), (6, 2, 96, 96), (3, 1, 256, 128),
    (60, 1, 64, 32), (2, 2, 16, 32), (2, 1, 7, 32),
])  # fmt: skip
def test_shapes(ops, heads, kv_heads, size, block):
    for dtype in (torch.bfloat16, torch.float32):
        Case(ops, [150, 70], [9, 1], heads, kv_heads, size, block, dtype=dtype).check()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_codes_round_to_nearest(ops, dtype):
    """A lone token comes back as what its cache keeps of it, beyond the largest as the largest."""
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    v = torch.randn(6, 1, 64) * torch.tensor([1e-3, 0.02, 1, 30, 300, 1e3])[:, None, None]
    v[5, 0, :2] = torch.tensor([1e9, -1e9])
    k, slots = torch.zeros(6, 1, 64), torch.arange(0, 192, 32)
    cache = torch.zeros(cache_shape(6, 1, 32, 64, dtype=dtype), dtype=dtype)
    ops["write_kv"](k, v, cache, slots)
    tables, ones = torch.arange(6, dtype=torch.int32)[:, None], torch.ones(6, dtype=torch.int32)
    out = poisoned(6, 1, 64, dtype=torch.float32)
    starts = torch.arange(7, dtype=torch.int32)
    ops["paged_attention"](torch.ones(6, 1, 64), cache, tables, starts, ones, 1.0, out)
    wanted = rounded_to(v if dtype == torch.int8 else v.clamp(-limit, limit), dtype)
    # In int8 a tie may fall either way, and weights of 1 times a scale are rounded to bf16.
    step = v.abs().amax(-1, keepdim=True) / 127 if dtype == torch.int8 else torch.zeros(1)
    assert ((out - wanted).abs() <= wanted.abs() * 2**-8 + step * 0.01).float().mean() > 0.99
    assert ((out - wanted).abs() <= wanted.abs() * 2**-8 + step * 1.01).all()


def test_a_bf16_cache_under_fp32_queries(ops):
    case = Case(ops, [100, 40], [17, 1], dtype=torch.float32, kv_dtype=torch.bfloat16)
    torch.testing.assert_close(case.run("mine"), case.run("theirs"), rtol=2e-2, atol=2e-2)


@parametrize_sample("kind", ["bf16", "fp32", "int8", "e4m3", "latent"], every=5)
@pytest.mark.parametrize("window", [0, 300])
def test_a_row_is_the_same_in_every_batch(ops, library, window, kind):
    """One token alone, in a chunk or in a whole prefill; on one thread or on many."""
    case = Case(ops, [1400, 700], [1400, 700], **KINDS[kind])
    whole = case.run("mine", window=window)
    for count in (1, 2, 5):
        library.set_threads(count)
        for position in (3, 63, 64, 511, 512, 699, 1300):
            for fresh in (1, 2, 20, 200):
                first = max(position + 1 - fresh, 0)
                some = case.q[first : position + 1]
                out = poisoned(*some.shape[:2], case.value_size, dtype=some.dtype)
                ops["paged_attention"](
                    some, case.mine, case.tables[:1],
                    torch.tensor([0, len(some)]).int(), torch.tensor([position + 1]).int(),
                    case.size**-0.5, out, window=window,
                )  # fmt: skip
                assert torch.equal(out, whole[first : position + 1])


@parametrize_sample("kind", ["bf16", "e4m3", "int8", "fp32"], every=4)
def test_scores_far_above_the_first(ops, kind):
    """Weights that become too large are computed again, in a prompt as for a few tokens."""
    case = Case(ops, [600], [600], heads=4, kv_heads=2, **KINDS[kind])
    case.q *= torch.linspace(1, 40, 600)[:, None, None].to(case.q.dtype)
    whole = case.run("mine")
    if kind == "fp32":
        case.check()
    for first, count in ((140, 8), (391, 1), (596, 1), (590, 10)):
        some, length = case.q[first : first + count], torch.tensor([first + count]).int()
        out = poisoned(*some.shape[:2], case.value_size, dtype=some.dtype)
        ops["paged_attention"](
            some, case.mine, case.tables, torch.tensor([0, count]).int(), length,
            case.size**-0.5, out,
        )  # fmt: skip
        assert torch.equal(out, whole[first : first + count])


@pytest.mark.parametrize("rows", [1, 40])
def test_equal_scores_that_are_large(ops, rows):
    """A weight above 1 by rounding would not fit its code in an int8 cache."""
    tokens, size = 64, 32
    cache = torch.zeros(cache_shape(2, 1, 32, size, dtype=torch.int8), dtype=torch.int8)
    k, v = torch.randn(1, 1, size).expand(tokens, 1, size), torch.randn(tokens, 1, size)
    ops["write_kv"](k, v, cache, torch.arange(tokens))
    q, out = torch.randn(rows, 1, size) * 1e4, poisoned(rows, 1, size, dtype=torch.float32)
    starts, tables = torch.tensor([0, rows]).int(), torch.arange(2).int()[None]
    lengths = torch.tensor([tokens]).int()
    ops["paged_attention"](q, cache, tables, starts, lengths, 1.0, out, causal=False)
    mean = v.mean(0).expand(rows, 1, size)
    torch.testing.assert_close(out, mean, rtol=0, atol=0.01)


@pytest.mark.parametrize("fresh", [3, 97, 128, 200, 361])
@pytest.mark.parametrize("kind", ["bf16", "e4m3", "int8"])
def test_rows_that_end_inside_a_chunk(ops, fresh, kind):
    """Chunks that only some rows see whole, of every number of rows beside whole tiles."""
    case = Case(ops, [fresh + 40], [fresh], heads=3, kv_heads=1, **KINDS[kind])
    case.check()
    whole, last = case.run("mine"), case.q[-1:].clone()
    out = poisoned(*last.shape, dtype=last.dtype)
    ops["paged_attention"](
        last, case.mine, case.tables, torch.tensor([0, 1]).int(), case.lengths, case.size**-0.5, out
    )
    assert torch.equal(out[0], whole[-1])


@pytest.mark.parametrize("kind", ["bf16", "e4m3", "int8", "fp32"])
@pytest.mark.parametrize(("lengths", "fresh"), [([1500, 700], [1, 3]), ([2600], [2])])
def test_heads_that_one_thread_reads_together(ops, library, lengths, fresh, kind):
    """Few rows read neighbouring heads of a block in turn, fewer of them on more threads."""
    case = Case(ops, lengths, fresh, heads=16, kv_heads=8, **KINDS[kind])
    case.check(window=1200)
    found = []
    for count in (1, 2, 5):
        library.set_threads(count)
        found.append(case.run("mine", window=1200))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_plan_serves_all_layers_and_thread_counts(ops, library):
    """Made for many threads it cuts the step finer; the result is that without a plan."""
    case = Case(ops, [900, 300, 64], [400, 1, 64])
    expected = case.run("mine")
    for count in (1, 7):
        library.set_threads(count)
        plan = ops["plan_attention"](case.starts, case.lengths, 4, 2)
        for threads in (1, 7):
            library.set_threads(threads)
            assert torch.equal(case.run("mine", plan=plan), expected)


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
        wanted = qkv_prepare(
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
            1.0,
        )
        assert_close(out, wanted)
        cached = twin_cache.view(-1, kv_heads, 2 * size)[slots]
        ops["write_kv"](cached[..., :size], cached[..., size:], apart, slots)
        assert_close(fused, apart)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(
    ("norm", "table"), [(True, "fp32"), (True, "own"), (True, ""), (False, "own")]
)
def test_qkv_prepare_is_its_parts_one_after_the_other(ops, dtype, size, norm, table):
    tokens, heads, kv_heads, block = 70, 9, 2, 32
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size).to(dtype)
    weights = [torch.randn(size).to(dtype) for _ in "qk"] if norm else [None, None]
    cos_sin = torch.randn(100, size).to(dtype if table == "own" else torch.float32)
    slots, positions = torch.arange(tokens) + 3, torch.randint(100, (tokens,))
    fused = torch.zeros(cache_shape(4, kv_heads, block, size), dtype=dtype)
    apart = fused.clone()
    out = poisoned(tokens, heads, size, dtype=dtype)
    ops["qkv_prepare"](
        qkv, *weights, 1e-6, cos_sin if table else None, positions, slots, fused, heads, kv_heads,
        True, out, 1.0,
    )  # fmt: skip
    q, k, v = qkv.view(tokens, -1, size).split([heads, kv_heads, kv_heads], dim=1)
    if norm:
        q, k = (
            ops["rms_norm"](x, w, 1e-6, None, 1.0) for x, w in zip((q, k), weights, strict=True)
        )
    q, k = q.clone(), k.clone()
    if table:
        ops["rotary"](q, k, positions, cos_sin)
    ops["write_kv"](k, v, apart, slots)
    assert torch.equal(out, q)
    assert torch.equal(fused, apart)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [0, 16, 5])
def test_neighbours_written_together_are_written_as_one_by_one(ops, dtype, first):
    tokens, heads, size, block = 300, 2, 40, 64
    k, v = torch.randn(2, tokens, heads, size).to(dtype)
    slots = torch.arange(first, first + tokens)
    slots[100:103] = -1
    slots[200:] += 3 * block
    together, single = (torch.zeros(cache_shape(12, heads, block, size, dtype=dtype)) for _ in "ab")
    together, single = together.to(dtype), single.to(dtype)
    ops["write_kv"](k, v, together, slots)
    for i in range(tokens):
        ops["write_kv"](k[i : i + 1], v[i : i + 1], single, slots[i : i + 1].clone())
    assert torch.equal(together, single)


def test_a_block_in_int8_is_smaller():
    sizes = {
        dtype: torch.zeros(cache_shape(4, 2, 32, 64, dtype=dtype), dtype=dtype).nbytes
        for dtype in (torch.bfloat16, torch.int8, torch.float8_e5m2)
    }
    assert sizes[torch.float8_e5m2] * 2 == sizes[torch.bfloat16]
    assert sizes[torch.int8] == sizes[torch.float8_e5m2] + 4 * 2 * 32 * 8


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
    for name, value, message in (
        (0, q[:, :3], "q has 3 heads"),
        (1, cache.int(), "cache must be of a float dtype or int8"),
        (1, cache[..., :96].contiguous(), "cache of width 96 does not hold"),
        (2, one, "block_tables must be"),
        (4, one.long(), "context_lens must be"),
        (6, q[:, :2], "out must be"),
    ):
        broken = [*arguments]
        broken[name] = value
        with pytest.raises(ValueError, match=f"^{message}"):
            ops["paged_attention"](*broken)
    with pytest.raises(ValueError, match="^block_size must be"):
        cache_shape(2, 2, 16, 64)
