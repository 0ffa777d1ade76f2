"""Tool calls of Llama 3.1 to 4, and of models with the same templates: the whole message is a call.

Source: the JSON and the pythonic tool templates of Llama 3 and Llama 4; ToolACE.
"""

from __future__ import annotations

from modulm.contracts.parser import Example
from modulm_parsing import CallKeys, JsonCalls, PythonCalls
from modulm_parsing.examples import weather

__all__ = ["Llama3JsonToolParser", "Llama4PythonicToolParser", "PythonicToolParser"]

_CALL = '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}'
_LIST = "[get_weather(city='Oslo', days=3)]"


class Llama3JsonToolParser(JsonCalls):
    """An object with a name but without arguments is content."""

    name = "llama3_json"
    api = 1
    openers = ("<|python_tag|>",)
    bare = "{"
    separators = ";"
    keys = CallKeys(needed=True)
    examples = (
        weather(_CALL),
        weather(f"<|python_tag|>{_CALL}"),
        weather(f"{_CALL}; {_CALL}", count=2),
        Example('{"name": "Oslo", "size": 3}', '{"name": "Oslo", "size": 3}'),
        Example(f"I call {_CALL}", f"I call {_CALL}"),
    )


class PythonicToolParser(PythonCalls):
    """A list with anything but calls is content."""

    name = "pythonic"
    api = 1
    bare = True
    examples = (
        weather(_LIST),
        weather("[get_weather(city='Oslo', days=3), get_weather(city='Oslo', days=3)]", count=2),
        Example("[1, 2]", "[1, 2]"),
        Example("[f()]", calls=(("f", {}),)),
    )


class Llama4PythonicToolParser(PythonicToolParser):
    """As above, optionally between special tokens."""

    name = "llama4_pythonic"
    api = 1
    openers = ("<|python_start|>",)
    closers = ("<|python_end|>",)
    examples = (weather(_LIST), weather(f"<|python_start|>{_LIST}<|python_end|>"))
