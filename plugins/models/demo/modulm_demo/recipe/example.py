"""The unit that generators produce, and the split between training and held-out prompts."""

import hashlib
import re
from dataclasses import dataclass, replace
from random import Random
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

HELDOUT_PERCENT = 6


@dataclass(frozen=True)
class Example:
    """A conversation; the last message is the answer to learn, or to compare with.

    `thinking` is the template variable; None leaves it to chance, for answers without a thought.
    `heldout` depends on the last question before it is varied. `expect` lists texts that a right
    answer contains; tool calls and JSON objects are compared with the last message instead.
    """

    category: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None
    expect: tuple[str, ...] = ()
    heldout: bool = False

    def with_history(self, before: tuple[Message, ...]) -> "Example":
        """Return this example after earlier turns."""
        return replace(self, messages=before + self.messages)


def user(text: str) -> Message:
    """A user turn."""
    return {"role": "user", "content": text}


def assistant(text: str, thought: str = "") -> Message:
    """An assistant turn; `thought` goes into its think block."""
    return {"role": "assistant", "content": text, "reasoning_content": thought}


def single(category: str, question: str, answer: str, expect: tuple[str, ...]) -> Example:
    """A conversation of one question and one answer without a thought."""
    return Example(category, (user(question), assistant(answer)), expect=expect)


def normalized(prompt: str) -> str:
    """Remove case, spacing and punctuation, so that trivial variants count as the same prompt."""
    return re.sub(r"[^\w+*/-]+", " ", prompt.lower()).strip()


def is_heldout(prompt: str) -> bool:
    """Split by a hash of the prompt alone, which holds for every seed."""
    digest = hashlib.sha256(normalized(prompt).encode()).digest()
    return digest[0] * 100 // 256 < HELDOUT_PERCENT


def prompts(example: Example) -> list[str]:
    """The texts of all user turns."""
    return [m["content"] for m in example.messages if m["role"] == "user"]


def fill(rng: Random, templates: tuple[str, ...] | list[str], **values: object) -> str:
    """Pick a template and fill its fields."""
    return rng.choice(templates).format(**values)
