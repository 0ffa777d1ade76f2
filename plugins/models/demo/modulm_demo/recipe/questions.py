"""The 300 questions that judge the model; what they ask is never in the training text."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from .example import normalized

_FILE = Path(__file__).with_name("questions.jsonl")


@cache
def questions() -> tuple[dict[str, Any], ...]:
    """Each with its category, the user's turns, and what a right answer is.

    `accept` is a pattern of the answer; `unknown` marks what nobody could know; `call` is the name
    and the arguments of the call that is wanted, `calls` a name and how many. `tools` are there,
    and `after` are calls already made with their results.
    """
    return tuple(map(json.loads, _FILE.read_text(encoding="utf-8").splitlines()))


@cache
def _known_questions() -> frozenset[str]:
    return frozenset(normalized(row["ask"][0]) for row in questions() if len(row["ask"]) == 1)


def is_asked(prompt: str) -> bool:
    """Whether a question is this prompt, but for case, spacing and punctuation.

    Conversations of several turns are judged by their last, and begin with plain questions.
    """
    return normalized(prompt) in _known_questions()
