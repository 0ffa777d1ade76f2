"""Parse a model's text into a message: building blocks of parsers, and what servers call."""

from modulm_parsing.cursor import Cursor
from modulm_parsing.effort import EFFORTS, thinking_variables, variables_without_thinking
from modulm_parsing.forced import NamedCall, RequiredCalls
from modulm_parsing.json_calls import CallKeys, HeadedCalls, JsonCalls, read_call
from modulm_parsing.json_text import loads
from modulm_parsing.message import (
    MessageParser,
    ParsedMessage,
    ToolCall,
    assemble,
    merge,
    message_parser,
    new_call_id,
    parse,
    parse_arguments,
)
from modulm_parsing.python_calls import PythonCalls
from modulm_parsing.reading import MessageReader, ReasoningFormat, ToolFormat
from modulm_parsing.source import Ended, NotACall, Source, Steps, markers
from modulm_parsing.tag_calls import ArgumentsWriter, PairCalls, XmlCalls
from modulm_parsing.thoughts import Thoughts

__all__ = [
    "EFFORTS",
    "ArgumentsWriter",
    "CallKeys",
    "Cursor",
    "Ended",
    "HeadedCalls",
    "JsonCalls",
    "MessageParser",
    "MessageReader",
    "NamedCall",
    "NotACall",
    "PairCalls",
    "ParsedMessage",
    "PythonCalls",
    "ReasoningFormat",
    "RequiredCalls",
    "Source",
    "Steps",
    "Thoughts",
    "ToolCall",
    "ToolFormat",
    "XmlCalls",
    "assemble",
    "loads",
    "markers",
    "merge",
    "message_parser",
    "new_call_id",
    "parse",
    "parse_arguments",
    "read_call",
    "thinking_variables",
    "variables_without_thinking",
]
