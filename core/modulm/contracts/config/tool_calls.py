"""Tool call parsing, for commands that run a server."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group, parser_name

__all__ = ["ToolCallConfig"]


@flag_group
class ToolCallConfig(FlagGroup):
    """Tool call parsing, for commands that run a server."""

    title = "ToolCallConfig"
    server = True

    enable_auto_tool_choice: bool = flag(
        False, "Refuse to start if no tool parser is set or detected.", common=True
    )
    tool_call_parser: str | None = flag(
        None,
        "Parser of the model's tool calls. Default (auto): the checkpoint's.",
        kind="tool_parsers",
        choices=("auto", "none"),
        parse=parser_name,
        common=True,
    )
    tool_parser_plugin: str = flag(
        "", "Python file that registers tool parsers.", unit="path", registers=True
    )
