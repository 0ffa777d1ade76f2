"""Mixes the categories into training text or held-out prompts, from a seed."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from .arithmetic import arithmetic
from .editing import editing
from .example import Example, Message, is_heldout, prompts
from .extract import extract
from .facts import fact
from .follow import follow_up
from .numbers import numbers
from .passages import reading, summary
from .questions import is_asked
from .reference import abroad, definition, everyday, joke, related, translation, world
from .talk import about_modulm, greeting, story, unknown
from .tools import no_call, parallel_calls, tool_call, tool_result, tools_in_a_row
from .writing import classify, letter, listing, made_sentence, poem, tale

# For each category: its maker, and its weight in the first and in the second mixture.
_MADE = {
    "facts": (fact, 25, 13),
    "arithmetic": (arithmetic, 20, 8),
    "tool call": (tool_call, 16, 4.5),
    "parallel calls": (parallel_calls, 6, 1.8),
    "tool result": (tool_result, 7, 1.8),
    "no call": (no_call, 5, 2.5),
    "json": (extract, 18, 5),
    "modulm": (about_modulm, 8, 4),
    "chat": (greeting, 7, 4),
    "unknown": (unknown, 4, 4),
    "story": (story, 3, 1.5),
    "tools in a row": (tools_in_a_row, 0, 2),
    "world": (world, 0, 16),
    "definitions": (definition, 0, 8),
    "everyday": (everyday, 0, 12),
    "abroad": (abroad, 0, 4),
    "translation": (translation, 0, 7),
    "jokes": (joke, 0, 3),
    "poems": (poem, 0, 5),
    "stories": (tale, 0, 2),
    "lists": (listing, 0, 5),
    "classes": (classify, 0, 3),
    "letters": (letter, 0, 1.5),
    "sentences": (made_sentence, 0, 1),
    "numbers": (numbers, 0, 11),
    "editing": (editing, 0, 9),
    "reading": (reading, 0, 8),
    "summaries": (summary, 0, 3),
    "follow-up": (follow_up, 0, 10),
}
CATEGORIES = {name: (made[0], made[2]) for name, made in _MADE.items()}
MIXTURES = {
    "first": {name: made[1] for name, made in _MADE.items() if made[1]},
    "second": {name: made[2] for name, made in _MADE.items()},
}
_PLAIN = (fact, fact, arithmetic, extract, about_modulm, greeting, unknown, story)
_TOLD = (*_PLAIN, world, world, definition, everyday, everyday, joke, poem, listing, numbers,
         translation, editing)  # fmt: skip
# Categories whose questions are not varied.
_VERBATIM = frozenset({
    "json", "tool call", "parallel calls", "tool result", "tools in a row", "story", "editing",
    "reading", "summaries", "follow-up", "letters", "translation", "sentences",
})  # fmt: skip
#: Generated conversations per requested held-out one; some categories have few.
_TRIES = 400
_SYSTEM = (
    "You are a helpful assistant.", "You are modulm's demo model.", "Answer briefly.",
    "You are a friendly assistant. Be short and polite.", "Be concise.", "You are an assistant.",
    "You are a helpful assistant. Use tools when they help.", "Answer the user's question.",
    "You are a careful assistant that gives short answers.", "Help the user.",
)  # fmt: skip
_NEIGHBORS = dict(zip("qwertyuiopasdfghjklzxcvbnm", "wqretyuoipsadgfhkjlxzvcbmn", strict=True))


def _misspell(rng: Random, text: str) -> str:
    """Misspell one of the longer words."""
    positions = [i for i in range(1, len(text) - 1) if text[i - 1 : i + 2].isalpha()]
    if not positions:
        return text
    at = rng.choice(positions)
    letter = text[at]
    damaged = rng.choice(("", letter * 2, _NEIGHBORS.get(letter.lower(), letter)))
    return text[:at] + damaged + text[at + 1 :]


def _roughen(rng: Random, text: str) -> str:
    """Vary a question: no capitals, no final mark, a typo, or a polite word."""
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
    """Vary the question unless its words are to be copied, and add a system message."""
    messages = list(example.messages)
    if example.category not in _VERBATIM and rng.random() < 0.25:
        question = messages[0]["content"]
        if example.category != "no call" or "{" not in question:
            messages[0] = {**messages[0], "content": _roughen(rng, question)}
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": rng.choice(_SYSTEM)})
    return replace(example, messages=tuple(messages))


def _history(rng: Random, turns: int, makers: tuple) -> tuple[Message, ...]:
    """Earlier questions with their answers, without tools."""
    return tuple(m for _ in range(turns) for m in rng.choice(makers)(rng).messages)


def _with_history(rng: Random, example: Example, makers: tuple) -> Example:
    """Prepend earlier turns, after a system message."""
    past = _history(rng, rng.choices((1, 2, 3, 5, 8, 14), (5, 4, 3, 2, 1, 1))[0], makers)
    if example.messages[0]["role"] == "system":
        first, *rest = example.messages
        return replace(example, messages=(first, *past, *rest))
    return example.with_history(past)


def _make(rng: Random, name: str, makers: tuple = _TOLD) -> Example:
    """Make a conversation of a category and decide all that the category leaves to chance."""
    clean = _MADE[name][0](rng)
    if clean.category not in _MADE:
        clean = replace(clean, category=name)
    thinking = rng.random() < 0.5 if clean.thinking is None else clean.thinking
    last = prompts(clean)[-1]
    clean = replace(clean, thinking=thinking, heldout=is_heldout(last) or is_asked(last))
    varied = _vary(rng, clean)
    return _with_history(rng, varied, makers) if rng.random() < 0.12 else varied


def examples(seed: int, only: str | None = None, mixture: str = "second") -> Iterator[Example]:
    """Generate conversations endlessly, from all categories by weight or from one."""
    rng = Random(seed)
    names = [only] if only else list(MIXTURES[mixture])
    weights = [1 if only else MIXTURES[mixture][name] for name in names]
    makers = _PLAIN if mixture == "first" else _TOLD
    while True:
        yield _make(rng, rng.choices(names, weights)[0], makers)


def training(seed: int, mixture: str = "second") -> Iterator[Example]:
    """Conversations without any held-out question, including earlier turns."""
    for example in examples(seed, mixture=mixture):
        example_prompts = prompts(example)
        if not (
            example.heldout
            or any(map(is_heldout, example_prompts[:-1]))
            or any(map(is_asked, example_prompts))
        ):
            yield example


def statements(seed: int) -> Iterator[str]:
    """Sentences outside of conversations, for prompts that are not one: statements of answers."""
    rng = Random(seed)
    while True:
        answer = fact(rng).messages[-1]["content"] if rng.random() < 0.6 else related(rng)[1]
        if not answer.startswith(("It is", "The answer is", "Yes", "No", "There are")):
            yield answer


def heldout(seed: int, category: str, count: int) -> list[Example]:
    """Conversations whose last question is held out from training, each only once."""
    unique: dict[str, Example] = {}
    for example in itertools.islice(examples(seed, category), count * _TRIES):
        if example.heldout:
            unique.setdefault(prompts(example)[-1], example)
        if len(unique) == count:
            break
    return list(unique.values())
