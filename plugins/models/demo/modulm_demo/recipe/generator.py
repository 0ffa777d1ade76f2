"""Mixes the categories into the training text, or into the held-out prompts, from a seed."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from .arithmetic import arithmetic
from .example import Example, Message, is_heldout, prompts
from .extract import extract
from .facts import fact
from .talk import about_modulm, greeting, story, unknown
from .tools import no_call, parallel_calls, tool_call, tool_result

CATEGORIES = {
    "facts": (fact, 25),
    "arithmetic": (arithmetic, 20),
    "tool call": (tool_call, 16),
    "parallel calls": (parallel_calls, 6),
    "tool result": (tool_result, 7),
    "no call": (no_call, 5),
    "json": (extract, 18),
    "modulm": (about_modulm, 8),
    "chat": (greeting, 7),
    "unknown": (unknown, 4),
    "story": (story, 3),
}
_PLAIN = (fact, fact, arithmetic, extract, about_modulm, greeting, unknown, story)
_VERBATIM = frozenset({"json", "tool call", "parallel calls", "tool result", "story"})
_SYSTEM = (
    "You are a helpful assistant.", "You are modulm's demo model.", "Answer briefly.",
    "You are a friendly assistant. Be short and polite.", "Be concise.", "You are an assistant.",
    "You are a helpful assistant. Use tools when they help.", "Answer the user's question.",
    "You are a careful assistant that gives short answers.", "Help the user.",
)  # fmt: skip
_NEIGHBORS = dict(zip("qwertyuiopasdfghjklzxcvbnm", "wqretyuoipsadgfhkjlxzvcbmn", strict=True))


def _misspell(rng: Random, text: str) -> str:
    """Damage one longer word as a hasty typist would."""
    places = [i for i in range(1, len(text) - 1) if text[i - 1 : i + 2].isalpha()]
    if not places:
        return text
    at = rng.choice(places)
    letter = text[at]
    damaged = rng.choice(("", letter * 2, _NEIGHBORS.get(letter.lower(), letter)))
    return text[:at] + damaged + text[at + 1 :]


def _roughen(rng: Random, text: str) -> str:
    """Type like a person: no capitals, no final mark, a slip, or a polite word."""
    change = rng.randrange(6)
    if change == 0:
        return text.lower()
    if change == 1:
        return text.rstrip("?.!")
    if change == 2:
        return text.lower().rstrip("?.!")
    if change == 3:
        return f"{rng.choice(('Hi,', 'Hey,', 'Please:', 'Hello!', 'Ok,'))} {text}"
    return _misspell(rng, text) if change == 4 else text.upper() if rng.random() < 0.3 else text


def _vary(rng: Random, example: Example) -> Example:
    """Roughen the question where its words are not to be copied, and add a system message."""
    messages = list(example.messages)
    if example.category not in _VERBATIM and rng.random() < 0.25:
        question = messages[0]["content"]
        if example.category != "no call" or "{" not in question:
            messages[0] = {**messages[0], "content": _roughen(rng, question)}
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": rng.choice(_SYSTEM)})
    return replace(example, messages=tuple(messages))


def _history(rng: Random, turns: int) -> tuple[Message, ...]:
    """Earlier questions with their answers, without tools."""
    return tuple(m for _ in range(turns) for m in rng.choice(_PLAIN)(rng).messages)


def _with_history(rng: Random, example: Example) -> Example:
    """Put earlier turns in front, after a system message."""
    past = _history(rng, rng.choices((1, 2, 3, 5, 8, 14), (5, 4, 3, 2, 1, 1))[0])
    if example.messages[0]["role"] == "system":
        first, *rest = example.messages
        return replace(example, messages=(first, *past, *rest))
    return example.with_history(past)


def _make(rng: Random, name: str) -> Example:
    """Make one conversation of a category and settle all that the category leaves to chance."""
    clean = CATEGORIES[name][0](rng)
    thinking = rng.random() < 0.5 if clean.thinking is None else clean.thinking
    clean = replace(clean, thinking=thinking, heldout=is_heldout(prompts(clean)[-1]))
    varied = _vary(rng, clean)
    return _with_history(rng, varied) if rng.random() < 0.12 else varied


def examples(seed: int, only: str | None = None) -> Iterator[Example]:
    """Write conversations without end, from all categories by weight or from one."""
    rng = Random(seed)
    names = [only] if only else list(CATEGORIES)
    weights = [CATEGORIES[name][1] for name in names]
    while True:
        yield _make(rng, rng.choices(names, weights)[0])


def training(seed: int) -> Iterator[Example]:
    """Conversations of which no question is held out, those of earlier turns included."""
    for example in examples(seed):
        if not example.heldout and not any(map(is_heldout, prompts(example)[:-1])):
            yield example


def heldout(seed: int, category: str, count: int) -> list[Example]:
    """Conversations whose last question is held out from training, each only once."""
    found: dict[str, Example] = {}
    for example in itertools.islice(examples(seed, category), 200_000):
        if example.heldout:
            found.setdefault(prompts(example)[-1], example)
        if len(found) == count:
            break
    return list(found.values())
