"""The flags of the responses API."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["ResponsesConfig"]


@flag_group
class ResponsesConfig(FlagGroup):
    """OpenAI's responses API."""

    title = "Responses"
    server = True

    stored_prompts: str | None = flag(
        None, "Folder of stored prompts (ID.json) for the `prompt` field of responses.", unit="path"
    )
    tool_server: str | None = flag(
        None, "YAML file of tool servers (MCP) that responses may use.", unit="path"
    )
    tool_timeout: float = flag(60.0, "Time for a call of a tool server.", unit="s", least=0.1)
    tool_result_bytes: int = flag(
        65536, "Maximum size of a tool server's result; more is cut off.", unit="bytes", least=1
    )
    tool_calls: int = flag(
        20, "Maximum calls of tool servers in a response. Requests may set a lower max_tool_calls.",
        least=1,
    )  # fmt: skip
