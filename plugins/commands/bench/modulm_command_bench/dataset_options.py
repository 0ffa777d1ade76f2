"""Options of single datasets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

__all__ = ["dataset_options", "media_options"]

F = TypeVar("F", bound=Callable[..., Any])

_MEDIA = (
    click.option("--hf-subset", help="Subset of a dataset of the Hub. Default: its first."),
    click.option("--hf-split", help="Split of a dataset of the Hub. Default: test, or its first."),
    click.option(
        "--random-mm-base-items-per-request",
        type=click.IntRange(min=0),
        default=1,
        show_default=True,
        help="Images per prompt of random-mm.",
    ),
    click.option(
        "--random-mm-num-mm-items-range-ratio",
        type=float,
        default=0.0,
        show_default=True,
        help="Spread of the number of images, 0 to 1.",
    ),
    click.option(
        "--random-mm-limit-mm-per-prompt",
        metavar="JSON",
        help='Maximum number of images of a prompt: {"image": 3}.',
    ),
    click.option(
        "--random-mm-bucket-config",
        metavar="TABLE",
        help="Sizes of images and their shares: {(HEIGHT, WIDTH, 1): SHARE, ...}. "
        "Default: half 256 x 256, half 720 x 1280.",
    ),
)
_OPTIONS = (
    *_MEDIA,
    click.option(
        "--random-batch-size",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Documents per request of random-rerank.",
    ),
    click.option("--hf-output-len", type=int, help="Tokens per output of hf."),
    click.option("--spec-bench-output-len", type=int, help="Tokens per output of spec_bench."),
    click.option("--spec-bench-category", help="Category of spec_bench. Default: all."),
    click.option("--speed-bench-output-len", type=int, help="Tokens per output of speed_bench."),
    click.option("--speed-bench-category", help="Category of speed_bench. Default: all."),
    click.option(
        "--speed-bench-dataset-subset",
        default="qualitative",
        show_default=True,
        help="File of speed_bench in its folder, without .jsonl: qualitative, throughput_1k, ...",
    ),
    click.option(
        "--timed-trace-chunk-hash-size",
        type=click.IntRange(min=1),
        default=16,
        show_default=True,
        help="Tokens that an id of a trace stands for: 512 in Mooncake's, 16 in Qwen's.",
    ),
    click.option(
        "--timed-trace-sec-multiplier",
        type=float,
        default=1.0,
        show_default=True,
        help="Seconds of one unit of a trace's times; 0.001 for milliseconds.",
    ),
    click.option(
        "--timed-trace-label-timestamp",
        default="timestamp",
        show_default=True,
        help="Key of the time in a trace.",
    ),
    click.option(
        "--timed-trace-label-input-length",
        default="input_length",
        show_default=True,
        help="Key of a prompt's length in a trace.",
    ),
    click.option(
        "--timed-trace-label-output-length",
        default="output_length",
        show_default=True,
        help="Key of an output's length in a trace.",
    ),
    click.option(
        "--timed-trace-label-hash-ids",
        default="hash_ids",
        show_default=True,
        help="Key of the ids of a prompt's blocks in a trace.",
    ),
    click.option(
        "--sonnet-input-len",
        type=int,
        default=550,
        show_default=True,
        help="Tokens per prompt of sonnet.",
    ),
    click.option(
        "--sonnet-output-len",
        type=int,
        default=150,
        show_default=True,
        help="Tokens per output of sonnet.",
    ),
    click.option(
        "--sonnet-prefix-len",
        type=int,
        default=200,
        show_default=True,
        help="Tokens that all sonnet prompts share.",
    ),
)


def dataset_options(function: F) -> F:
    """Add the options to a command."""
    return _added(function, _OPTIONS)


def media_options(function: F) -> F:
    """Add the options of datasets with images to a command."""
    return _added(function, _MEDIA)


def _added(function: F, options: Sequence[Callable[[F], F]]) -> F:
    for option in reversed(options):
        function = option(function)
    return function
