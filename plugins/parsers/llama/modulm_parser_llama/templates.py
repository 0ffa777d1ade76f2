"""Chat templates of Llama 3 and 4, with tool calls as JSON or as Python."""

from pathlib import Path

from modulm_chat import ChatTemplate

__all__ = ["LLAMA3_JSON", "LLAMA3_PYTHONIC", "LLAMA4_JSON", "LLAMA4_PYTHONIC"]

_HERE = Path(__file__).parent

#: Special tokens of Llama 3 and of Llama 4.
_LLAMA3 = "{%- set begin, end, stop = '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>' -%}"
_LLAMA4 = "{%- set begin, end, stop = '<|header_start|>', '<|header_end|>', '<|eot|>' -%}"

LLAMA3_JSON = ChatTemplate(_HERE / "llama_json.jinja", _LLAMA3, "llama3_json")
LLAMA4_JSON = ChatTemplate(_HERE / "llama_json.jinja", _LLAMA4, "llama4_json")
LLAMA3_PYTHONIC = ChatTemplate(_HERE / "llama_pythonic.jinja", _LLAMA3, "pythonic")
LLAMA4_PYTHONIC = ChatTemplate(_HERE / "llama_pythonic.jinja", _LLAMA4, "llama4_pythonic")
