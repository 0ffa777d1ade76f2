"""The contract kit for named chat templates.

from modulm_chat.testing import check_chat_template

def test_contract():
    check_chat_template(TEMPLATE)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from modulm.errors import ConfigError
from modulm.plugins import manager
from modulm.testing.kit import KitNotRun
from modulm_chat.conversation import normalise
from modulm_chat.named_templates import ChatTemplate
from modulm_chat.templates import TemplateFailed, check_template, execute

__all__ = ["check_chat_template"]

_ASK: tuple[Mapping[str, Any], ...] = ({"role": "user", "content": "first question"},)
_SYSTEM: tuple[Mapping[str, Any], ...] = (
    {"role": "system", "content": "be a pirate"},
    *_ASK,
)
_TURNS: tuple[Mapping[str, Any], ...] = (
    *_ASK,
    {"role": "assistant", "content": "an answer"},
    {"role": "user", "content": "second question"},
)
_FUNCTION: Mapping[str, Any] = {
    "name": "look_up_the_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city_name": {"type": "string"}}},
}
_TOOLS: tuple[Mapping[str, Any], ...] = ({"type": "function", "function": _FUNCTION},)
_CALLED: tuple[Mapping[str, Any], ...] = (
    *_ASK,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_abc12",
                "type": "function",
                "function": {"name": _FUNCTION["name"], "arguments": '{"city_name": "Lima"}'},
            }
        ],
    },
    {
        "role": "tool",
        "tool_call_id": "call_abc12",
        "name": _FUNCTION["name"],
        "content": "12 degrees",
    },
)
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def check_chat_template(driver: ChatTemplate) -> str:
    """Run the kit: conversations, tools and the prompt to answer, rendered in the sandbox.

    Returns what the template refuses, with its own message. Raises AssertionError with what was
    expected, KitNotRun if it refuses every conversation.
    """
    assert isinstance(driver, ChatTemplate), f"{driver!r} is no ChatTemplate"
    try:
        check_template(driver.source)
    except ConfigError as error:
        raise AssertionError(str(error)) from error
    for kind in ("tool_parser", "reasoning_parser"):
        name, known = getattr(driver, kind), manager.current().names(f"{kind}s")
        there = name is None or name in {each.name for each in known}
        assert there, f"{kind}: {name!r} is not installed"
    refused = []
    for what, messages, tools in (
        ("a question", _ASK, None),
        ("a system message", _SYSTEM, None),
        ("several turns", _TURNS, None),
        ("tools", _ASK, _TOOLS),
        ("calls of tools", _CALLED, _TOOLS),
    ):
        try:
            _check_conversation(driver, messages, tools)
        except TemplateFailed as error:
            if "raise_exception" not in driver.source:
                raise AssertionError(f"{what} cannot be rendered: {error}") from error
            refused.append(f"{what} ({error})")
    if len(refused) == 5:
        raise KitNotRun(f"the template refuses every conversation: {refused[0]}")
    if driver.tool_parser:
        needed = [each for each in refused if "tools" in each]
        assert not needed, f"it names a tool parser and refuses {needed[0]}"
    return f"refused: {', '.join(refused)}" if refused else ""


def _check_conversation(
    driver: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> None:
    with_tools = driver.tool_parser or re.search(r"\btools\b", driver.source)
    closed = _rendered(driver, messages, tools, prompt=False)
    asking = _rendered(driver, messages, tools, prompt=True)
    position = 0
    for message in messages:
        content = str(message["content"])
        assert content in asking, f"{message['role']}: {content!r} is not in the prompt"
        if message["role"] != "system":
            position = asking.find(content, position)
            assert position >= 0, f"{message['role']}: {content!r} is not in the order of messages"
        for call in message.get("tool_calls", ()) if with_tools else ():
            assert call["function"]["name"] in asking, "a call in the conversation is not shown"
            assert "Lima" in asking, "the arguments of a call are not shown"
    if tools and with_tools:
        assert _FUNCTION["name"] in asking, "a tool's name is not in the prompt"
        assert "city_name" in asking, "a tool's parameters are not in the prompt"
    missing = [word for word in ("None", "Undefined") if word in asking]
    assert not missing, f"a value is missing: {asking!r}"
    assert asking.rstrip() != messages[-1]["content"], "the prompt does not mark who speaks"
    again = _rendered(driver, messages, tools, prompt=True)
    assert again == asking, "the prompt differs the second time"
    begins = asking.startswith(closed.rstrip()) or messages[-1]["role"] != "user"
    assert begins, "add_generation_prompt changes more than the end of the prompt"


def _rendered(
    driver: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    prompt: bool,
) -> str:
    variables = {
        **_SPECIAL,
        "messages": normalise(messages, "string"),
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "documents": None,
        "add_generation_prompt": prompt,
    }
    return execute(driver.source, variables)
