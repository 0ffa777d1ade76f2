"""Chat templates of Granite 3 and of granite-20b-functioncalling."""

from pathlib import Path

from modulm_chat import ChatTemplate

__all__ = ["GRANITE", "GRANITE_20B_FC"]

_HERE = Path(__file__).parent

GRANITE = ChatTemplate(_HERE / "granite.jinja", tool_parser="granite")
GRANITE_20B_FC = ChatTemplate(_HERE / "granite_20b_fc.jinja", tool_parser="granite-20b-fc")
