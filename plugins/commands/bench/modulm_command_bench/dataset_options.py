"""Options of single datasets: of random images, and of sonnets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["dataset_options"]

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
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
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
