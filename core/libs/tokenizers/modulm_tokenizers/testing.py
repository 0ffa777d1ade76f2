"""What the contract kits of drivers that write prompts have in common."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from attrs import fields

from modulm.contracts.sampling import SamplingParams
from modulm.testing.checkpoints import make_tokenizer
from modulm.testing.kit import KitNotRun
from modulm_tokenizers.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["check_prompt", "tried"]

T = TypeVar("T")
_PARAMS = {attribute.name for attribute in fields(SamplingParams)}


@contextmanager
def tried(
    driver: Callable[..., T], sample: Mapping[str, Any] | None, use: Callable[[T], object]
) -> Iterator[tuple[T, Tokenizer]]:
    """Build a driver of a tokenizer, a checkpoint's folder and its config.json, and try it.

    sample: what config.json holds; None: the driver's `kit_sample`. use: what a driver that has its
    checkpoint can do. Yields it and its tokenizer, a small byte-level one. Raises KitNotRun for a
    driver without a sample that needs the files of its checkpoint.
    """
    config = getattr(driver, "kit_sample", None) if sample is None else sample
    with tempfile.TemporaryDirectory() as name:
        folder = make_tokenizer(Path(name))
        tokenizer = load_tokenizer(folder)
        try:
            made = driver(tokenizer, folder, config or {})
            use(made)
        except AssertionError:
            raise
        except Exception as error:
            if config is not None:
                raise
            raise KitNotRun(
                f"it needs its checkpoint ({type(error).__name__}: {error}): pass sample="
            ) from error
        yield made, tokenizer


def check_prompt(
    tokens: Sequence[int], params: Mapping[str, Any], tokenizer: Tokenizer, method: str
) -> None:
    """Check a prompt and the fields of SamplingParams that `method` set. Raises AssertionError."""
    assert len(tokens), f"{method}() gives an empty prompt"
    valid = all(isinstance(t, int | np.integer) and 0 <= t < len(tokenizer) for t in tokens)
    assert valid, f"{method}() gives tokens that the tokenizer does not have: {list(tokens)}"
    unknown = set(params) - _PARAMS
    assert not unknown, f"{method}() sets {', '.join(sorted(unknown))}: no field of SamplingParams"
