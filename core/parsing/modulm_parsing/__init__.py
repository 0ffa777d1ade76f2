"""From a model's text to a message: what parsers and servers are written with."""

from modulm_parsing.cursor import Cursor
from modulm_parsing.forced import CallReader, NamedCall, RequiredCalls
from modulm_parsing.message import (
    MessageParser,
    ParsedMessage,
    ToolCall,
    assemble,
    merge,
    message_parser,
    new_call_id,
    parse,
)
from modulm_parsing.objects import Member, ObjectReader, loads

__all__ = [
    "CallReader",
    "Cursor",
    "Member",
    "MessageParser",
    "NamedCall",
    "ObjectReader",
    "ParsedMessage",
    "RequiredCalls",
    "ToolCall",
    "assemble",
    "loads",
    "merge",
    "message_parser",
    "new_call_id",
    "parse",
]
