"""Paged attention, its cache and its plans: the contract, and what only these kernels have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from samples import parametrize_sample
from tests.plugins.kernels.triton.close import DTYPES, assert_close, each_dtype
from tests.plugins.kernels.triton.platform import triton_platform

from modulm.contracts.attention import AttentionInputs, AttentionSpec, QKVPrepare, StepLayout
from modulm.errors import ConfigError
from modulm.ops import bind
from modulm.plugins import manager
from modulm.testing.attention import SPECS, check_attention
from modulm.testing.paged_attention import qkv_prepare as twin_of_prepare


@pytest.fixture
def driver():
    return manager.current().load("attention", "triton")


@pytest.fixture
def kernels():
    from modulm_kernels_triton import paged

    return paged


@pytest.fixture
def on_triton(ops):
    from modulm_kernels_triton.provider import TritonKernels

    return bind([TritonKernels()])


#: Left out where kernels are interpreted: other kinds have all that these have.
COVERED = {"grouped heads", "a scale of its own", "sinks", "spans"} if len(DTYPES) < 3 else set()
KINDS = [
    kind
    for kind, spec in SPECS.items()
    if not spec.features & {"biases", "partial"}
    and not (spec.selection and not spec.latent)
    and kind not in COVERED
]
#: What is tried in each format of the cache.
FORMATS = ("heads of 80", "scales", "latent")


@parametrize_sample("kind", KINDS, every=18)
def test_contract(driver, kind):
    """In fp32, and on a GPU in all that it computes in; narrow formats for some."""
    names = [str(dtype)[6:] for dtype in DTYPES]
    platform = triton_platform(*(names if len(DTYPES) > 2 else names[:1]))
    with pytest.MonkeyPatch.context() as patch:
        if kind not in FORMATS:
            patch.setattr("modulm.testing.attention._NARROW", {})
        check_attention(driver, platform, only=(kind,), quick=len(DTYPES) < 3)


def step(counts, contexts, size=16, width=8):
    """Rows of these new tokens and lengths, over blocks of their own."""
    rows = len(counts)
    tables = 1 + np.random.default_rng(0).permutation(rows * width).astype(np.int32)
    tables = tables.reshape(rows, width)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    slots = [
        table[position // size].astype(np.int64) * size + position % size
        for table, count, end in zip(tables, counts, contexts, strict=True)
        for position in range(end - count, end)
    ]
    return StepLayout(size, tables, starts, np.array(contexts, np.int32), np.array(slots))


SPEC = AttentionSpec(4, 2, 32, 0.2, "float32", "float32")


@pytest.fixture
def make(driver, on_triton):
    def make(**changes):
        spec = evolve(SPEC, **changes)
        backend = driver(spec, triton_platform(spec.dtype), on_triton, 16)
        layout = backend.layout(64)
        cache = torch.randn(layout.shape).to(getattr(torch, layout.dtype))
        return backend, cache.to(backend.platform.device)

    return make


def attend(backend, cache, layout):
    """`forward` of a step over a cache that it leaves as it was; -> [tokens, heads, values]."""
    spec, device = backend.spec, cache.device
    draw = torch.Generator().manual_seed(0)
    tokens = int(layout.query_starts[-1])
    dtype = getattr(torch, spec.dtype)
    q, k, v = (
        torch.randn(tokens, heads, spec.head_dim, generator=draw).to(device, dtype)
        for heads in (spec.heads, spec.kv_heads, spec.kv_heads)
    )
    out = torch.full_like(q, torch.nan)
    backend.forward(q, k, v, cache.clone(), backend.plan(layout), out)
    return out


def rows_of(layout, rows):
    """The step of some of its rows only."""
    counts = np.diff(layout.query_starts)
    tokens = [np.arange(*layout.query_starts[row : row + 2]) for row in rows]
    starts = np.concatenate([[0], np.cumsum(counts[rows])]).astype(np.int32)
    return evolve(
        layout, block_tables=layout.block_tables[rows], query_starts=starts,
        context_lens=layout.context_lens[rows], slots=layout.slots[np.concatenate(tokens)],
    )  # fmt: skip


def test_a_row_does_not_depend_on_the_others(make):
    """A decode has the same bits alone and beside long rows and prompts: splits are by length."""
    backend, cache = make()
    crowd = step([1, 1, 30, 1, 3], [100, 5, 30, 33, 60])
    q, k, v = torch.randn(3, int(crowd.query_starts[-1]), 4, 32, device=cache.device)
    k, v = k[:, :2], v[:, :2]
    together = torch.empty_like(q)
    backend.forward(q, k, v, cache.clone(), backend.plan(crowd), together)
    for row in range(5):
        tokens = slice(*crowd.query_starts[row : row + 2].tolist())
        single = torch.empty_like(q[tokens])
        plan = backend.plan(rows_of(crowd, [row]))
        backend.forward(q[tokens], k[tokens], v[tokens], cache.clone(), plan, single)
        assert torch.equal(single, together[tokens]), f"row {row}"


def test_programs_share_splits_without_changing_bits(make, monkeypatch):
    from modulm_kernels_triton import paged_attention

    backend, cache = make()
    layout = step([1, 1], [128, 70])
    expected = attend(backend, cache, layout)
    tuned = paged_attention.tuned
    for shares in (1, 4):
        changed = lambda name, shares=shares, **sizes: (  # noqa: E731
            {**tuned(name, **sizes), "SHARES": shares} if "split" in name else tuned(name, **sizes)
        )
        monkeypatch.setattr(paged_attention, "tuned", changed)
        assert torch.equal(attend(backend, cache, layout), expected)


def test_what_a_row_does_not_see_may_be_anything(make):
    """NaN in the null block, behind a row's end and before its window reaches nobody."""
    backend, cache = make(window=20)
    layout = step([1, 9, 1], [40, 30, 3])
    table = layout.block_tables
    table[0, 0] = table[0, 3:] = table[1, 2:] = table[2, 1:] = 0
    clean = attend(backend, cache, layout)
    dirty = cache.clone()
    dirty[0] = torch.nan
    token = backend.form.token
    (of_row,) = dirty[table[2, :1]]
    of_row[:, 3 * token :] = torch.nan
    assert clean.isfinite().all()
    assert torch.equal(attend(backend, dirty, layout), clean)


@each_dtype
@pytest.mark.parametrize("neox", [True, False])
def test_qkv_prepare(kernels, device, neox, dtype):
    heads, kv_heads, size, turned = 3, 2, 24, 12
    form = kernels.CacheForm(kv_heads, 16, size, size, dtype)
    qkv = torch.randn(5, (heads + 2 * kv_heads) * size).to(device, dtype)
    angles = torch.rand(20, turned // 2, device=device)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    slots = torch.tensor([17, 3, 40, 18, 63], device=device)
    positions = torch.tensor([0, 19, 7, 7, 2], device=device)
    norms = torch.randn(2, size, device=device)
    cache = torch.zeros(form.shape(4), dtype=dtype, device=device)
    mirror = torch.zeros(4, 16, kv_heads, 2 * size, dtype=dtype, device=device)
    mine = kernels.qkv_prepare(
        qkv, *norms, 1e-6, table, positions, slots, cache, form, heads, neox, 1.0
    )
    theirs = twin_of_prepare(
        qkv, *norms, 1e-6, table, positions, slots, mirror, heads, kv_heads, neox, 1.0
    )
    assert_close(mine, theirs)
    assert_close(cache.view(4, kv_heads, 16, -1).transpose(1, 2), mirror)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_floats_are_rounded_to_nearest_even(kernels, device, dtype):
    """All numbers of the format, those halfway between two, a little beside, and too large ones."""
    form = kernels.CacheForm(1, 16, 64, 64, dtype)
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = codes[codes.isfinite()].unique()
    middle = (finite[1:] + finite[:-1]) / 2
    some = torch.cat([finite, middle, middle * 1.0001, middle * 0.9999, 3 * finite])
    x = some.repeat(2)[: some.numel() // 64 * 64 + 64].view(-1, 1, 64).to(device)
    cache = torch.zeros(form.shape(len(x) // 16 + 1), dtype=dtype, device=device)
    kernels.write_kv(x, -x, cache, form, torch.arange(len(x), device=device))
    rounded = cache.view(torch.uint8).view(-1, 128)[: len(x)].view(dtype).float()
    top = torch.finfo(dtype).max
    expected = x[:, 0].clamp(-top, top).to(dtype).float()
    assert torch.equal(rounded[:, :64], expected)
    assert torch.equal(rounded[:, 64:], -expected)


def test_not_a_number_stays_so(kernels, device):
    form = kernels.CacheForm(1, 16, 16, 16, torch.float8_e4m3fn)
    cache = torch.zeros(form.shape(1), dtype=torch.float8_e4m3fn, device=device)
    x = torch.full((1, 1, 16), torch.nan, device=device)
    kernels.write_kv(x, x, cache, form, torch.tensor([2], device=device))
    assert cache.float().view(16, 32).isnan().all(1).tolist() == [row == 2 for row in range(16)]


def test_plans_of_decodes_are_alike_whatever_the_lengths(make):
    from modulm.ops.recording import signature

    backend, _ = make()
    some = [backend.plan(step([1, 1], lengths)) for lengths in ([1, 9], [128, 64])]
    assert signature(some[0]) == signature(some[1])
    assert signature(some[0]) != signature(backend.plan(step([1, 2], [1, 9])))


def test_spans_that_overlap_are_an_error(make):
    backend, _ = make(spans=True)
    layout = evolve(step([20], [20]), spans=np.array([[0, 2, 8], [0, 7, 12]], np.int32))
    with pytest.raises(ValueError, match="spans of row 0 overlap at position 7"):
        backend.plan(layout)


def test_what_it_rejects(driver, on_triton, make):
    platform = triton_platform("float32")
    for changes, reason in (
        ({"selection": 4}, "not selected runs or heads"),
        ({"picks": 4, "window": 9}, "cannot select tokens with window"),
        ({"kv_dtype": "int4"}, "not in int4"),
        ({"kv_dtype": "float16"}, "not in float16"),
        ({"dtype": "float64", "kv_dtype": "float64"}, "not float64"),
        ({"kv_dtype": "int8", "latent": 16, "kv_heads": 1}, "latent (MLA)"),
        ({"head_dim": 1024}, "up to 576, not 1024"),
    ):
        assert reason in driver.refuses(evolve(SPEC, **changes), platform, on_triton)
    assert "kernels of triton" in driver.refuses(SPEC, platform, bind())
    with pytest.raises(ConfigError, match="takes no options"):
        driver(SPEC, platform, on_triton, 16, {"splits": 3})


def test_gpus_that_read_no_e4m3(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "target", lambda: ("cuda", "80"))
    assert "capability 8.9" in kernels.unreadable("float8_e4m3fn")
    assert kernels.unreadable("float8_e5m2") is None
    monkeypatch.setattr(kernels, "target", lambda: ("cuda", "90"))
    assert kernels.unreadable("float8_e4m3fn") is None


def test_norms_of_queries_alone_are_left_to_the_layer(make):
    backend, cache = make()
    norm = torch.ones(32)
    plan = backend.plan(step([1], [4]))
    arguments = (torch.zeros(1, 8 * 32), torch.tensor([3]), QKVPrepare(q_norm=norm))
    assert not backend.forward_qkv(*arguments, cache, plan, torch.zeros(1, 4, 32))


@pytest.mark.parametrize("kind", ["fp8_per_token_head", "nvfp4", "nvfp4_4over6"])
def test_formats_with_scales_are_kept_as_plain_torch_keeps_them(make, kind):
    """The same numbers as the portable backend: rows with few tokens and with many."""
    backend, cache = make(kv_dtype=kind)
    plain = manager.current().load("attention", "sdpa")(
        backend.spec, backend.platform, backend.ops, 16
    )
    mirror = torch.zeros(plain.layout(64).shape, dtype=torch.uint8, device=cache.device)
    layout, found = step([1, 20, 3], [1, 20, 3]), []
    for one, kept in ((backend, torch.zeros_like(cache)), (plain, mirror)):
        found.append(attend(one, kept, layout))
    assert_close(found[0], found[1], 4)


@parametrize_sample(
    ("kind", "selection"),
    [("fp8_ds_mla", 0), ("nvfp4_ds_mla", 1), ("nvfp4_ds_mla", 0), ("fp8_ds_mla", 1)],
    every=4,
)
def test_latents_are_kept_as_plain_torch_keeps_them(make, kind, selection):
    """FlashMLA's bytes, and attention to all of them or to selected tokens."""
    changes = {"heads": 2, "kv_heads": 1, "head_dim": 576, "latent": 512, "selection": selection}
    backend, cache = make(**changes, kv_dtype=kind)
    plain = manager.current().load("attention", "sdpa")(
        backend.spec, backend.platform, backend.ops, 16
    )
    layout, draw = step([1, 10], [1, 10]), torch.Generator().manual_seed(0)
    q, k = (torch.randn(11, heads, 576, generator=draw).to(cache.device) for heads in (2, 1))
    k[0] = 0
    inputs = AttentionInputs()
    if selection:
        selected = torch.full((11, 1, 7), -1, dtype=torch.int32)
        for token, seen in enumerate((1, *range(1, 11))):
            some = torch.randperm(seen, generator=draw)[:7]
            selected[token, 0, : len(some)] = some
        inputs = AttentionInputs(selected=selected.to(cache.device))
    found, bytes_of = [], []
    for one in (backend, plain):
        kept = torch.zeros(one.layout(64).shape, dtype=torch.uint8, device=cache.device)
        out = torch.empty(11, 2, 512, device=cache.device)
        one.forward(q, k, k[..., :512], kept, one.plan(layout), out, inputs)
        found.append(out)
        bytes_of.append(kept.flatten().view(64 * 16, -1)[layout.slots])
    assert torch.equal(*bytes_of)
    assert_close(found[0], found[1], 8)


def test_tokens_are_picked_by_keys_with_scales(make):
    """What the portable backend picks, of keys as they lie beside latents in FlashMLA's formats."""
    changes = {"heads": 2, "kv_heads": 1, "head_dim": 32, "picks": 5}
    backend, cache = make(**changes, kv_dtype="fp8_per_token_head")
    plain = manager.current().load("attention", "sdpa")(
        backend.spec, backend.platform, backend.ops, 16
    )
    layout, draw = step([1, 18], [1, 18]), torch.Generator().manual_seed(0)
    q, k = (torch.randn(19, heads, 32, generator=draw).to(cache.device) for heads in (2, 1))
    inputs = AttentionInputs(head_weights=torch.rand(19, 2, generator=draw).to(cache.device))
    found = []
    for one in (backend, plain):
        shape, dtype = one.layout(64).shape, getattr(torch, one.layout(64).dtype)
        out = torch.empty(19, 1, 5, dtype=torch.int32, device=cache.device)
        kept = torch.zeros(shape, dtype=torch.uint8, device=cache.device).view(dtype)
        one.forward(q, k, k, kept, one.plan(layout), out, inputs)
        found.append(out.sort(-1).values)
    assert torch.equal(*found)


def test_masks_of_many_tokens_are_an_error(make):
    backend, _ = make(masks=True)
    layout = evolve(step([70], [70]), masks={0: np.eye(70, dtype=bool)})
    with pytest.raises(ValueError, match="masks up to 62; draft fewer"):
        backend.plan(layout)
