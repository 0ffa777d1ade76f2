"""From a model's text to a message: what the server does with every output, usable by anyone."""

from modulm.parsing.cursor import Cursor
from modulm.parsing.forced import CallReader, NamedCall, RequiredCalls
from modulm.parsing.message import (
    MessageParser,
    ParsedMessage,
    ToolCall,
    assemble,
    merge,
    message_parser,
    new_call_id,
    parse,
)
from modulm.parsing.objects import Member, ObjectReader, loads

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
