"""Chat templates of Qwen3-Coder."""

from pathlib import Path

from modulm_chat import ChatTemplate

__all__ = ["QWEN3_CODER"]

_HERE = Path(__file__).parent

QWEN3_CODER = ChatTemplate(_HERE / "qwen3coder.jinja", tool_parser="qwen3_coder")
