"""Chat templates of GLM-4.5 and 4.6."""

from pathlib import Path

from modulm_chat import ChatTemplate

__all__ = ["GLM45"]

_HERE = Path(__file__).parent

GLM45 = ChatTemplate(_HERE / "glm45.jinja", tool_parser="glm45", reasoning_parser="glm45")
