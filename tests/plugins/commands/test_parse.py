"""parse: text to a message, from a file or standard input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from modulm_command_parse.command import command as parse

HERMES = 'Sure.<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
TOOLS = json.dumps([{"type": "function", "function": {"name": "look"}}])


@pytest.mark.parametrize("chunk", [[], ["--chunk", "1"], ["--chunk", "7"]])
def test_parse_prints_the_message(chunk: list[str]) -> None:
    result = CliRunner().invoke(
        parse,
        ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--tools", TOOLS, *chunk],
        input=f"<think>hm</think>{HERMES}",
    )
    assert result.exit_code == 0, result.output
    message = json.loads(result.output)
    assert message["reasoning"].strip() == "hm"
    assert message["content"].strip() == "Sure."
    (call,) = message["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("look", {"at": "sky"})


def test_parse_prints_events(tmp_path: Path) -> None:
    file, tools = tmp_path / "text", tmp_path / "tools.json"
    file.write_text(HERMES)
    tools.write_text(TOOLS)
    result = CliRunner().invoke(
        parse, [str(file), "--tool-call-parser", "hermes", "--tools", str(tools), "--deltas"]
    )
    events = [json.loads(line)["event"] for line in result.output.splitlines()]
    assert events[0] == "Content"
    assert {"ToolStart", "ToolArguments", "ToolEnd"} <= set(events)


def test_parse_refuses_wrong_tools() -> None:
    result = CliRunner().invoke(parse, ["--tools", "{"], input="x")
    assert result.exit_code == 2
    assert "--tools" in result.output
