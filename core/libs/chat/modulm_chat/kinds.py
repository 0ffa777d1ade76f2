"""The driver kind of named chat templates."""

from modulm.plugins.kinds import Kind

__all__ = ["CHAT_TEMPLATES"]

CHAT_TEMPLATES = Kind(
    "chat_templates",
    "chat template",
    "chat-template",
    kit="modulm_chat.testing:check_chat_template",
)
