"""The kind of driver that conversations bring: chat templates by name."""

from modulm.plugins.kinds import Kind

__all__ = ["CHAT_TEMPLATES"]

CHAT_TEMPLATES = Kind("chat_templates", "chat template", "chat-template")
