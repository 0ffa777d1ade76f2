"""Benchmark prompts: random, from a text, or from recorded traffic."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from attrs import evolve, field, frozen

from modulm_command_bench.media_samples import (
    RandomMedia,
    content_parts,
    file_parts,
    random_parts,
    row_parts,
)
from modulm_command_bench.recorded import (
    RecordedOptions,
    chosen,
    hub_rows,
    prompt_of,
    read_lines,
    speed_bench,
    trace,
    trace_ids,
)
from modulm_command_bench.verses import VERSES

__all__ = ["Recipe", "Sample", "make_samples"]

#: Turns of ShareGPT outside these bounds are skipped.
_LEAST_TOKENS, _MOST_PROMPT, _MOST_TOTAL = 4, 1024, 2048


@frozen
class Sample:
    """A request: prompt token ids, the text if known, and the number of tokens to generate.

    `arrival`: seconds after the first request in recorded traffic. `model`: the one that it names,
    if requests name several. `media`: content parts of a chat message, behind the text; `content`:
    all of its parts, in their order. `documents`: texts to rank by the text.
    """

    ids: tuple[int, ...]
    output_len: int
    text: str | None = None
    arrival: float | None = None
    model: str | None = None
    media: tuple[Any, ...] = ()
    content: tuple[Any, ...] = ()
    documents: tuple[str, ...] = ()

    @property
    def input_len(self) -> int:
        """The number of prompt tokens."""
        return len(self.ids)


@frozen(kw_only=True)
class Recipe:
    """The options of a benchmark's prompts. None means the dataset's default.

    batch: documents per request of random-rerank.
    """

    name: str = "random"
    path: str | None = None
    count: int = 1000
    input_len: int | None = None
    output_len: int | None = None
    prefix_len: int = 0
    range_ratio: float = 0.0
    prefixes: int = 10
    shuffle: bool = True
    oversample: bool = True
    seed: int = 0
    media: RandomMedia = field(factory=RandomMedia)
    recorded: RecordedOptions = field(factory=RecordedOptions)
    batch: int = 1


def make_samples(recipe: Recipe, tokenizer: Any) -> list[Sample]:
    """Create the prompts of a recipe; deterministic for a seed.

    Raises click.UsageError for a missing or unreadable file and for invalid lengths.
    """
    rng = np.random.default_rng(recipe.seed % 2**64)
    samples = _MAKERS[recipe.name](recipe, tokenizer, rng)
    if not samples:
        raise click.UsageError(f"dataset {recipe.name} has no usable prompt")
    if len(samples) < recipe.count and recipe.oversample:
        samples = [samples[i % len(samples)] for i in range(recipe.count)]
    return samples[: recipe.count]


def _random(recipe: Recipe, tokenizer: Any, rng: np.random.Generator) -> list[Sample]:
    """Random ids: a shared prefix, then lengths drawn around the requested ones."""
    if not 0 <= recipe.range_ratio < 1:
        raise click.UsageError("--random-range-ratio is at least 0 and below 1")
    token_ids = _plain_ids(tokenizer)
    prefix = tuple(rng.choice(token_ids, recipe.prefix_len).tolist())
    inputs = _lengths(recipe.input_len or 1024, recipe, rng)
    outputs = _lengths(recipe.output_len or 128, recipe, rng)
    return [
        Sample((*prefix, *rng.choice(token_ids, size).tolist()), output)
        for size, output in zip(inputs, outputs, strict=True)
    ]


def _random_media(recipe: Recipe, tokenizer: Any, rng: np.random.Generator) -> list[Sample]:
    """Random text and images."""
    if not 0 <= recipe.media.spread <= 1:
        raise click.UsageError("--random-mm-num-mm-items-range-ratio is between 0 and 1")
    samples = _random(recipe, tokenizer, rng)
    return [evolve(sample, media=random_parts(recipe.media, rng)) for sample in samples]


def _lengths(around: int, recipe: Recipe, rng: np.random.Generator) -> list[int]:
    low = max(1, int(around * (1 - recipe.range_ratio)))
    high = max(low, int(around * (1 + recipe.range_ratio)))
    drawn: list[int] = rng.integers(low, high + 1, recipe.count).tolist()
    return drawn


def _plain_ids(tokenizer: Any) -> np.ndarray:
    """Ids of ordinary tokens, as special ones would end or structure a prompt."""
    special = set(tokenizer.backend.all_special_ids)
    return np.array([i for i in range(len(tokenizer)) if i not in special])


def _prefix_repetition(recipe: Recipe, tokenizer: Any, rng: np.random.Generator) -> list[Sample]:
    """A few prefixes, each with many different suffixes."""
    token_ids = _plain_ids(tokenizer)
    size, rest = recipe.prefix_len or 256, recipe.input_len or 256
    each, output = max(1, recipe.count // recipe.prefixes), recipe.output_len or 128
    samples: list[Sample] = []
    for _ in range(recipe.prefixes):
        prefix = rng.choice(token_ids, size).tolist()
        samples += [
            Sample((*prefix, *rng.choice(token_ids, rest).tolist()), output) for _ in range(each)
        ]
    return _shuffled(samples, recipe, rng)


def _sonnet(recipe: Recipe, tokenizer: Any, rng: np.random.Generator) -> list[Sample]:
    """An instruction and lines of a text; the first lines are the same in every prompt."""
    lines = VERSES if recipe.path is None else tuple(_read(recipe.path).splitlines())
    length, shared = recipe.input_len or 550, recipe.prefix_len or 200
    head = "Pick as many lines as you can from these poem lines:\n"
    sizes = np.array(
        [len(tokenizer.encode(line + "\n", add_special_tokens=False)) for line in lines]
    )
    mean = max(1.0, float(sizes.mean()))
    base = len(tokenizer.encode(head))
    if length <= base:
        raise click.UsageError(
            f"sonnet prompts take more than {base} tokens: raise the input length"
        )
    common = min(len(lines), max(0, round((shared - base) / mean)))
    rest = max(0, round((length - base) / mean) - common)
    samples: list[Sample] = []
    for _ in range(recipe.count):
        picked = [lines[i] for i in rng.choice(len(lines), rest, replace=rest > len(lines))]
        text = head + "\n".join([*lines[:common], *picked])
        samples.append(_of_text(text, recipe.output_len or 150, tokenizer))
    return samples


def _sharegpt(recipe: Recipe, tokenizer: Any, rng: np.random.Generator) -> list[Sample]:
    """The first question and answer of each conversation in a local JSON file."""
    try:
        table = json.loads(_read(_needed(recipe)))
    except json.JSONDecodeError as error:
        raise click.UsageError(f"{recipe.path} is not valid JSON: {error}") from error
    samples: list[Sample] = []
    for row in _order(table, recipe, rng):
        turns = row.get("conversations", row.get("conversation", []))
        if len(turns) < 2:
            continue
        answer = len(tokenizer.encode(turns[1]["value"], add_special_tokens=False))
        sample = _of_text(turns[0]["value"], recipe.output_len or answer, tokenizer)
        if _usable(sample, answer if recipe.output_len is None else sample.output_len):
            samples.append(sample)
        if len(samples) == recipe.count:
            break
    return samples


def _usable(sample: Sample, output: int) -> bool:
    small = sample.input_len < _LEAST_TOKENS or output < _LEAST_TOKENS
    large = sample.input_len > _MOST_PROMPT or sample.input_len + output > _MOST_TOTAL
    return not small and not large


def _burstgpt(recipe: Recipe, tokenizer: Any, rng: np.random.Generator) -> list[Sample]:
    """Lengths and times of recorded traffic (a local BurstGPT CSV), with random ids."""
    token_ids = _plain_ids(tokenizer)
    rows = list(csv.DictReader(_read(_needed(recipe)).splitlines()))
    samples: list[Sample] = []
    first: float | None = None
    try:
        for row in rows:
            size, output = int(row["Request tokens"]), int(row["Response tokens"])
            if size < 1 or output < 1:
                continue
            at = float(row["Timestamp"])
            first = at if first is None else first
            ids = tuple(rng.choice(token_ids, size).tolist())
            samples.append(Sample(ids, recipe.output_len or output, arrival=at - first))
            if len(samples) == recipe.count:
                break
    except (KeyError, ValueError) as error:
        raise click.UsageError(
            f"{recipe.path} is not a BurstGPT file with Timestamp, Request tokens, Response tokens"
        ) from error
    return samples


def _custom(recipe: Recipe, tokenizer: Any, rng: np.random.Generator) -> list[Sample]:
    """JSONL with `prompt` and optionally `output_tokens` per line."""
    rows = list(_json_lines(_needed(recipe)))
    samples: list[Sample] = []
    for row in _order(rows, recipe, rng):
        output = recipe.output_len or row.get("output_tokens", row.get("output_len")) or 256
        samples.append(_of_text(row["prompt"], int(output), tokenizer))
    return samples


def _custom_media(recipe: Recipe, tokenizer: Any, rng: np.random.Generator) -> list[Sample]:
    """JSONL as of `custom`, with `image_files`, `audio_files` and `video_files`, or `audio`, per
    line; or with `content`, the parts of a message.
    """
    path = _needed(recipe)
    rows, folder = [row for _, row in read_lines(path)], Path(path).parent
    samples: list[Sample] = []
    for row in _order(rows, recipe, rng)[: recipe.count]:
        output = recipe.output_len or row.get("output_tokens", row.get("output_len")) or 256
        if "content" in row:
            text, content = content_parts(row["content"], folder)
            samples.append(evolve(_of_text(text, int(output), tokenizer), content=content))
            continue
        if not isinstance(row.get("prompt"), str):
            raise click.UsageError(
                f"{path}: a line has neither `prompt` nor `content`: {row!r:.80}"
            )
        sample = _of_text(row["prompt"], int(output), tokenizer)
        samples.append(evolve(sample, media=file_parts(row, folder)))
    return samples


def _rerank(recipe: Recipe, tokenizer: Any, rng: np.random.Generator) -> list[Sample]:
    """A random query, and in each request `batch` random documents of the other half."""
    token_ids, half = _plain_ids(tokenizer), max(1, (recipe.input_len or 1024) // 2)
    query = tokenizer.decode(rng.choice(token_ids, half).tolist())
    samples: list[Sample] = []
    for _ in range(-(-recipe.count // recipe.batch)):
        sizes = _lengths(half, evolve(recipe, count=recipe.batch), rng)
        documents = [tokenizer.decode(rng.choice(token_ids, size).tolist()) for size in sizes]
        texts = [query, *documents]
        ids = tuple(id_ for text in texts for id_ in tokenizer.encode(text))
        samples.append(Sample(ids, 1, query, documents=tuple(documents)))
    return samples


def _spec_bench(recipe: Recipe, tokenizer: Any, rng: np.random.Generator) -> list[Sample]:
    """The first turns of SpecBench's question.jsonl."""
    path = _needed(recipe)
    rows = chosen([row for _, row in read_lines(path)], recipe.recorded.category)
    texts = [prompt_of(row) for row in rows]
    if not all(isinstance(row.get("turns"), list) for row in rows):
        raise click.UsageError(f"{path}: each line of SpecBench has a list `turns`")
    return _of_texts([text for text in texts if text is not None], recipe, tokenizer, rng)


def _speed_bench(recipe: Recipe, tokenizer: Any, rng: np.random.Generator) -> list[Sample]:
    """The first messages of a subset of SPEED-Bench; --dataset-path: its prepared folder."""
    return _of_texts(speed_bench(_needed(recipe), recipe.recorded), recipe, tokenizer, rng)


def _hub(recipe: Recipe, tokenizer: Any, rng: np.random.Generator) -> list[Sample]:
    """Rows of a dataset of the Hub, with their images; --dataset-path: its id."""
    name = _needed(recipe)
    samples: list[Sample] = []
    for row in hub_rows(name, recipe.recorded, recipe.count):
        text = prompt_of(row)
        if text is not None:
            sample = _of_text(text, recipe.output_len or 128, tokenizer)
            samples.append(evolve(sample, media=row_parts(row)))
    return _shuffled(samples, recipe, rng)


def _timed_trace(recipe: Recipe, tokenizer: Any, rng: np.random.Generator) -> list[Sample]:
    """Lengths, times and common beginnings of recorded traffic, with random ids."""
    options, token_ids = recipe.recorded, _plain_ids(tokenizer)
    requests = trace(_needed(recipe), options)[: recipe.count]
    made: dict[int, list[int]] = {}
    return [
        Sample(
            trace_ids(request, options.chunk, token_ids, recipe.seed, made),
            recipe.output_len or request.output_len,
            arrival=request.at - requests[0].at,
        )
        for request in requests
    ]


def _of_texts(
    texts: Sequence[str], recipe: Recipe, tokenizer: Any, rng: np.random.Generator
) -> list[Sample]:
    some = _order(texts, recipe, rng)[: recipe.count]
    return [_of_text(text, recipe.output_len or 256, tokenizer) for text in some]


def _json_lines(path: str) -> Iterator[dict[str, Any]]:
    for number, row in read_lines(path):
        if not isinstance(row.get("prompt"), str):
            raise click.UsageError(f"{path} line {number} has no `prompt` of text")
        yield row


def _of_text(text: str, output: int, tokenizer: Any) -> Sample:
    return Sample(tuple(tokenizer.encode(text)), output, text)


def _order(rows: Sequence[Any], recipe: Recipe, rng: np.random.Generator) -> list[Any]:
    return _shuffled(list(rows), recipe, rng)


def _shuffled(rows: list[Any], recipe: Recipe, rng: np.random.Generator) -> list[Any]:
    if recipe.shuffle:
        return [rows[i] for i in rng.permutation(len(rows))]
    return rows


def _needed(recipe: Recipe) -> str:
    if recipe.path is None:
        raise click.UsageError(f"dataset {recipe.name} needs --dataset-path FILE")
    return recipe.path


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from error


_MAKERS = {
    "random": _random,
    "random-mm": _random_media,
    "sharegpt": _sharegpt,
    "sonnet": _sonnet,
    "burstgpt": _burstgpt,
    "prefix_repetition": _prefix_repetition,
    "custom": _custom,
    "custom_mm": _custom_media,
    "custom_image": _custom_media,
    "custom_audio": _custom_media,
    "random-rerank": _rerank,
    "spec_bench": _spec_bench,
    "speed_bench": _speed_bench,
    "timed_trace": _timed_trace,
    "hf": _hub,
}
