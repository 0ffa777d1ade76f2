"""Which parts of a prompt its request asks to hold, in the fields of each API.

OpenAI's fields name the whole prompt. Anthropic's `cache_control` marks the end of a block; its
place in the prompt is found in the rendered text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm_prefix_retention import FIELD, Mark
from modulm_server.json_body import bad_field

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer
    from modulm_server.prompts import Prompt
    from modulm_server.text_work import TextWork

__all__ = ["Breakpoint", "cache_time", "creation_tokens", "held_prompt", "marks_at", "with_held"]

#: Seconds that each value of a field stands for.
_RETENTIONS: Mapping[str | None, int] = {
    None: 300, "in_memory": 300, "in-memory": 300, "24h": 86_400,
}  # fmt: skip
_TIMES: Mapping[str, int] = {"5m": 300, "1h": 3600}
#: Larger than any prompt.
_WHOLE = 2**31 - 1


def held_prompt(key: str | None, retention: str | None) -> dict[str, Any]:
    """Return the entry of `extra_args` for `prompt_cache_key` and `prompt_cache_retention`.

    Empty if the request has neither. Raises ApiError(400).
    """
    if retention not in _RETENTIONS:
        raise bad_field("prompt_cache_retention", "prompt_cache_retention must be in_memory or 24h")
    if key is None and retention is None:
        return {}
    return {FIELD: {"key": key or "", "marks": [[_WHOLE, _RETENTIONS[retention]]]}}


def with_held(
    arguments: Mapping[str, Any] | None, entry: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return `extra_args` with an entry. None: neither has any."""
    return {**(arguments or {}), **entry} or None


def cache_time(field: str, where: str, control: Any) -> int | None:
    """Return the seconds of a block's `cache_control`, or None. Raises ApiError(400)."""
    if control is None:
        return None
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        raise bad_field(field, f"{where}cache_control.type must be ephemeral")
    if unknown := control.keys() - {"type", "ttl"}:
        message = f"{where}cache_control has no field {min(map(str, unknown))[:64]!r}"
        raise bad_field(field, message)
    ttl = control.get("ttl", "5m")
    if ttl not in _TIMES:
        raise bad_field(field, f"{where}cache_control.ttl must be 5m or 1h")
    return _TIMES[ttl]


@frozen
class Breakpoint:
    """A block that ends what is to be held.

    text: of the block as the prompt has it, or of a part of it; empty: the block before it. begins:
    hold up to the beginning of the text instead. seconds: None for a block that is only passed.
    """

    text: str
    seconds: int | None
    begins: bool = False


async def marks_at(
    tokenizer: Tokenizer, work: TextWork, prompt: Prompt, breakpoints: Sequence[Breakpoint]
) -> list[Mark]:
    """Return marks for breakpoints, which follow each other in the prompt.

    The text after a breakpoint is tokenized to see how many of the prompt's tokens it has. Where
    images follow, the text before it is. A breakpoint between images holds what precedes the first.
    """
    if not any(point.seconds for point in breakpoints):
        return []
    text = prompt.text or ""
    places = _places(text, breakpoints)

    def count() -> list[Mark]:
        encode = tokenizer.encode
        spans = [] if prompt.media is None else [(i.start, i.length) for i in prompt.media.items]
        total, marks = len(prompt.ids), []
        for end, seconds in places:
            tokens = total - len(encode(text[end:], False)) if end < len(text) else total
            if any(tokens < start + length for start, length in spans):
                tokens = min(len(encode(text[:end], False)), spans[0][0])
            marks.append(Mark(max(0, min(tokens, total)), seconds))
        return marks

    marks: list[Mark] = await work.run(len(text) * len(places), count)
    return marks


def _places(text: str, breakpoints: Sequence[Breakpoint]) -> list[tuple[int, int]]:
    """Return the end of each breakpoint in the text, in characters, with its seconds."""
    places, reached = [], 0
    for point in breakpoints:
        sought = point.text.strip()
        start = text.find(sought, reached) if sought else -1
        if start >= 0:
            reached = start if point.begins else start + len(sought)
        if point.seconds is not None:
            places.append((reached, point.seconds))
    return places


def creation_tokens(output: Any) -> dict[int, int]:
    """Return the tokens that are held from this request on and were not cached before: by the
    seconds that they are held, in the order of the prompt.
    """
    counts: dict[int, int] = {}
    reached = output.num_cached_tokens or 0
    for tokens, seconds in output.retained:
        if tokens > reached:
            counts[int(seconds)] = counts.get(int(seconds), 0) + int(tokens) - reached
            reached = int(tokens)
    return counts
