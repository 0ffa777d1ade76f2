"""Request fields of vLLM that this server does not have, and why.

A schema names its table in `absent`. A field of REFUSED asks for something that would not happen,
so it is an error; one of NO_EFFECT changes no answer, so it is named in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    import msgspec

__all__ = ["GENERATION", "LORA", "MESSAGES", "POOLING", "RESPONSES", "Absent", "absent_of"]


@frozen
class Absent:
    """The absent fields of a schema, with what to do instead. Null, false and empty values ask for
    nothing.
    """

    refused: Mapping[str, str] = field(factory=dict)
    no_effect: Mapping[str, str] = field(factory=dict)


_COMMON = {
    "watermarking": "text is not watermarked",
    "mm_payload": "send images, audio and video in the messages",
    "return_mm_kwargs": "processed media stay in the server",
    "ec_transfer_params": "leave it out and send the media: engines with --ec-transfer-config find "
    "the outputs of other encoders by the media's hashes",
}
_SESSION = {"session_id": "cache_salt separates cached prefixes"}

GENERATION = Absent(
    refused={
        **_COMMON,
        "return_prompt_text": "/v1/chat/completions/render shows the prompt",
    },
    no_effect=_SESSION,
)
RESPONSES = Absent(
    refused={
        **_COMMON,
        "previous_input_messages": "send earlier messages in input, or previous_response_id",
    },
    no_effect={
        **_SESSION,
        "prompt_cache_options": "all prefixes are cached",
    },
)
MESSAGES = Absent(refused=_COMMON)
POOLING = Absent(no_effect={"padding": "texts of a batch keep their own length"})
LORA = Absent(no_effect={"is_3d_lora_weight": "the format of experts is found in the files"})

_NONE = Absent()


def absent_of(schema: type[msgspec.Struct]) -> Absent:
    """The absent fields of a schema."""
    found: Absent = getattr(schema, "absent", _NONE)
    return found
