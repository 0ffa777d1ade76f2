"""Moonshot Kimi: sections of tool calls (K2), channels of elements (K3)."""

from modulm_parser_kimi.k2 import KimiK2ReasoningParser, KimiK2ToolParser
from modulm_parser_kimi.k3 import KimiK3ReasoningParser, KimiK3ToolParser

__all__ = [
    "KimiK2ReasoningParser",
    "KimiK2ToolParser",
    "KimiK3ReasoningParser",
    "KimiK3ToolParser",
]
