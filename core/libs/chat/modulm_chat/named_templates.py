"""Named chat templates from packages (entry-point group `modulm.chat_templates`).

An entry point names a `ChatTemplate`, for checkpoints without a template or without one for
tools. Only `--chat-template NAME` selects one: a base model's files do not say which format it
was trained on.
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

#: The folder, prefixes and suffix of vLLM's example templates.
_FOLDER, _PREFIXES, _SUFFIX = "examples/", ("tool_chat_template_", "template_"), ".jinja"


@frozen(slots=False)
class ChatTemplate:
    """A template in a file of a package.

    head: text to put before the file's, for variables where several names share a file.
    tool_parser, reasoning_parser: names of the parsers for the output format that it asks for.
    """

    path: Path
    head: str = ""
    tool_parser: str | None = None
    reasoning_parser: str | None = None

    @cached_property
    def source(self) -> str:
        """Read the template. Raises ConfigError if the file cannot be read."""
        try:
            return self.head + self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("chat_template", f"{self.path} cannot be read: {error}") from error


def template_name(value: str) -> str:
    """Return the template name in a `--chat-template` value. Accepts the names of vLLM's examples.

    `examples/tool_chat_template_hermes.jinja` and `tool_chat_template_hermes` are `hermes`.
    """
    name = value.removeprefix(_FOLDER).removesuffix(_SUFFIX)
    return next((name.removeprefix(p) for p in _PREFIXES if name.startswith(p)), name)


def named_template(plugins: PluginManager, name: str) -> ChatTemplate:
    """Load an installed template by name.

    Raises PluginNotFound with the available names, PluginBroken for anything but a template.
    """
    template = plugins.load("chat_templates", name)
    if not isinstance(template, ChatTemplate):
        raise PluginBroken(f"chat template {name!r} is {template!r}, not a ChatTemplate")
    return template
