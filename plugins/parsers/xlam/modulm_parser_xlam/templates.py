"""Chat templates of xLAM, on Llama 3 and on Qwen 2.5."""

from pathlib import Path

from modulm_chat import ChatTemplate

__all__ = ["XLAM_LLAMA", "XLAM_QWEN"]

_HERE = Path(__file__).parent

_LLAMA = (
    "{%- set start, stop = bos_token | default('<|begin_of_text|>'), '<|eot_id|>' -%}"
    "{%- set begin, end = '<|start_header_id|>', '<|end_header_id|>\\n\\n' -%}"
)
_QWEN = (
    "{%- set start, stop = '', '<|im_end|>\\n' -%}{%- set begin, end = '<|im_start|>', '\\n' -%}"
)

XLAM_LLAMA = ChatTemplate(_HERE / "xlam.jinja", _LLAMA, "xlam")
XLAM_QWEN = ChatTemplate(_HERE / "xlam.jinja", _QWEN, "xlam")
