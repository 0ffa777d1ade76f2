"""Benchmark prompts of published formats: traces with times, SpecBench, SPEED-Bench, and datasets
of the Hugging Face Hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
from attrs import frozen

__all__ = [
    "ROWS", "Recorded", "RecordedOptions", "chosen", "hub_rows", "prompt_of", "read_lines",
    "speed_bench", "trace", "trace_ids",
]  # fmt: skip

#: The Hub's service that answers with rows of datasets (huggingface.co/docs/dataset-viewer).
ROWS = "https://datasets-server.huggingface.co"
#: Rows per answer of that service.
_PAGE = 100
#: Columns that may hold a prompt, in this order; of a list, the first entry that a user wrote.
_COLUMNS = (
    "prompt", "turns", "messages", "conversations", "conversation", "question", "instruction",
    "problem", "query", "input", "text",
)  # fmt: skip


@frozen(kw_only=True)
class RecordedOptions:
    """The options of these datasets.

    category: of SpecBench and SPEED-Bench; None for all. subset: of SPEED-Bench. chunk: tokens that
    an id of a trace stands for. seconds: of one unit of its times. labels: its keys of time, input
    length, output length and ids. hub_subset, hub_split: of a dataset of the Hub.
    """

    category: str | None = None
    subset: str = "qualitative"
    chunk: int = 16
    seconds: float = 1.0
    labels: tuple[str, str, str, str] = ("timestamp", "input_length", "output_length", "hash_ids")
    hub_subset: str | None = None
    hub_split: str | None = None


def read_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line of a JSONL file. Raises click.UsageError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise click.UsageError(f"{path} line {number} is not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise click.UsageError(f"{path} line {number} is not a JSON object")
        yield number, row


def prompt_of(row: Mapping[str, Any]) -> str | None:
    """Return the prompt of a row: the first column of `_COLUMNS` with text; None without one."""
    for name in _COLUMNS:
        value = row.get(name)
        if isinstance(value, Sequence) and not isinstance(value, str) and value:
            value = _said(value[0])
        if isinstance(value, str) and value.strip():
            return value
    return None


def _said(entry: Any) -> Any:
    """Return the text of a conversation's first entry."""
    if isinstance(entry, Mapping):
        return entry.get("content", entry.get("value"))
    return entry


def speed_bench(folder: str, options: RecordedOptions) -> list[str]:
    """Read the prompts of a subset of SPEED-Bench from its prepared folder."""
    file = Path(folder) / f"{options.subset}.jsonl"
    rows = [row for _, row in read_lines(file)]
    return [text for row in chosen(rows, options.category) if (text := prompt_of(row)) is not None]


def chosen(rows: Sequence[Mapping[str, Any]], category: str | None) -> list[Mapping[str, Any]]:
    """Return the rows of a category. Raises click.UsageError naming the ones that there are."""
    selected = [row for row in rows if category is None or row.get("category") == category]
    if rows and not selected:
        known = ", ".join(sorted({str(row.get("category")) for row in rows}))
        raise click.UsageError(f"there is no category {category!r}: use one of {known}")
    return selected


@frozen
class Recorded:
    """A request of a trace: ids of its prompt's blocks, lengths in tokens, time in seconds."""

    blocks: tuple[int, ...]
    input_len: int
    output_len: int
    at: float


def trace(path: str, options: RecordedOptions) -> list[Recorded]:
    """Read a trace: a JSONL file with times, lengths, and ids of equal blocks of prompts, as
    Mooncake's and Qwen's traces have them. Raises click.UsageError naming the line.
    """
    time, input_len, output_len, ids = options.labels
    recorded = []
    for number, row in read_lines(path):
        try:
            size, output = int(row[input_len]), int(row[output_len])
            at = float(row[time]) * options.seconds
            blocks = tuple(map(int, row.get(ids) or ()))
        except (KeyError, TypeError, ValueError) as error:
            raise click.UsageError(
                f"{path} line {number}: {error!r}; set --timed-trace-label-timestamp, "
                "-input-length, -output-length and -hash-ids to the keys of this trace"
            ) from error
        if size > 0 and output > 0:
            recorded.append(Recorded(blocks, size, output, at))
    return recorded


def trace_ids(
    request: Recorded, chunk: int, token_ids: np.ndarray, seed: int, made: dict[int, list[int]]
) -> tuple[int, ...]:
    """Return the prompt of a trace's request: equal ids have equal tokens, others are random.

    made: the tokens of the ids so far.
    """
    tokens: list[int] = []
    for block in request.blocks:
        if len(tokens) >= request.input_len:
            break
        if block not in made:
            rng = np.random.default_rng((seed % 2**64, block % 2**64))
            made[block] = rng.choice(token_ids, chunk).tolist()
        tokens += made[block]
    missing = request.input_len - len(tokens)
    if missing > 0:
        rng = np.random.default_rng((seed % 2**64, len(made), missing))
        tokens += rng.choice(token_ids, missing).tolist()
    return tuple(tokens[: request.input_len])


def hub_rows(
    name: str, options: RecordedOptions, count: int, base: str = ROWS
) -> list[dict[str, Any]]:
    """Fetch the first rows of a dataset of the Hub, at most `count`. Raises click.UsageError.

    The Hub's service answers with rows; no package is needed. Media are URLs.
    """
    from huggingface_hub import get_token

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(base_url=base, headers=headers, timeout=60.0) as client:
        subset, split = options.hub_subset, options.hub_split
        if subset is None or split is None:
            splits = _answer(client, "/splits", dataset=name)["splits"]
            fitting = [
                each for each in splits
                if subset in (None, each["config"]) and split in (None, each["split"])
            ]  # fmt: skip
            if not fitting:
                known = ", ".join(f"{each['config']}/{each['split']}" for each in splits)
                raise click.UsageError(f"{name} has {known}: set --hf-subset and --hf-split")
            tests = [each for each in fitting if each["split"] == "test"]
            first = (tests or fitting)[0]
            subset, split = first["config"], first["split"]
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            page = {"offset": len(rows), "length": min(_PAGE, count - len(rows))}
            answer = _answer(client, "/rows", dataset=name, config=subset, split=split, **page)
            rows += [each["row"] for each in answer["rows"]]
            if len(answer["rows"]) < page["length"]:
                break
        return rows


def _answer(client: httpx.Client, path: str, **query: Any) -> dict[str, Any]:
    try:
        answer = client.get(path, params=query)
        answer.raise_for_status()
        table: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise click.UsageError(
            f"dataset {query['dataset']}: the Hub's service gave no rows ({error}); write the "
            "prompts to a JSONL file and use --dataset-name custom"
        ) from error
    return table
