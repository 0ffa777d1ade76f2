"""Chat templates of InternLM 2."""

from pathlib import Path

from modulm_chat import ChatTemplate

__all__ = ["INTERNLM2_TOOL"]

_HERE = Path(__file__).parent

INTERNLM2_TOOL = ChatTemplate(_HERE / "internlm2_tool.jinja", tool_parser="internlm")
