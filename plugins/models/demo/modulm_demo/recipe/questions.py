"""The 300 questions that evaluate the model; the training text never asks them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from .example import normalized

_FILE = Path(__file__).with_name("questions.jsonl")


@cache
def questions() -> tuple[dict[str, Any], ...]:
    """Load the questions: category, user turns, and the definition of a right answer.

    `accept` is a pattern of the answer; `unknown` marks unanswerable questions; `call` is the name
    and the arguments of the expected call, `calls` a name and a number. `tools` are available, and
    `after` are calls already made with their results.
    """
    return tuple(map(json.loads, _FILE.read_text(encoding="utf-8").splitlines()))


@cache
def _known_questions() -> frozenset[str]:
    return frozenset(normalized(row["ask"][0]) for row in questions() if len(row["ask"]) == 1)


def is_asked(prompt: str) -> bool:
    """Whether a prompt is one of the questions, ignoring case, spacing and punctuation.

    Of conversations, only the last turn counts; they begin with plain questions.
    """
    return normalized(prompt) in _known_questions()
