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
        False, "Do not start where no tool parser is known; one that is known is used.", common=True
    )
    tool_call_parser: str | None = flag(
        None,
        "Parser of the model's tool calls; auto, as without the flag: what fits the checkpoint.",
        kind="tool_parsers",
        choices=("auto", "none"),
        parse=parser_name,
        common=True,
    )
    tool_parser_plugin: str = flag(
        "", "Python file that registers tool parsers.", unit="path", registers=True
    )
