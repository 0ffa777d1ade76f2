"""Chat templates of Gemma 3, with tool calls as Python."""

from pathlib import Path

from modulm_chat import ChatTemplate

__all__ = ["GEMMA3_PYTHONIC"]

_HERE = Path(__file__).parent

GEMMA3_PYTHONIC = ChatTemplate(_HERE / "gemma3_pythonic.jinja", tool_parser="pythonic")
