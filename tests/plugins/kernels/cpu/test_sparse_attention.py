"""Selecting tokens, and attention over selected tokens, against the plain-torch reference."""

from __future__ import annotations

import pytest
import torch
from samples import parametrize_sample
from tests.plugins.kernels.cpu.close import assert_close, poisoned

from modulm.contracts.attention import AttentionInputs, AttentionSpec
from modulm.testing.paged_attention import (
    ReferencePlan,
    attend,
    pick,
    pick_scores,
    write_kv,
)
from modulm_kernels_cpu import cache_shape

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCK = 32
#: Lengths and new tokens of rows: fewer tokens than are picked, and more; several splits.
MIXES = {
    "decode": ([1500, 7, 40], [1, 1, 1]),
    "chunks": ([90, 700, 30], [21, 6, 30]),
    "idle row": ([200, 50, 90], [2, 0, 1]),
}


class Step:
    """A step over a latent cache: the kernels' beside the reference's."""

    def __init__(self, ops, lengths, fresh, size, kv_dtype):
        self.ops = ops
        width = max(-(-length // BLOCK) for length in lengths) + 1
        tables = (torch.randperm(width * len(lengths)) + 1).int().view(len(lengths), width)
        starts = torch.tensor([0, *fresh]).cumsum(0).int()
        self.where = tables, starts, torch.tensor(lengths, dtype=torch.int32)
        blocks = width * len(lengths) + 1
        shape = cache_shape(blocks, 1, BLOCK, size, 0, kv_dtype)
        poison = torch.full((*shape[:-1], shape[-1] * kv_dtype.itemsize), 255, dtype=torch.uint8)
        self.mine = poison.view(kv_dtype)
        self.theirs = torch.zeros(blocks, BLOCK, 1, size, dtype=FP32)
        for row, length in enumerate(lengths):
            at = torch.arange(length)
            slots = tables[row][at // BLOCK].long() * BLOCK + at % BLOCK
            k = torch.randn(length, 1, size).to(kv_dtype).to(FP32)
            stored = k.to(BF16 if kv_dtype.itemsize == 1 else kv_dtype)
            ops["write_kv"](stored, stored, self.mine, slots)
            write_kv(k, k, self.theirs, slots)
        self.plan = ReferencePlan(*self.where, slots)
        self.tokens = int(starts[-1])


FORMATS = {"bf16": BF16, "fp16": FP16, "fp32": FP32, "e4m3": torch.float8_e4m3fn}


@parametrize_sample("mix", MIXES, every=2)
@pytest.mark.parametrize("form", FORMATS)
def test_picks_have_the_largest_scores(ops, mix, form):
    """What is picked scores at least as much as what is not, but for rounding; early ones first."""
    kv_dtype = FORMATS[form]
    dtype = BF16 if kv_dtype.itemsize == 1 else kv_dtype
    heads, size, picks = 5, 40, 32
    step = Step(ops, *MIXES[mix], size, kv_dtype)
    q = torch.randn(step.tokens, heads, size + 8).to(dtype)[..., :size]
    weights = torch.randn(step.tokens, heads)
    spec = AttentionSpec(heads, 1, size, 0.2, "float32", "float32", picks=picks)
    out = torch.full((step.tokens, 1, picks), -7, dtype=torch.int32)
    ops["pick_tokens"](q, step.mine, *step.where, spec.scale, weights, out)
    inputs = AttentionInputs(head_weights=weights)
    expected = torch.empty_like(out)
    pick(spec, q, step.theirs, step.plan, expected, inputs)
    assert ((out == -1) == (expected == -1)).all()
    for row in range(len(step.where[2])):
        scores = pick_scores(spec, q, step.theirs, step.plan, row, inputs)
        tokens = slice(*step.where[1][row : row + 2].tolist())
        for each, mine, theirs in zip(scores, out[tokens, 0], expected[tokens, 0], strict=True):
            mine, theirs = mine[mine >= 0], theirs[theirs >= 0]
            assert (mine.diff() > 0).all()
            assert_close(each[mine.long()].sort().values, each[theirs.long()].sort().values)


def test_of_equal_scores_the_earlier_tokens_are_picked(ops):
    step = Step(ops, [300], [3], 32, FP32)
    q = torch.randn(3, 2, 32)
    out = torch.empty(3, 1, 40, dtype=torch.int32)
    ops["pick_tokens"](q, step.mine, *step.where, 1.0, torch.zeros(3, 2), out)
    assert (out == torch.arange(40, dtype=torch.int32)).all()
    weights = torch.tensor([[-1.0, 0.0]]).expand(3, 2).contiguous()  # zeros, and less
    ops["pick_tokens"](q, step.mine, *step.where, 1.0, weights, out)
    spec = AttentionSpec(2, 1, 32, 1.0, "float32", "float32", picks=40)
    scores = pick_scores(spec, q, step.theirs, step.plan, 0, AttentionInputs(head_weights=weights))
    zeros = [(row == 0).nonzero()[:40, 0] for row in scores]
    assert torch.equal(out[:, 0].long(), torch.stack(zeros))


@parametrize_sample("mix", MIXES, every=2)
@pytest.mark.parametrize(("form", "heads"), [*((form, 5) for form in FORMATS), ("bf16", 130)])
def test_attention_over_selected_tokens(ops, mix, form, heads):
    """Against the reference; some queries select nothing, all, or tokens that come after them."""
    kv_dtype = FORMATS[form]
    dtype = BF16 if kv_dtype.itemsize == 1 else kv_dtype
    size, latent, picks = 72, 48, 600
    step = Step(ops, *MIXES[mix], size, kv_dtype)
    q = torch.randn(step.tokens, heads, size).to(dtype)
    selected = torch.full((step.tokens, 1, picks), -1, dtype=torch.int32)
    lengths = step.where[2].repeat_interleave(step.where[1].diff())
    for token, length in enumerate(lengths.tolist()):
        count = (length, 0, 5, min(37, length))[token % 4] if length < picks else picks - token % 4
        chosen = torch.randperm(length)[:count].sort().values
        selected[token, 0, picks - count :] = chosen.int()
    sinks = torch.randn(heads) if mix == "chunks" else None
    softcap = 3.0 if mix == "chunks" else 0.0
    out = poisoned(step.tokens, heads, latent, dtype=dtype)
    ops["selected_attention"](q, step.mine, *step.where, size**-0.5, selected, out, softcap, sinks)
    spec = AttentionSpec(
        heads, 1, size, size**-0.5, "float32", "float32", softcap=softcap, latent=latent,
        selection=1,
    )  # fmt: skip
    expected = torch.empty_like(out)
    attend(
        spec, q, step.theirs, step.plan, expected, AttentionInputs(sinks=sinks, selected=selected)
    )
    assert_close(out, expected, 2.0 if kv_dtype.itemsize == 1 else 1.0)


def test_threads_and_other_rows_change_no_bits(ops, library):
    heads, size, latent, picks = 5, 64, 32, 1100
    step = Step(ops, [1500, 1300, 20], [1, 2, 1], size, BF16)
    q = torch.randn(step.tokens, heads, size).bfloat16()
    weights = torch.randn(step.tokens, heads)

    def run(q, weights, where):
        out = torch.empty(len(q), 1, picks, dtype=torch.int32)
        ops["pick_tokens"](q, step.mine, *where, 0.1, weights, out)
        result = torch.empty(len(q), heads, latent, dtype=BF16)
        ops["selected_attention"](q, step.mine, *where, 0.1, out, result)
        return out, result

    expected = run(q, weights, step.where)
    for threads in (1, 3, 16):
        library.set_threads(threads)
        assert all(map(torch.equal, run(q, weights, step.where), expected))
    tables, starts, lengths = step.where
    for row in range(3):
        tokens = slice(*starts[row : row + 2].tolist())
        count = tokens.stop - tokens.start
        where = tables[row : row + 1], torch.tensor([0, count]).int(), lengths[row : row + 1]
        alone = run(q[tokens], weights[tokens], where)
        assert all(map(torch.equal, alone, (each[tokens] for each in expected)))


def test_bad_arguments(ops):
    step = Step(ops, [40], [1], 32, FP32)
    q, out = torch.zeros(1, 2, 32), torch.empty(1, 1, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="head_weights"):
        ops["pick_tokens"](q, step.mine, *step.where, 1.0, torch.zeros(1, 3), out)
    with pytest.raises(ValueError, match="selected"):
        ops["selected_attention"](
            q, step.mine, *step.where, 1.0, torch.zeros(1, 2, 8).int(), torch.zeros(1, 2, 16)
        )
