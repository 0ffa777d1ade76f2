"""Turns conversations into prompts with chat templates, which run in a sandbox.

Names are loaded on first use: the process that renders templates needs few of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modulm_chat.conversation import (
        choose_template,
        encode_chat,
        load_template,
        normalise,
        render,
    )
    from modulm_chat.media_part import MediaPart
    from modulm_chat.named_templates import ChatTemplate
    from modulm_chat.sandbox import RenderLimits, SandboxedRenderer, checkpoint_renderer
    from modulm_chat.templates import (
        MAX_TEMPLATE,
        ContentFormat,
        TemplateFailed,
        check_template,
        content_format,
        execute,
    )

__all__ = [
    "MAX_TEMPLATE",
    "ChatTemplate",
    "ContentFormat",
    "MediaPart",
    "RenderLimits",
    "SandboxedRenderer",
    "TemplateFailed",
    "check_template",
    "checkpoint_renderer",
    "choose_template",
    "content_format",
    "encode_chat",
    "execute",
    "load_template",
    "normalise",
    "render",
]

_HOMES = {
    **dict.fromkeys(
        ("choose_template", "encode_chat", "load_template", "normalise", "render"), "conversation"
    ),
    "ChatTemplate": "named_templates",
    "MediaPart": "media_part",
    **dict.fromkeys(("RenderLimits", "SandboxedRenderer", "checkpoint_renderer"), "sandbox"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "templates")
    return getattr(import_module(f"{__name__}.{home}"), name)
