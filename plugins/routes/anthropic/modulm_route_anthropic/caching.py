"""`cache_control`: which blocks of a conversation end a prefix that is to be held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from modulm_server.json_body import bad_field
from modulm_server.prompt_caching import Breakpoint, cache_time

if TYPE_CHECKING:
    from modulm_route_anthropic.schema import MessagesRequest

__all__ = ["breakpoints_of"]

#: Anthropic's limit.
_MOST = 4


def breakpoints_of(body: MessagesRequest) -> list[Breakpoint]:
    """Return the blocks of a checked conversation in the order of the prompt. Raises ApiError(400).

    Tools are rendered before or after the system prompt, as the template likes: one that is marked
    holds all up to the first message.
    """
    times = [
        cache_time("tools", f"tools[{index}].", tool.get("cache_control"))
        for index, tool in enumerate(body.tools or ())
    ]
    system = [] if isinstance(body.system, str | None) else list(_blocks("system", body.system))
    talk: list[Breakpoint] = []
    for index, message in enumerate(body.messages):
        content = message["content"]
        if isinstance(content, str):
            talk.append(Breakpoint(content, None))
            continue
        # The prompt has a message's tool results first.
        results = [block.get("type") == "tool_result" for block in content]
        points = list(_blocks(f"messages[{index}].content", content))
        talk += [point for point, first in zip(points, results, strict=True) if first]
        talk += [point for point, first in zip(points, results, strict=True) if not first]
    own = cache_time("cache_control", "", body.cache_control)
    chosen = [*times, *(point.seconds for point in (*system, *talk)), own]
    seconds = [value for value in chosen if value is not None]
    if len(seconds) > _MOST:
        raise bad_field("messages", f"cache_control: at most {_MOST} blocks may have one")
    if any(after > before for before, after in pairwise(seconds)):
        raise bad_field(
            "messages",
            "cache_control: blocks with ttl 1h must come before those with 5m, in the order "
            "tools, system, messages",
        )
    marked = max((value for value in times if value is not None), default=None)
    tools = [Breakpoint(talk[0].text, marked, begins=True)] if talk and marked else []
    return [*system, *tools, *talk]


def _blocks(where: str, blocks: Sequence[Any]) -> Iterator[Breakpoint]:
    field = where.partition("[")[0]
    for index, block in enumerate(blocks):
        seconds = cache_time(field, f"{where}[{index}].", block.get("cache_control"))
        yield Breakpoint(_text(block), seconds)


def _text(block: Mapping[str, Any]) -> str:
    """Return text of the block that the prompt has."""
    match block.get("type"):
        case "tool_use" | "mcp_tool_use":
            return str(block["name"])
        case "thinking":
            return str(block["thinking"])
        case "tool_result" | "mcp_tool_result":
            content = block.get("content") or ""
            if isinstance(content, str):
                return content
            texts = [part.get("text") for part in content if part.get("type") == "text"]
            return str(texts[-1]) if texts else ""
        case _:
            return str(block.get("text") or "")
