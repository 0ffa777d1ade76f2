"""The sections that bench/gpu/run.sh runs, each with a time limit; results are written after each.

The JSON has, for each section, its outcome, its seconds and its lines; a line is a figure, its
reference, and the target share. A section that fails or times out does not affect the others; its
lines so far are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform as host
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

ROOT = Path(__file__).resolve().parents[2]

#: Shapes of published models; weights are random.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960, "rope_theta": 1e6, "hidden_act": "silu",
    "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPES = {
    "Qwen3-0.6B": {
        **QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    },
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
#: Architectures of the model kit: one with each kind of layer.
FAMILIES = (
    "LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM",
    "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM", "BambaForCausalLM", "Qwen3NextForCausalLM",
)  # fmt: skip


class TooLong(Exception):
    """A section exceeded its time limit."""


@define
class Setup:
    """The environment of a run. tiny: a dry run on small shapes. rate, bandwidth: measured, in
    FLOP/s and B/s.
    """

    device: str
    tiny: bool
    place: Path
    rate: float = 0.0
    bandwidth: float = 0.0
    lines: list[dict[str, Any]] = field(factory=list)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu" if self.tiny else "xpu" if self.device == "xpu" else "cuda")

    def line(self, what: str, value: float, unit: str, of: float = 0.0, aim: float = 0.0) -> None:
        """Print and record a figure. of: its reference in the same unit. aim: the target share."""
        share = value / of if of and not self.tiny else None
        self.lines.append({"what": what, "value": value, "unit": unit, "share": share, "aim": aim})

    def folder(self, name: str) -> str:
        """Create a checkpoint folder of a published shape, without weights."""
        made = self.place / name
        made.mkdir(exist_ok=True)
        shape = {**SHAPES[name], **(TINY if self.tiny else {})}
        (made / "config.json").write_text(json.dumps(shape))
        return str(made)

    def engine(self, model: str, **flags: Any) -> Any:
        """Create an engine; on the CPU in a dry run."""
        from modulm import LLM

        own = {"device": "cpu", "dtype": "float32"} if self.tiny else {"device": self.device}
        given = {"skip_tokenizer_init": True, "seed": 0, "max_model_len": 64 if self.tiny else 9216}
        return LLM(model, **{**given, **own, **flags})

    def seconds(self, work: Callable[[], object], times: int = 5) -> float:
        """The minimum time of several runs, after two warm-ups."""
        found = []
        for _ in range(2 + times if not self.tiny else 2):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            found.append(time.perf_counter() - began)
        return min(found[-times:])

    def wait(self) -> None:
        if not self.tiny:
            torch.get_device_module(self.torch_device).synchronize()


def machine(setup: Setup) -> None:
    """Bandwidth of a copy that exceeds all caches, and the rate of a large product in bf16."""
    size, edge = (1 << 20, 64) if setup.tiny else (4 << 30, 8192)
    source = torch.empty(size, dtype=torch.uint8, device=setup.torch_device)
    target = torch.empty_like(source)
    setup.bandwidth = 2 * size / setup.seconds(lambda: target.copy_(source))
    left = torch.randn(edge, edge, device=setup.torch_device, dtype=torch.bfloat16)
    setup.rate = 2 * edge**3 / setup.seconds(lambda: left @ left)
    setup.line("copy", setup.bandwidth / 1e9, "GB/s")
    setup.line("bf16 product", setup.rate / 1e12, "TFLOP/s")


def kernels(setup: Setup) -> None:
    """Every kernel against its twin: runs the suite's tests on the GPU."""
    which = ["tests/plugins/kernels/triton"]
    if setup.tiny:
        which = ["tests/plugins/kernels/triton/test_rms_norm.py"]
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *which]
    if not setup.tiny:
        words += ["-n", str(min(os.cpu_count() or 1, 12))]
    done = subprocess.run(words, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]
    if done.returncode:
        raise AssertionError(f"{last}\n{done.stdout[-2000:]}")
    setup.line(f"kernels: {last}", 1, "passed")


def families(setup: Setup) -> None:
    """Probabilities of prompts and decodes in bf16 on the GPU against fp32 on the CPU.

    bf16 may route a token to another expert, so twice its error on the CPU is allowed.
    """
    from modulm.testing.checkpoints import make_tiny
    from modulm.testing.session import Session

    for name in FAMILIES[:1] if setup.tiny else FAMILIES:
        folder = make_tiny(setup.place / f"tiny-{name}", name)
        own = {"device": "cpu", "kernels": "none"} if setup.tiny else {"device": setup.device}
        found = []
        plain = {"device": "cpu", "kernels": "none"}
        for flags in (
            {**plain, "dtype": "float32"},
            {**plain, "dtype": "bfloat16"},
            {**own, "dtype": "bfloat16"},
        ):
            session = Session(folder, max_model_len=64, **flags)
            steps = [session.step({0: [5, 6, 7, 8], 1: [9, 10]}), session.step({0: [11], 1: [12]})]
            found.append(torch.cat([s[row].float().cpu() for s in steps for row in (0, 1)]))
        rounding, worst = ((found[0].exp() - f.exp()).abs().max().item() for f in found[1:])
        most = max(0.05, 2 * rounding)
        setup.line(f"{name}: largest difference of a probability", worst, "", aim=most)
        if not worst < most:
            raise AssertionError(f"{name} differs by {worst} in bf16")


def graphs(setup: Setup) -> None:
    """Hidden states of decode steps with and without graphs, bit for bit, at recorded sizes."""
    from modulm import SamplingParams

    counts = (2, 4) if setup.tiny else (1, 8, 64, 256)
    found = []
    flags: dict[str, Any] = {"max_num_seqs": max(counts), "load_format": "dummy"}
    if setup.tiny:
        flags |= _test_device()
    for eager in (True, False):
        with setup.engine(setup.folder("Qwen3-0.6B"), enforce_eager=eager, **flags) as llm:
            greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
            for rows in counts:
                prompts = [{"prompt_token_ids": [7 + i % 91, 5, 9]} for i in range(rows)]
                outputs = llm.generate(prompts, greedy, use_tqdm=False)
                found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    half = len(counts)
    if found[:half] != found[half:]:
        raise AssertionError("tokens or log probabilities differ between graphs and single calls")
    setup.line("sizes that are equal with graphs and without", half, "sizes")


def _test_device() -> dict[str, Any]:
    """The test device that supports graphs."""
    import modulm
    from modulm_gpu.testing import GatherAttention, GraphPlatform

    modulm.register("platforms", "graphs", GraphPlatform)
    modulm.register("attention", "gather", GatherAttention)
    return {
        "device": "graphs", "attention_backend": "gather", "kernels": "none",
        "num_gpu_blocks_override": 40, "max_num_batched_tokens": 32,
        "cudagraph_capture_sizes": (2, 4),
    }  # fmt: skip


def adapters(setup: Setup) -> None:
    """Decode steps with eight adapters against steps without, and bit for bit without graphs."""
    from modulm import LoRARequest, SamplingParams
    from modulm.testing.adapters import write_lora

    rows, most, rank = (2, 2, 4) if setup.tiny else (64, 8, 16)
    tokens, folder = (3 if setup.tiny else 64), setup.folder("Qwen3-0.6B")
    shape = {**SHAPES["Qwen3-0.6B"], **(TINY if setup.tiny else {})}
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads = shape["num_attention_heads"] * shape["head_dim"]
    sizes = {
        "self_attn.q_proj": (hidden, heads), "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    modules = {
        f"model.layers.{layer}.{name}": size
        for layer in range(shape["num_hidden_layers"])
        for name, size in sizes.items()
    }
    loras = [
        LoRARequest(f"a{n}", n + 1, write_lora(setup.place / f"a{n}", modules, rank, n))
        for n in range(most)
    ]
    flags: dict[str, Any] = {
        "max_num_seqs": rows, "load_format": "dummy", "enable_lora": True, "max_loras": most,
    }  # fmt: skip
    if setup.tiny:
        flags |= _test_device()
    prompts = [{"prompt_token_ids": [7 + i % 91, 5, 9]} for i in range(rows)]
    chosen = [loras[row % most] for row in range(rows)]
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    found, taken = [], {}
    for eager in (True, False):
        with setup.engine(folder, enforce_eager=eager, **flags) as llm:
            for name, some in (("without", None), ("with", chosen)):
                if not setup.tiny:
                    llm.generate(prompts, greedy, use_tqdm=False, lora_request=some)
                began = time.perf_counter()
                outputs = llm.generate(prompts, greedy, use_tqdm=False, lora_request=some)
                taken[name] = time.perf_counter() - began
                found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    if found[:2] != found[2:]:
        raise AssertionError("tokens or log probabilities with adapters differ with graphs")
    speed, plain = (rows * tokens / taken[name] for name in ("with", "without"))
    setup.line(f"0.6B, {rows} streams, {most} adapters", speed, "tokens/s", plain, 0.8)


def streams(setup: Setup) -> None:
    """Many streams, of which a third is aborted: the others must equal those of a single run."""
    from modulm import SamplingParams
    from modulm_server.engine.async_llm import AsyncLLM

    count, tokens = (6, 4) if setup.tiny else (256, 64)
    own = {"device": "cpu", "dtype": "float32"} if setup.tiny else {"device": setup.device}

    async def one(llm: Any, number: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        prompt = {"prompt_token_ids": [11 + number % 89] * (3 + number % 5)}
        last: list[int] = []
        async for output in llm.generate(prompt, params, f"r{number}"):
            last = list(output.outputs[0].token_ids)
            if number % 3 == 2 and len(last) > 1:
                await llm.abort(f"r{number}")
                break
        return last

    async def all_of_them() -> list[list[int]]:
        llm = AsyncLLM(
            setup.folder("Qwen3-0.6B"), load_format="dummy", skip_tokenizer_init=True,
            max_model_len=64 if setup.tiny else 1024, max_num_seqs=count, **own,
        )  # fmt: skip
        try:
            return await asyncio.gather(*(one(llm, number) for number in range(count)))
        finally:
            llm.shutdown()

    answers = asyncio.run(all_of_them())
    whole = [answer for number, answer in enumerate(answers) if number % 3 != 2]
    if any(len(answer) != tokens for answer in whole):
        raise AssertionError("a stream ended early")
    setup.line(f"whole streams of {count}, a third aborted", len(whole), "streams")


def attention(setup: Setup) -> None:
    """The default attention for an 8B's layers: decodes against the bandwidth, a prompt against
    torch's flash attention in the same run.
    """
    import numpy as np
    import torch.nn.functional as F

    from modulm.contracts.attention import AttentionSpec, StepLayout
    from modulm.ops import bind
    from modulm.plugins import defaults, manager

    rows, context, prompt, size = (2, 32, 16, 16) if setup.tiny else (256, 4096, 8192, 256)
    dtype = "float32" if setup.tiny else "bfloat16"
    plugins = manager.current()
    platform = plugins.load("platforms", "cpu" if setup.tiny else setup.device)()
    platform.start()
    providers = defaults.choose_kernels(plugins, platform, () if setup.tiny else None).driver
    ops = bind([provider() for provider in providers], dtype=dtype)
    spec = AttentionSpec(32, 8, 128, 128**-0.5, dtype, dtype)
    name = "sdpa" if setup.tiny else None
    driver = defaults.choose_attention(plugins, spec, platform, ops, name, subject="bench").driver
    backend = driver(spec, platform, ops, size, {})
    blocks = max(rows * (context // size), prompt // size) + 1
    layout = backend.layout(blocks)
    cache = torch.zeros(layout.shape, dtype=getattr(torch, layout.dtype), device=platform.device)

    def attended(counts: Any, lengths: Any, table: Any) -> Callable[[], object]:
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        owner = np.repeat(np.arange(len(counts)), counts)
        at = np.arange(starts[-1]) - starts[owner] + (lengths - counts)[owner]
        slots = table[owner, at // size].astype(np.int64) * size + at % size
        kind = getattr(torch, dtype)
        q = torch.randn(int(starts[-1]), 32, 128, dtype=kind, device=platform.device)
        k, v = q[:, :8].contiguous(), q[:, 8:16].contiguous()
        out = torch.empty_like(q)
        plan = backend.plan(StepLayout(size, table, starts, lengths, slots))
        return lambda: backend.forward(q, k, v, cache, plan, out)

    ones, lengths = np.ones(rows, np.int32), np.full(rows, context, np.int32)
    table = 1 + np.arange(rows * (context // size), dtype=np.int32).reshape(rows, -1)
    took = setup.seconds(attended(ones, lengths, table))
    read = 2 * rows * context * 8 * 128 * getattr(torch, dtype).itemsize
    which = f"{driver.name}, {rows} decodes over {context}"
    setup.line(which, read / took / 1e9, "GB/s", setup.bandwidth / 1e9, 0.85)
    one = np.array([prompt], np.int32)
    took = setup.seconds(attended(one, one, 1 + np.arange(prompt // size, dtype=np.int32)[None]))
    heads = torch.randn(3, 1, 32, prompt, 128, dtype=getattr(torch, dtype), device=platform.device)
    theirs = setup.seconds(lambda: F.scaled_dot_product_attention(*heads, is_causal=True))
    flops = 2.0 * prompt * prompt * 32 * 128
    which = f"{driver.name}, a prompt of {prompt}"
    setup.line(which, flops / took / 1e12, "TFLOP/s", flops / theirs / 1e12, 0.75)


def low_precision(setup: Setup) -> None:
    """Products of quantized inputs and weights against the rate of bf16 in the same run.

    Formats that the hardware does not multiply are converted to 16 bits inside the kernel.
    """
    os.environ.setdefault("TRITON_INTERPRET", "1" if setup.tiny else "0")
    import modulm_kernels_triton
    from modulm_kernels_triton.device import low_precision as ability

    ops = modulm_kernels_triton.ops()
    rows, edge = (4, 128) if setup.tiny else (4096, 8192)
    dtype, device = torch.float32 if setup.tiny else torch.bfloat16, setup.torch_device
    x = torch.randn(rows, edge, device=device, dtype=dtype)
    forms = (
        ("int8", "int8", 0), ("fp8", "fp8", 128), ("fp8_token", "fp8", 0), ("mxfp8", "fp8", 32),
        ("mxfp4", "e2m1", 32), ("nvfp4", "e2m1", 16),
    )  # fmt: skip
    kinds = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "e2m1": torch.uint8}
    for name, form, group in forms:
        known = ability(name)
        if known is None:
            continue
        codes = torch.randint(0, 16, (edge, edge), dtype=torch.uint8, device=device)
        scales = torch.ones(edge, edge // group if group else 1, device=device)
        scales = scales if group != 32 else torch.full_like(scales, 120, dtype=torch.uint8)
        packed = ops["pack_quantized"](codes.to(kinds[form]), form, group, scales, None, name)
        took = setup.seconds(lambda packed=packed: ops["linear"](x, packed))
        which = f"{name} x {form}" + ("" if known else ", converted to 16 bits")
        rate = 2.0 * rows * edge * edge / took
        setup.line(which, rate / 1e12, "TFLOP/s", setup.rate / 1e12, 1.0 if known else 0.0)


def sums(setup: Setup) -> None:
    """Sums over four ranks, which are streams of one GPU: their bits, and the time without links.

    In a dry run there is one rank, because the interpreter runs one kernel at a time.
    """
    os.environ.setdefault("TRITON_INTERPRET", "1" if setup.tiny else "0")
    from modulm_distributed.torch_group import sum_in_order
    from modulm_kernels_triton.symmetric_sum import (
        SumConstants,
        SumMemory,
        buffer_bytes,
        sum_over_ranks,
    )  # fmt: skip

    ranks, device = 1 if setup.tiny else 4, setup.torch_device
    dtype = torch.float32 if setup.tiny else torch.bfloat16
    constants = SumConstants.tuned(ranks)
    size = buffer_bytes(constants) // 8
    buffers = [torch.zeros(size, dtype=torch.int64, device=device) for _ in range(ranks)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], device=device)
    memories = [SumMemory.of(rank, constants, addresses) for rank in range(ranks)]
    module = torch.get_device_module(device)
    streams = [None if setup.tiny else module.Stream() for _ in range(ranks)]
    for rows, two_shot in ((1, False), (64, False), (64, True), (4096, True)):
        width = 64 if setup.tiny else 4096
        count = min(rows, 4) if setup.tiny else rows
        inputs = [torch.randn(count, width, device=device).to(dtype) for _ in range(ranks)]
        found: list[torch.Tensor] = []

        def together(inputs: Any = inputs, two_shot: bool = two_shot, found: Any = found) -> None:
            found.clear()
            for rank, stream in enumerate(streams):
                with module.stream(stream) if stream else nullcontext():
                    found.append(sum_over_ranks(inputs[rank], memories[rank], two_shot=two_shot))

        took = setup.seconds(together)
        wanted = sum_in_order(inputs)
        if not all(torch.equal(total, wanted) for total in found):
            raise AssertionError(f"the sum of {count} rows is wrong, two_shot: {two_shot}")
        which = f"{ranks} ranks, {count} rows of {width}, {'two' if two_shot else 'one'}-shot"
        setup.line(which, took * 1e6, "us")


def decode(setup: Setup) -> None:
    """One stream, as a share of the time to read the weights once per token."""
    from modulm import SamplingParams

    for name, aim in (("Qwen3-0.6B", 0.75), ("Qwen3-8B", 0.88), ("Qwen3-30B-A3B", 0.0)):
        with setup.engine(setup.folder(name), load_format="dummy", max_num_seqs=4) as llm:
            tokens = 4 if setup.tiny else 256
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            prompt = [{"prompt_token_ids": [5] * 16}]
            llm.generate(prompt, params, use_tqdm=False)
            began = time.perf_counter()
            llm.generate(prompt, params, use_tqdm=False)
            speed = tokens / (time.perf_counter() - began)
            limit = 0.0 if "A3B" in name else setup.bandwidth / _read_bytes(SHAPES[name])
            setup.line(f"{name}, one stream", speed, "tokens/s", limit, aim)


def _read_bytes(shape: dict[str, Any]) -> float:
    """Bytes of bf16 weights that a dense model reads per token."""
    hidden, heads, head = shape["hidden_size"], shape["num_attention_heads"], shape["head_dim"]
    attention = hidden * head * (2 * heads + 2 * shape["num_key_value_heads"])
    layer = attention + 3 * hidden * shape["intermediate_size"]
    return 2.0 * (shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden)


def throughput(setup: Setup) -> None:
    """8B: 256 streams of 512 + 256 tokens, and one prompt of 8,192, against the roofline."""
    from modulm import SamplingParams

    rows, prompt, output, long = (2, 8, 4, 32) if setup.tiny else (256, 512, 256, 8192)
    shape = SHAPES["Qwen3-8B"]
    weights = _read_bytes(shape) / 2
    kept = 4.0 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    flags = {"load_format": "dummy", "max_num_seqs": rows, "enable_prefix_caching": False}
    flags["max_num_batched_tokens"] = max(long, rows)
    with setup.engine(setup.folder("Qwen3-8B"), **flags) as llm:
        once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        work = [{"prompt_token_ids": [5 + i % 100 for i in range(long)]}]
        took = setup.seconds(lambda: llm.generate(work, once, use_tqdm=False), 3)
        setup.line("8B, prompt", 2 * weights * long / took, "FLOP/s", setup.rate, 0.65)
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        prompts = [{"prompt_token_ids": [7 + (i * j) % 97 for j in range(prompt)]}
                   for i in range(rows)]  # fmt: skip
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - began
        context = rows * (prompt + output / 2) * kept
        step = max((2 * weights + context) / setup.bandwidth, 2 * weights * rows / setup.rate)
        roof = output * step + 2 * weights * rows * prompt / setup.rate
        setup.line("8B, 256 streams", rows * output / took, "tokens/s", rows * output / roof, 0.8)


def idle(setup: Setup) -> None:
    """Idle share of the GPU in a decode step at 256 rows, from torch's profiler."""
    from modulm import SamplingParams

    rows, tokens = (2, 4) if setup.tiny else (256, 48)
    flags = {"load_format": "dummy", "max_num_seqs": rows}
    with setup.engine(setup.folder("Qwen3-8B"), **flags) as llm:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        prompts = [{"prompt_token_ids": [7 + i % 97]} for i in range(rows)]
        llm.generate(prompts, params, use_tqdm=False)
        with torch.profiler.profile() as profile:
            llm.generate(prompts, params, use_tqdm=False)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if setup.tiny or event.device_type != torch.autograd.DeviceType.CPU
    )
    spans = spans[len(spans) // 4 :]  # skips the prompts
    busy, end = 0.0, spans[0][0]
    for begin, stop in spans:
        busy += max(stop - max(begin, end), 0)
        end = max(end, stop)
    setup.line("idle share of decode steps", 1 - busy / max(end - spans[0][0], 1), "", aim=0.03)


def cold(setup: Setup) -> None:
    """`modulm generate` with an 8B on disk: from start to first token."""
    from safetensors.torch import save_file

    folder = Path(setup.folder("Qwen3-8B"))
    if setup.tiny:
        folder = ROOT / "none"
    else:
        _write_weights(setup, folder, save_file)
    model = "demo" if setup.tiny else str(folder)
    code = (
        "import sys, time, modulm\n"
        "if __name__ == '__main__':\n"
        "    flags = {} if sys.argv[1] == 'demo' else {'skip_tokenizer_init': True}\n"
        "    llm = modulm.LLM(sys.argv[1], device=sys.argv[2], max_model_len=256, **flags)\n"
        "    params = modulm.SamplingParams(max_tokens=1)\n"
        "    llm.generate([{'prompt_token_ids': [5, 6, 7]}], params, use_tqdm=False)\n"
    )
    words = [sys.executable, "-c", code, model, "cpu" if setup.tiny else setup.device]
    for turn in ("first start (kernels compile)", "second start"):
        began = time.perf_counter()
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=150)
        if done.returncode:
            raise AssertionError(done.stderr[-1500:])
        setup.line(f"8B from disk, first token: {turn}", time.perf_counter() - began, "s", aim=25)
        if setup.tiny:
            break


def _write_weights(setup: Setup, folder: Path, save: Callable[..., None]) -> None:
    """Write random weights of a Qwen3 under its published names, one file per layer."""
    shape = SHAPES["Qwen3-8B"]
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    heads, pairs, head = (
        shape[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )

    def made(*sizes: int) -> torch.Tensor:
        found = torch.randn(sizes, device=setup.torch_device, dtype=torch.bfloat16) * 0.02
        return found.cpu()

    for number in range(shape["num_hidden_layers"]):
        at = f"model.layers.{number}."
        parts = {
            "self_attn.q_proj.weight": made(heads * head, hidden),
            "self_attn.k_proj.weight": made(pairs * head, hidden),
            "self_attn.v_proj.weight": made(pairs * head, hidden),
            "self_attn.o_proj.weight": made(hidden, heads * head),
            "self_attn.q_norm.weight": made(head), "self_attn.k_norm.weight": made(head),
            "mlp.gate_proj.weight": made(wide, hidden), "mlp.up_proj.weight": made(wide, hidden),
            "mlp.down_proj.weight": made(hidden, wide),
            "input_layernorm.weight": made(hidden),
            "post_attention_layernorm.weight": made(hidden),
        }  # fmt: skip
        named = {at + name: tensor for name, tensor in parts.items()}
        save(named, folder / f"model-{number:05d}.safetensors")
    table = {"model.embed_tokens.weight": made(shape["vocab_size"], hidden),
             "lm_head.weight": made(shape["vocab_size"], hidden),
             "model.norm.weight": made(hidden)}  # fmt: skip
    save(table, folder / "model-99999.safetensors")


#: Factor of the limits in a dry run, which shares its machine with other tests.
_DRY = 6
#: Section -> time limit in seconds; correctness first.
SECTIONS: dict[Callable[[Setup], None], int] = {
    machine: 15, kernels: 100, families: 60, graphs: 50, adapters: 50, streams: 40,
    attention: 20, low_precision: 30, sums: 15, decode: 70, throughput: 65, idle: 35, cold: 50,
}  # fmt: skip


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TooLong in the body after `seconds`."""

    def ring(*_: object) -> None:
        raise TooLong(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(setup: Setup, names: list[str], budget: float, out: Path) -> dict[str, Any]:
    """Run sections in order and return their results; writes them after each."""
    began = time.monotonic()
    kind = "dry run: nothing ran on hardware" if setup.tiny else setup.device
    found: dict[str, Any] = {
        "machine": kind, "host": host.node(), "torch": torch.__version__,
        "command": " ".join(sys.argv), "sections": {},
    }  # fmt: skip
    if not setup.tiny:
        found["gpu"] = torch.get_device_module(setup.torch_device).get_device_name()
    for section, seconds in SECTIONS.items():
        if section.__name__ not in names:
            continue
        setup.lines, start = [], time.monotonic()
        ended = "done"
        try:
            most = seconds * (_DRY if setup.tiny else 1)
            with within(min(most, budget - (start - began))):
                section(setup)
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"[:2000]
            traceback.print_exc()
        took = round(time.monotonic() - start, 2)
        told = {"ended": ended, "seconds": took, "lines": setup.lines}
        found["sections"][section.__name__] = told
        out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        out.with_suffix(".txt").write_text(table(found))
    return found


def table(found: dict[str, Any]) -> str:
    """Format the results as text."""
    rows = [f"{found['machine']} {found.get('gpu', '')}".strip()]
    for name, section in found["sections"].items():
        rows.append(f"{name}: {section['ended']} ({section['seconds']} s)")
        for line in section["lines"]:
            share = "" if line["share"] is None else f"  {line['share']:.2f} of the limit"
            aim = f"  (aim {line['aim']})" if line["aim"] else ""
            rows.append(f"  {line['what']}: {line['value']:.4g} {line['unit']}{share}{aim}")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "rocm", "xpu"))
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results")
    parser.add_argument("--sections", default=",".join(s.__name__ for s in SECTIONS))
    parser.add_argument("--budget", type=float, default=520.0)
    given = parser.parse_args()
    names = given.sections.split(",")
    unknown = set(names) - {section.__name__ for section in SECTIONS}
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}")
    given.out.mkdir(parents=True, exist_ok=True)
    stamp = "dry-run" if given.dry_run else time.strftime("gpu-%Y-%m-%d-%H%M")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as place:
        setup = Setup(given.device, given.dry_run, Path(place))
        found = run(setup, names, given.budget, given.out / stamp)
    print(table(found), end="")
    return 0 if all(s["ended"] == "done" for s in found["sections"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
