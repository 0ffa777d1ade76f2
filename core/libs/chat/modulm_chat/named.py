"""Chat templates that packages bring by name (group `modulm.chat_templates`).

An entry point names a `ChatTemplate`. They are for checkpoints that bring none, or none for
tools; nothing but `--chat-template NAME` takes one, as nothing in a base model's files says that
it was taught a format.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from modulm.errors import ConfigError, PluginBroken

if TYPE_CHECKING:
    from modulm.plugins.manager import PluginManager

__all__ = ["ChatTemplate", "named_template", "template_name"]

#: What vLLM's examples are called before the name, and where they lie.
_FOLDER, _PREFIXES, _SUFFIX = "examples/", ("tool_chat_template_", "template_"), ".jinja"


@frozen(slots=False)
class ChatTemplate:
    """A template in a file of a package.

    head: text before the file's, which sets its variables where several names share a file.
    tool_parser, reasoning_parser: names of the parsers that read what it teaches the model to
    write, if any.
    """

    path: Path
    head: str = ""
    tool_parser: str | None = None
    reasoning_parser: str | None = None

    @cached_property
    def source(self) -> str:
        """The template's text. Raises ConfigError if the file cannot be read."""
        try:
            return self.head + self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("chat_template", f"{self.path} cannot be read: {error}") from error


def template_name(value: str) -> str:
    """The name that `--chat-template` means: vLLM's names of examples are names here.

    `examples/tool_chat_template_hermes.jinja` and `tool_chat_template_hermes` are `hermes`.
    """
    name = value.removeprefix(_FOLDER).removesuffix(_SUFFIX)
    return next((name.removeprefix(p) for p in _PREFIXES if name.startswith(p)), name)


def named_template(plugins: PluginManager, name: str) -> ChatTemplate:
    """The installed template of a name.

    Raises PluginNotFound with the names there are, PluginBroken for what is no template.
    """
    found = plugins.load("chat_templates", name)
    if not isinstance(found, ChatTemplate):
        raise PluginBroken(f"chat template {name!r} is {found!r}, which is no ChatTemplate")
    return found
