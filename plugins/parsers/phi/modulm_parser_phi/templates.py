"""Chat templates of Phi-4-mini."""

from pathlib import Path

from modulm_chat import ChatTemplate

__all__ = ["PHI4_MINI"]

_HERE = Path(__file__).parent

PHI4_MINI = ChatTemplate(_HERE / "phi4_mini.jinja", tool_parser="phi4_mini_json")
