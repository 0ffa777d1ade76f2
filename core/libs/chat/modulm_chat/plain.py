"""Formats of turns that belong to no family: plain conversations, without tools."""

from pathlib import Path

from modulm_chat.named import ChatTemplate

__all__ = ["ALPACA", "CHATML"]

_HERE = Path(__file__).parent

ALPACA = ChatTemplate(_HERE / "alpaca.jinja")
CHATML = ChatTemplate(_HERE / "chatml.jinja")
