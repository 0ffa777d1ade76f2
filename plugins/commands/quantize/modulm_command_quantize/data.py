"""Texts for calibration and evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from modulm.errors import ConfigError
from modulm.plugins.manager import PluginManager

__all__ = ["Texts", "read_texts"]

#: One in this many texts is for evaluation, the others are for calibration.
_EVERY = 4


@frozen
class Texts:
    """Token ids of texts for calibration and evaluation."""

    calibration: tuple[tuple[int, ...], ...]
    measured: tuple[tuple[int, ...], ...]

    def rows(self, count: int, length: int) -> list[list[int]]:
        """Return up to `count` calibration rows of `length` tokens. Raises ConfigError if there are
        none.
        """
        stream = [token for text in self.calibration for token in text]
        rows = [stream[at : at + length] for at in range(0, len(stream) - length + 1, length)]
        if not rows:
            raise ConfigError("data", f"{len(stream)} tokens do not fill a sample of {length}")
        return rows[:count]


def read_texts(
    data: Path | None, tokenizer: Any, plugins: PluginManager, length: int, most: int
) -> Texts | None:
    """Read the texts of a file, or of an installed model that has some; None without either.

    most: maximum evaluation tokens. Raises ConfigError for a file without text.
    """
    texts = _own(plugins) if data is None else _of_file(data)
    if not texts:
        return None
    coded = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    if len(coded) < _EVERY:  # one long text
        stream = [token for text in coded for token in text]
        coded = [tuple(stream[at : at + length]) for at in range(0, len(stream), length)]
    if len(coded) < _EVERY:
        raise ConfigError(
            "data", f"{data}: at least {_EVERY} texts of {length} tokens are required"
        )
    measured, total = [], 0
    for text in coded[::_EVERY]:
        if len(text) > 1 and total < most:
            measured.append(text[:length])
            total += len(text[:length])
    rest = (text for at, text in enumerate(coded) if at % _EVERY)
    return Texts(tuple(rest), tuple(measured))


def _own(plugins: PluginManager) -> Sequence[str]:
    for declared in plugins.names("checkpoints"):
        texts = tuple(plugins.load("checkpoints", declared.name).texts())
        if texts:
            return texts
    return ()


def _of_file(file: Path) -> Sequence[str]:
    """Read a text per line of JSON ("text"), or per paragraph. Raises ConfigError."""
    try:
        whole = file.read_text(encoding="utf-8")
        if file.suffix == ".jsonl":
            texts = [json.loads(line)["text"] for line in whole.splitlines() if line.strip()]
        else:
            texts = [part for part in whole.split("\n\n") if part.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "data", f"{file}: {error!r}; must be text, or JSON lines with a text each"
        ) from error
    if not all(isinstance(text, str) for text in texts) or not texts:
        raise ConfigError("data", f"{file}: contains no text")
    return texts
