"""Turns conversations into prompts with chat templates, which run in a sandbox."""

from modulm_chat.conversation import (
    ContentFormat,
    choose_template,
    content_format,
    encode_chat,
    load_template,
    normalise,
    render,
)
from modulm_chat.media_part import MediaPart
from modulm_chat.named_templates import ChatTemplate
from modulm_chat.templates import MAX_TEMPLATE, TemplateFailed, check_template, execute

__all__ = [
    "MAX_TEMPLATE",
    "ChatTemplate",
    "ContentFormat",
    "MediaPart",
    "TemplateFailed",
    "check_template",
    "choose_template",
    "content_format",
    "encode_chat",
    "execute",
    "load_template",
    "normalise",
    "render",
]
