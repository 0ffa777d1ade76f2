"""Mistral's prompts as chat templates; `--tokenizer-mode mistral` encodes them exactly."""

from pathlib import Path

from modulm_chat import ChatTemplate

__all__ = ["MISTRAL", "MISTRAL3"]

_HERE = Path(__file__).parent

MISTRAL = ChatTemplate(_HERE / "mistral.jinja", tool_parser="mistral")
MISTRAL3 = ChatTemplate(_HERE / "mistral3.jinja", tool_parser="mistral")
