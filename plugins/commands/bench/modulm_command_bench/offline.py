"""`modulm bench latency` and `throughput`: a model in this process, or transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from attrs import field, frozen
from tqdm import tqdm

from modulm.config import EngineConfig
from modulm.contracts.sampling import SamplingParams
from modulm_command_bench.drafts import Drafts, of_outputs
from modulm_command_bench.samples import Recipe, Sample, make_samples
from modulm_frontend.beam_search import BeamSearchParams

if TYPE_CHECKING:
    from modulm.contracts.outputs import RequestOutput

__all__ = ["Latency", "latency", "throughput"]


@frozen(kw_only=True)
class Latency:
    """The flags of a latency run."""

    input_len: int
    output_len: int
    batch_size: int
    n: int
    iterations: int
    warmups: int
    beams: bool
    detokenize: bool
    profile: str | None


def latency(config: EngineConfig, flags: Latency) -> dict[str, Any]:
    """Time one batch repeatedly."""
    from modulm_frontend.llm import LLM

    engine = LLM.from_config(config)
    rng = np.random.default_rng(0)
    vocabulary = min(10_000, engine.info.vocabulary)
    prompts = [
        {"prompt_token_ids": rng.integers(0, vocabulary, flags.input_len).tolist()}
        for _ in range(flags.batch_size)
    ]
    run = _batch(engine, prompts, flags)
    for _ in tqdm(range(flags.warmups), desc="warm-up"):
        run()
    if flags.profile is not None:
        _profile(run, flags.profile)
        return {}
    times, last = [], []
    for _ in tqdm(range(flags.iterations), desc="iterations"):
        start = perf_counter()
        last = run()
        times.append(perf_counter() - start)
    results: dict[str, Any] = {"avg_latency": float(np.mean(times)), "latencies": times}
    results["percentiles"] = {
        str(q): float(np.percentile(times, q)) for q in (10, 25, 50, 75, 90, 99)
    }
    if not flags.beams:
        results |= of_outputs(last).figures()
    click.echo(f"average latency: {results['avg_latency']:.4f} s")
    for q, seconds in results["percentiles"].items():
        click.echo(f"{q}% percentile: {seconds:.4f} s")
    _echo_drafts(results)
    return results


def _echo_drafts(results: Mapping[str, Any]) -> None:
    if "spec_decode_num_drafts" in results:
        click.echo(
            f"drafts: {results['spec_decode_acceptance_rate']:.1f}% of "
            f"{results['spec_decode_draft_tokens']} tokens right, "
            f"{results['spec_decode_acceptance_length']:.2f} tokens a step"
        )


def _batch(engine: Any, prompts: Sequence[Any], flags: Latency) -> Callable[[], list[Any]]:
    if flags.beams:
        beams = BeamSearchParams(flags.n, flags.output_len, ignore_eos=True)
        return lambda: engine.beam_search(prompts, beams)
    params = SamplingParams(
        n=flags.n,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=flags.output_len,
        detokenize=flags.detokenize,
    )
    return lambda: engine.generate(prompts, params, use_tqdm=False)


def _profile(run: Callable[[], object], path: str) -> None:
    """Run a batch under torch's profiler and write a trace for chrome://tracing or Perfetto."""
    from torch.profiler import profile

    with profile(record_shapes=False) as profiler:
        run()
    profiler.export_chrome_trace(path)
    click.echo(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))
    click.echo(f"written: {path}", err=True)


@frozen
class _Run:
    """A backend's run: seconds, prompt tokens, generated tokens, and draft statistics."""

    seconds: float
    read: int
    generated: int
    drafts: Drafts = field(factory=Drafts)


def throughput(
    config: EngineConfig,
    backends: Sequence[str],
    recipe: Recipe,
    *,
    n: int,
    hf_batch: int | None,
    detokenize: bool,
    adapter: str | None = None,
) -> dict[str, Any]:
    """Measure tokens per second of each backend on the same prompts. adapter: folder of an adapter
    that all prompts use.
    """
    samples = make_samples(recipe, _tokenizer(config))
    if any(sample.media for sample in samples):
        raise click.UsageError(
            f"dataset {recipe.path} has images: measure them with `modulm bench serve` and "
            "--backend openai-chat"
        )
    results = {
        name: _run(name, config, samples, n, hf_batch, detokenize, adapter) for name in backends
    }
    first: float | None = None
    by_backend: dict[str, Any] = {}
    for name, run in results.items():
        rate = (run.read + run.generated) / run.seconds
        first = first or rate
        figures = {
            "elapsed_time": run.seconds,
            "num_requests": len(samples),
            "total_num_tokens": run.read + run.generated,
            "requests_per_second": len(samples) / run.seconds,
            "tokens_per_second": rate,
            "output_tokens_per_second": run.generated / run.seconds,
            **run.drafts.figures(),
        }
        by_backend[name] = figures
        times = f", {rate / first:.2f} of {backends[0]}" if name != backends[0] else ""
        click.echo(
            f"{name}: {figures['requests_per_second']:.2f} requests/s, {rate:.2f} tokens/s, "
            f"{figures['output_tokens_per_second']:.2f} output tokens/s{times}"
        )
        _echo_drafts(figures)
    return by_backend[backends[0]] if len(backends) == 1 else by_backend


def _tokenizer(config: EngineConfig) -> Any:
    from modulm.loading import open_checkpoint
    from modulm.plugins import current
    from modulm_tokenizers.tokenizer import open_tokenizer

    path = "" if config.model.tokenizer else str(open_checkpoint(config, current()).path)
    return open_tokenizer(config, path)


def _run(
    name: str,
    config: EngineConfig,
    samples: Sequence[Sample],
    n: int,
    hf_batch: int | None,
    detokenize: bool,
    adapter: str | None,
) -> _Run:
    if name == "hf":
        return _run_transformers(config, samples, n, hf_batch or 1)
    params = [
        SamplingParams(
            n=n, temperature=1.0, ignore_eos=True, max_tokens=s.output_len, detokenize=detokenize
        )
        for s in samples
    ]
    runner = _run_async if name == "async" else _run_engine
    return runner(config, samples, params, adapter)


def _run_engine(
    config: EngineConfig,
    samples: Sequence[Sample],
    params: list[SamplingParams],
    adapter: str | None,
) -> _Run:
    from modulm_frontend.llm import LLM
    from modulm_frontend.lora import LoRARequest

    lora = None if adapter is None else LoRARequest("bench", 1, adapter)
    with LLM.from_config(config) as engine:
        prompts = [{"prompt_token_ids": list(sample.ids)} for sample in samples]
        start = perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=True, lora_request=lora)
        seconds = perf_counter() - start
    generated = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return _Run(seconds, sum(s.input_len for s in samples), generated, of_outputs(outputs))


def _run_async(
    config: EngineConfig,
    samples: Sequence[Sample],
    params: list[SamplingParams],
    adapter: str | None,
) -> _Run:
    """Run on AsyncLLM, as the server does."""
    from modulm_server.engine.adapters import Adapter
    from modulm_server.engine.async_llm import AsyncLLM

    async def one(engine: Any, number: int) -> RequestOutput:
        prompt = {"prompt_token_ids": list(samples[number].ids)}
        last: Any = None
        adapter_name = adapter and "bench"
        async for output in engine.generate(
            prompt, params[number], str(number), adapter=adapter_name
        ):
            last = output
        return last

    async def everything() -> _Run:
        engine = AsyncLLM.from_config(config)
        try:
            if adapter is not None:
                await asyncio.wrap_future(engine.load_adapter(Adapter("bench", adapter)))
            start = perf_counter()
            outputs = await asyncio.gather(*(one(engine, number) for number in range(len(samples))))
            seconds = perf_counter() - start
        finally:
            engine.shutdown()
        generated = sum(len(part.token_ids) for output in outputs for part in output.outputs)
        return _Run(seconds, sum(s.input_len for s in samples), generated, of_outputs(outputs))

    return asyncio.run(everything())


def _run_transformers(config: EngineConfig, samples: Sequence[Sample], n: int, batch: int) -> _Run:
    """Run transformers' generate on the same checkpoint, in padded batches."""
    import torch
    from transformers import AutoModelForCausalLM

    from modulm.loading import open_checkpoint
    from modulm.plugins import current

    path = open_checkpoint(config, current()).path
    dtype = config.model.dtype
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.eval()
    generated = 0
    start = perf_counter()
    with torch.inference_mode(), tqdm(total=len(samples), unit="request") as bar:
        for first in range(0, len(samples), batch):
            group = samples[first : first + batch]
            generated += _generate(model, group, n)
            bar.update(len(group))
    return _Run(perf_counter() - start, sum(s.input_len for s in samples), generated)


def _generate(model: Any, group: Sequence[Sample], n: int) -> int:
    """Generate for a padded batch; counts tokens up to each request's own length."""
    import torch

    width = max(sample.input_len for sample in group)
    ids = torch.zeros(len(group), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(group):
        ids[row, width - sample.input_len :] = torch.tensor(sample.ids)
        mask[row, width - sample.input_len :] = 1
    longest = max(sample.output_len for sample in group)
    model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        num_return_sequences=n,
        min_new_tokens=longest,
        max_new_tokens=longest,
        pad_token_id=0,
    )
    return n * sum(sample.output_len for sample in group)
