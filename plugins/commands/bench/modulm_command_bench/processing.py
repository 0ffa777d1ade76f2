"""`modulm bench mm-processor`: how long the images of prompts take, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from attrs import evolve
from tqdm import tqdm

from modulm.contracts.sampling import SamplingParams
from modulm.plugins import manager
from modulm_command_bench.samples import Recipe, Sample, make_samples

if TYPE_CHECKING:
    from modulm.config import EngineConfig

__all__ = ["measure_processor"]

#: Stage -> what it is.
_STAGES = {
    "decode_secs": "decoding files to pixels or samples",
    "process_secs": "the model's processor",
    "total_secs": "the whole prompt: tokenizing, both of these, encoder, first token",
}


def measure_processor(
    config: EngineConfig, recipe: Recipe, *, warmups: int, percentiles: Sequence[float], quiet: bool
) -> dict[str, Any]:
    """Time the stages of each prompt, one after the other; returns seconds per prompt.

    Nothing is cached between the stages. Raises click.UsageError for a model without media.
    """
    from modulm_frontend.input_processor import InputProcessor
    from modulm_frontend.llm import LLM

    with LLM.from_config(config.with_(mm_processor_cache_gb=0.0)) as engine:
        tokenizer = engine.get_tokenizer()
        processor = InputProcessor(engine.info, tokenizer, manager.current(), ())
        reader = processor.media
        if reader is None:
            raise click.UsageError(f"{config.model.model} takes no images, audio or video")
        samples = make_samples(evolve(recipe, count=recipe.count + warmups), tokenizer)
        times: dict[str, list[float]] = {name: [] for name in _STAGES}
        for number, sample in enumerate(tqdm(samples, unit="prompt", disable=quiet)):
            messages = _messages(sample, tokenizer)
            began = perf_counter()
            _, media = processor.take_media(messages)
            decoded = perf_counter()
            for item in media:
                reader.prepare(item)
            processed = perf_counter()
            engine.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
            ended = perf_counter()
            if number >= warmups:
                stages = decoded - began, processed - decoded, ended - processed
                for name, seconds in zip(_STAGES, stages, strict=True):
                    times[name].append(seconds)
    results: dict[str, Any] = {"num_prompts": recipe.count}
    for name, what in _STAGES.items():
        values = times[name]
        results[f"mean_{name}"], results[f"median_{name}"] = np.mean(values), np.median(values)
        results |= {f"p{q:g}_{name}": np.percentile(values, q) for q in percentiles}
        shown = ", ".join(f"p{q:g} {np.percentile(values, q):.4f}" for q in percentiles)
        click.echo(f"{name}: mean {np.mean(values):.4f} s, {shown} ({what})")
    return {name: float(value) for name, value in results.items()}


def _messages(sample: Sample, tokenizer: Any) -> list[dict[str, Any]]:
    text = sample.text if sample.text is not None else tokenizer.decode(sample.ids)
    content = list(sample.content) or [{"type": "text", "text": text}, *sample.media]
    return [{"role": "user", "content": content}]
