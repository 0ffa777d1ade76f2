"""Chat templates of no particular model family, for conversations without tools."""

from pathlib import Path

from modulm_chat.named_templates import ChatTemplate

__all__ = ["ALPACA", "CHATML"]

_HERE = Path(__file__).parent

ALPACA = ChatTemplate(_HERE / "alpaca.jinja")
CHATML = ChatTemplate(_HERE / "chatml.jinja")
