"""What a checkpoint's files say of the format that its model writes: read without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from modulm.loading import stored_tokenizer
from modulm.text.tokenizer import chat_templates, tokenizer_settings

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig

__all__ = ["Evidence", "evidence_of"]

#: How much of tokenizer.json is looked at: its added tokens stand before the vocabulary.
_HEAD = 4 * 1024 * 1024
_INNER = ("text_config", "llm_config", "language_config")
_ESCAPES = (('\\"', '"'), ("\\'", "'"), ("\\n", "\n"))


@frozen
class Evidence:
    """What tells a format. Nothing of it is trusted to be more than text.

    tools, plain: the chat template for requests with tools, and those for any, without escapes;
    "" where there is none. tokens: added tokens. models: model types and architectures.
    settings: tokenizer_config.json.
    """

    tools: str = ""
    plain: str = ""
    tokens: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    settings: Mapping[str, Any] = field(factory=dict)

    def template(self, kind: str) -> str:
        """What is looked at for parsers of a kind."""
        return self.tools if kind == "tool_parsers" else self.plain


def evidence_of(config: EngineConfig, checkpoint: Checkpoint) -> Evidence:
    """What the files say; `--chat-template` counts in place of the checkpoint's own.

    Raises CheckpointError for files that cannot be read, ConfigError for such a flag.
    """
    folder = Path(config.model.tokenizer or checkpoint.path)
    stored = None if config.model.tokenizer else stored_tokenizer(config, checkpoint.path)
    settings = tokenizer_settings(folder) if stored is None else stored.settings
    head = _head(folder / "tokenizer.json") if stored is None else stored.tokenizer[:_HEAD]
    given = _given_template(config)
    held = given or chat_templates(settings.get("chat_template")) or ""
    named = {"default": held} if isinstance(held, str) else held
    tools = named.get("tool_use") or named.get("default", "")
    return Evidence(
        tools=_plain(tools),
        plain=_plain("\n".join(named.values())),
        tokens=frozenset(_tokens(settings, head)),
        models=frozenset(_models(checkpoint.config)),
        settings=settings,
    )


def _plain(template: str) -> str:
    """A template with the escapes of its strings resolved: markers are written so or so."""
    for escape, letter in _ESCAPES:
        template = template.replace(escape, letter)
    return template


def _given_template(config: EngineConfig) -> str | None:
    """The template that `--chat-template` names, if a server's flags are known."""
    given = (value for flag, value in config.values() if flag.name == "chat_template")
    value = next(given, None)
    if not isinstance(value, str):
        return None
    from modulm_chat.conversation import load_template

    return load_template(value)


def _models(table: Mapping[str, Any]) -> list[str]:
    found = []
    for part in (table, *(table.get(key) for key in _INNER)):
        if isinstance(part, Mapping):
            found += [part.get("model_type"), *(part.get("architectures") or ())]
    return [name for name in found if isinstance(name, str)]


def _head(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return opened.read(_HEAD)
    except OSError:
        return ""


def _tokens(settings: Mapping[str, Any], head: str) -> list[str]:
    """The text of added tokens, from the settings and from the beginning of tokenizer.json."""
    added: list[Any] = []
    at = head.find('"added_tokens"')
    start = head.find("[", at) if at >= 0 else -1
    if start >= 0:
        try:
            added, _ = json.JSONDecoder().raw_decode(head, start)
        except ValueError:
            added = []
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        added += decoder.values()
    added += settings.get("additional_special_tokens") or ()
    texts = [token.get("content") if isinstance(token, Mapping) else token for token in added]
    return [text for text in texts if isinstance(text, str)]
