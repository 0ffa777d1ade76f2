"""Recorded steps: the same bits as the step itself, and the step itself where there are none."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from samples import parametrize_sample

from modulm import LLM, SamplingParams
from modulm.contracts.model import Batch
from modulm.contracts.recording import Recordable
from modulm.testing.checkpoints import make_tiny
from modulm_kernels_cpu import levels, load, ops
from modulm_kernels_cpu.provider import CpuKernels
from modulm_kernels_cpu.replay import MAX_ROWS, Arena, Recorder, Replay

HIDDEN, HEADS, SIZE, BLOCK = 64, 4, 32, 32


@frozen(eq=False)
class Plan(Recordable):
    block_tables: torch.Tensor
    lens: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor

    def key(self):
        return ()

    def tensors(self):
        return self.lens, self.slots, self.starts

    def tables(self):
        return (self.block_tables,)

    def over(self, tensors, tables):
        return Plan(*tables, *tensors)


class Toy:
    """A decoder layer made of kernels; `spoil` is what torch does in between."""

    def __init__(self, spoil=lambda x: x) -> None:
        torch.manual_seed(0)
        self.ops, self.spoil, self.calls = ops(), spoil, 0
        self.table = torch.randn(100, HIDDEN).bfloat16()
        self.norm = torch.ones(HIDDEN).bfloat16()
        self.qkv = self.ops["pack_linear"](torch.randn(3 * HEADS * SIZE, HIDDEN).bfloat16() / 8)
        self.out = self.ops["pack_linear"](torch.randn(HIDDEN, HEADS * SIZE).bfloat16() / 8)
        angles = torch.randn(1024, SIZE // 2)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        self.calls += 1
        (cache,), (plan,), ops = batch.caches, batch.plans, self.ops
        x = ops["embedding"](batch.tokens, self.table)
        for _ in range(3):
            inner = ops["rms_norm"](x, self.norm, 1e-6)
            qkv = ops["linear"](inner, self.qkv)
            q = ops["qkv_prepare"](
                qkv, None, None, 1e-6, self.cos_sin, batch.positions, plan.slots, cache,
                HEADS, HEADS,
            )  # fmt: skip
            seen = torch.empty_like(q)
            ops["paged_attention"](q, cache, plan.block_tables, plan.starts, plan.lens, 0.2, seen)
            inner = self.spoil(ops["linear"](seen.flatten(1), self.out))
            x = ops["add_rms_norm"](inner, x, self.norm, 1e-6)
        return x


def a_batch(rows: int, length: int, seed: int, cache: torch.Tensor) -> Batch:
    """`rows` rows at position `length`; each has blocks of its own."""
    draw = torch.Generator().manual_seed(seed)
    width = length // BLOCK + 1
    tables = 1 + torch.arange(rows * width, dtype=torch.int32).view(rows, width)
    slots = tables[:, -1].long() * BLOCK + length % BLOCK
    starts = torch.arange(rows + 1, dtype=torch.int32)
    lens = torch.full((rows,), length + 1, dtype=torch.int32)
    return Batch(
        tokens=torch.randint(0, 100, (rows,), generator=draw),
        positions=torch.full((rows,), length),
        query_starts=starts,
        caches=(cache,),
        plans=(Plan(tables, lens, slots, starts),),
        groups=(0,),
        sample=torch.arange(rows),
    )


def a_cache() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(200, HEADS, BLOCK, 2 * SIZE).bfloat16()


def test_repeated_steps_give_the_bits_of_the_step():
    toy, cache, other = Toy(), a_cache(), a_cache()
    replay = Replay(load(), toy.forward)
    for step, (rows, length) in enumerate([(1, 5), (1, 6), (3, 40), (1, 700), (3, 90), (3, 41)]):
        actual = replay(a_batch(rows, length, step, cache)).clone()
        assert torch.equal(actual, toy.forward(a_batch(rows, length, step, other)))
        assert torch.equal(cache, other)
    assert replay.reason is None


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize(
    ("heads", "fresh", "length"),
    [(8, 1, 90), (8, 1, 96), (16, 1, 600), (8, 1, 1500), (4, 3, 130), (16, 5, 33), (8, 40, 64)],
)
def test_one_sequence_is_prepared_by_attention(level, dtype, heads, fresh, length):
    """In a replayed step; with results over the projections each call runs alone."""
    torch.manual_seed(0)
    library, calls = load(level), ops(level)
    size, width = 64, length // BLOCK + 1
    qkv = torch.randn(fresh, (heads + 8) * size).bfloat16()
    first = torch.randn(width, 4, BLOCK, 2 * size + 8 * (dtype == torch.int8))
    first = torch.randint_like(first, -9, 9).to(dtype)
    calls["write_kv"](
        *torch.randn(2, width * BLOCK, 4, size).bfloat16(), first, torch.arange(width * BLOCK)
    )
    table = torch.arange(width, dtype=torch.int32)[None]
    positions = torch.arange(length - fresh, length)
    lens = torch.tensor([length], dtype=torch.int32)
    starts = torch.tensor([0, fresh], dtype=torch.int32)
    norm, cos_sin = torch.rand(size).bfloat16(), torch.randn(width * BLOCK, size)
    results = []
    for replayed, over in ((False, False), (True, False), (True, True)):
        arena, cache, own = Arena(), first.clone(), qkv.clone()
        recorder = Recorder(arena)
        out = own.flatten()[: fresh * heads * size].view(fresh, heads, size)
        out = out if over else torch.zeros(fresh, heads, size).bfloat16()
        with library.listen(recorder):
            q = calls["qkv_prepare"](
                own, norm, norm, 1e-6, cos_sin, positions, positions, cache, heads, 4
            )
            calls["paged_attention"](q, cache, table, starts, lens, 0.2, out)
        if replayed:
            q.zero_(), cache.copy_(first), own.copy_(qkv)
            program = recorder.program()
            repeat = library.call("replay", "pnpn", ctypes.c_int64)
            assert repeat(program.ctypes.data, len(program), None, 0) == 0
        results.append((q.clone(), cache, out.clone()))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_the_model_runs_once_for_steps_that_are_alike():
    toy, cache = Toy(), a_cache()
    replay = Replay(load(), toy.forward)
    for length in range(100):
        replay(a_batch(2, length, length, cache))
    assert toy.calls == 1
    replay(a_batch(2, 16 * BLOCK, 0, cache))  # a table wider than there was room for
    assert toy.calls == 2


def test_every_number_of_rows_shares_memory():
    toy, cache = Toy(), a_cache()
    replay = Replay(load(), toy.forward)
    for rows in range(1, 33):
        replay(a_batch(rows, 10, rows, cache))
    assert sum(block.nbytes for block in replay._arena._blocks) < 4e6


@pytest.mark.parametrize(
    "spoil", [lambda x: x + 1, lambda x: x.clone(), lambda x: x * x.sum().item()]
)
def test_what_torch_computes_ends_the_recording(spoil):
    toy, cache, other = Toy(spoil), a_cache(), a_cache()
    replay = Replay(load(), toy.forward)
    for length in (3, 4, 5):
        actual = replay(a_batch(2, length, length, cache))
        assert torch.equal(actual, toy.forward(a_batch(2, length, length, other)))
    assert "torch computes" in replay.reason


def test_prompts_and_large_steps_run_as_they_are():
    toy, cache = Toy(), a_cache()
    replay = Replay(load(), toy.forward)
    for _ in range(2):
        replay(a_batch(MAX_ROWS + 1, 3, 0, cache))
    assert toy.calls == 2


@pytest.mark.parametrize("spoil", [lambda x: x, lambda x: x * 2])
def test_logits_follow_in_the_same_call_where_all_tokens_are_sampled(spoil):
    toy, cache, other = Toy(), a_cache(), a_cache()
    head = ops()["pack_linear"](torch.randn(100, HIDDEN).bfloat16() / 8)
    seen = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden)
        return spoil(ops()["linear"](hidden, head))

    replay = Replay(load(), toy.forward)
    replay.append_logits(logits)
    recorded = spoil(1) == 1
    for rows, length in [(1, 5), (3, 40), (1, 700), (3, 41), (1, 6)]:
        actual = replay(a_batch(rows, length, length, cache))
        hidden = toy.forward(a_batch(rows, length, length, other))
        if recorded:
            actual, after = actual
            assert torch.equal(after, logits(hidden))
        assert torch.equal(actual, hidden)
    assert replay.reason is None
    assert (replay.logits_reason is None) == recorded
    calls = len(seen)
    few = evolve(a_batch(3, 41, 0, cache), sample=torch.arange(2))
    assert isinstance(replay(few), torch.Tensor)
    assert len(seen) == calls


def test_inputs_that_are_not_contiguous():
    toy, cache, other = Toy(), a_cache(), a_cache()
    replay = Replay(load(), toy.forward)
    for length in (90, 91, 92):
        batch = a_batch(3, length, length, cache)
        wide = torch.stack([batch.tokens, batch.tokens + 1], 1)
        expected = toy.forward(a_batch(3, length, length, other))
        assert torch.equal(replay(evolve(batch, tokens=wide[:, 0])), expected)


def test_a_token_out_of_range_is_the_models_error():
    toy, cache = Toy(), a_cache()
    replay = Replay(load(), toy.forward)
    good = a_batch(1, 3, 0, cache)
    replay(good)
    good.tokens[0] = 100
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 100\)"):
        replay(good)


@parametrize_sample(
    "architecture",
    [
        "GPT2LMHeadModel",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "LlamaForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
    ],
    every=3,
)
def test_text_with_and_without_recorded_steps(tmp_path, architecture, monkeypatch):
    replays = []

    def recorded(self, forward):
        replays.append(Replay(load(), forward))
        return replays[-1]

    monkeypatch.setattr(CpuKernels, "recorded", recorded)
    make_tiny(tmp_path, architecture=architecture)
    params = [
        SamplingParams(max_tokens=6 + 5 * i, temperature=0.7 * (i % 2), seed=i, logprobs=2)
        for i in range(5)
    ]
    prompts = [list(np.random.default_rng(i).integers(10, 200, 4 + i)) for i in range(5)]
    texts = []
    for eager in (True, False):
        llm = LLM(str(tmp_path), dtype="bfloat16", enforce_eager=eager, max_model_len=128)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert texts[0] == texts[1]
    (replay,) = replays
    assert replay.reason is None
    assert all(
        len(program.tensors) == 1 + (replay.logits_reason is None)
        for program in replay._programs.values()
    )
    assert replay._programs
