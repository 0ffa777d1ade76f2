"""The call used in examples of output formats: `get_weather(city="Oslo", days=3)`."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from modulm.contracts.parser import Example, ParseContext

__all__ = ["TOOLS", "WEATHER", "thought", "weather"]

WEATHER = (("get_weather", {"city": "Oslo", "days": 3}),)
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of the coming days.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "options": {
                        "type": "object",
                        "properties": {
                            "units": {"type": "string"},
                            "hours": {"type": "array", "items": {"type": "integer"}},
                        },
                    },
                },
                "required": ["city"],
            },
        },
    },
)


def weather(text: str, content: str | None = None, count: int = 1, **changes: Any) -> Example:
    """Build an example that calls the tool `count` times."""
    example = Example(text, content, calls=WEATHER * count, context=ParseContext(tools=TOOLS))
    return evolve(example, **changes)


def thought(text: str, **keywords: Any) -> Example:
    """Build an example with the reasoning "Hm." and the answer "Hi". keywords: of the template."""
    context = ParseContext(template_kwargs=keywords)
    return Example(text, content="Hi", reasoning="Hm.", context=context)
