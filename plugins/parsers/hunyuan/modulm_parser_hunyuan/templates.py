"""Chat templates of Hunyuan-A13B."""

from pathlib import Path

from modulm_chat import ChatTemplate

__all__ = ["HUNYUAN_A13B"]

_HERE = Path(__file__).parent

HUNYUAN_A13B = ChatTemplate(
    _HERE / "hunyuan_a13b.jinja", tool_parser="hunyuan_a13b", reasoning_parser="hunyuan_a13b"
)
