"""Templates that packages bring: what they write of calls is what their parsers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import ConfigError, RequestError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tokenizer
from modulm_chat.conversation import content_format, load_template, render
from modulm_chat.named_templates import ChatTemplate, named_template, template_name
from modulm_parsing import parse
from modulm_tokenizers.tokenizer import load_tokenizer

#: Tokens that end a turn: they are not part of what a model's text is read from.
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eot|>", "</s>", "<|end_of_text|>", "<|endoftext|>", "<|end|>",
    "<end_of_turn>", "<|eos|>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
#: Names of vLLM's examples that are taken as they are.
EXAMPLES = (
    "deepseekr1", "deepseekv3", "deepseekv31", "gemma3_pythonic", "granite", "granite_20b_fc",
    "hermes", "hunyuan_a13b", "internlm2_tool", "llama3.1_json", "llama3.2_json",
    "llama3.2_pythonic", "llama4_json", "llama4_pythonic", "mistral", "mistral3",
    "mistral_parallel", "phi4_mini", "qwen3coder", "toolace", "xlam_llama", "xlam_qwen",
)  # fmt: skip
ARGUMENTS: list[dict[str, Any]] = [
    {"city": 'Tromsø "N"', "days": 3, "exact": True, "unit": None, "at": {"x": [1.5, "<b>"]}},
    {"city": "Bergen", "days": -1},
]
PROPERTIES = {
    "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
    "unit": {"type": ["string", "null"]}, "at": {"type": "object"},
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Days of weather.",
        "parameters": {"type": "object", "properties": PROPERTIES},
    },
}
NAMES = [declared.name for declared in manager.current().names("chat_templates")]
#: Formats that have one call in a message.
SINGLE = {"internlm", "internlm2_tool"}


def calls(count: int) -> dict[str, Any]:
    tool_calls = [
        {
            "id": f"abcdefgh{index}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps(arguments)},
        }
        for index, arguments in enumerate(ARGUMENTS[:count])
    ]
    return {"role": "assistant", "content": None, "tool_calls": tool_calls}


def talk(count: int) -> list[dict[str, Any]]:
    results = [
        {"role": "tool", "tool_call_id": f"abcdefgh{index}", "content": f"sun {index}"}
        for index in range(count)
    ]
    return [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "What will it be like?"},
        calls(count),
        *results,
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "Thanks!"},
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def output(prompt: str, whole: str) -> str:
    """What the model wrote: what a finished turn has beyond the prompt, without its end."""
    for opened in (
        "<think>\n\n</think>\n",
        "<think>",
        "<think>\n",
        "</think>",
        "\n<think></think>",
        "",
    ):
        start = prompt.removesuffix(opened)
        if whole.startswith(start):
            text = whole[len(start) :].rstrip("\n")
            return next((text.removesuffix(e) for e in ENDS if text.endswith(e)), text)
    raise AssertionError(f"{whole!r} does not go on from {prompt!r}")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_writes_its_parser_reads(tokenizer: Tokenizer, name: str) -> None:
    template = named_template(manager.current(), name)
    if template.tool_parser is None:
        return
    count = 1 if name in SINGLE else 2
    messages, tools = talk(count), [TOOL]
    keywords: dict[str, Any] = {
        "tokenizer": tokenizer, "template": template.source, "tools": tools,
        "kwargs": {"enable_thinking": False},
    }  # fmt: skip
    prompt = render(messages[:2], **keywords)
    whole = render(messages[:3], add_generation_prompt=False, **keywords)
    text = output(prompt, whole)
    message = parse(
        text.removeprefix("</think>").removeprefix("\n<think></think>\n"),
        tool_parser=template.tool_parser,
        tools=tools,
    )
    read = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    assert read == [("get_weather", keywords) for keywords in ARGUMENTS[:count]]
    assert not (message.content or "").strip()


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_written_in_order(tokenizer: Tokenizer, name: str) -> None:
    template = named_template(manager.current(), name)
    count = 1 if name in SINGLE else 2
    messages = talk(count)
    if template.tool_parser is None:
        messages = [m for m in messages if m["role"] != "tool" and "tool_calls" not in m]
    tools = [TOOL] if template.tool_parser else None
    keywords: dict[str, Any] = {"tokenizer": tokenizer, "template": template.source, "tools": tools}
    assert content_format(template.source) == "string"
    text = render(messages, **keywords)
    phrases = ["What will it be like?", "sun 0", "Sunny.", "Thanks!"]
    if tools:
        phrases[1:1] = ["Bergen"] if count == 2 else ["Tromsø"]
        assert "Days of weather." in text
    else:
        phrases.remove("sun 0")
    assert text.count("Be kind.") == 1
    positions = [text.rindex(word) for word in phrases]
    assert positions == sorted(positions)
    ended = render(messages, add_generation_prompt=False, **keywords)
    assert text.startswith(ended)
    going = [*messages[:-1], {"role": "assistant", "content": "I go on"}]
    cut = render(going, add_generation_prompt=False, continue_final_message=True, **keywords)
    assert cut.endswith("I go on")


def test_names_of_examples_are_taken() -> None:
    for name in EXAMPLES:
        source = named_template(manager.current(), name).source
        for written in (name, f"tool_chat_template_{name}", f"tool_chat_template_{name}.jinja"):
            assert load_template(written) == source
        assert load_template(f"examples/tool_chat_template_{name}.jinja") == source
    assert template_name("examples/template_chatml.jinja") == "chatml"


def test_a_file_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hermes").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert load_template("hermes") == "mine"


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(ConfigError, match="did you mean hermes"):
        load_template("hermess")
    with pytest.raises(ConfigError, match="neither a readable file"):
        load_template("/nowhere/hermes.jinja")


def test_a_package_may_bring_one(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ greeting }}{{ messages[0].content }}")
    plugins = manager.current()
    plugins.register("chat_templates", "own", ChatTemplate(file, "{% set greeting = 'Ho ' %}"))
    try:
        assert load_template("own") == "{% set greeting = 'Ho ' %}" + file.read_text()
    finally:
        plugins.unregister("chat_templates", "own")


def test_what_a_format_does_not_have_is_said(tokenizer: Tokenizer) -> None:
    source = load_template("internlm2_tool")
    with pytest.raises(RequestError, match="one call in a message"):
        render(talk(2)[:3], tokenizer=tokenizer, template=source, tools=[TOOL])
