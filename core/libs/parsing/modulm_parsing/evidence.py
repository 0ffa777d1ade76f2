"""What a checkpoint's files reveal about its output format, read without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from modulm.loading import stored_tokenizer
from modulm.loading.sources import tokenizer_path
from modulm_tokenizers.tokenizer import chat_templates, tokenizer_settings

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig

__all__ = ["Evidence", "evidence_of"]

#: Bytes read of tokenizer.json: the added tokens precede the vocabulary.
_HEAD = 4 * 1024 * 1024
_INNER = ("text_config", "llm_config", "language_config")
_ESCAPES = (('\\"', '"'), ("\\'", "'"), ("\\n", "\n"))


@frozen
class Evidence:
    """Indications of a format. Treated as untrusted text.

    tools, plain: chat template for requests with tools, and for all, with escapes resolved; "" if
    there is none. tokens: added tokens. models: model types and architectures. settings:
    tokenizer_config.json.
    """

    tools: str = ""
    plain: str = ""
    tokens: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    settings: Mapping[str, Any] = field(factory=dict)

    def template(self, kind: str) -> str:
        """Return the template to examine for parsers of a kind."""
        return self.tools if kind == "tool_parsers" else self.plain


def evidence_of(config: EngineConfig, checkpoint: Checkpoint) -> Evidence:
    """Read the files; `--chat-template` replaces the checkpoint's own.

    Raises CheckpointError for unreadable files, ConfigError for that flag.
    """
    folder = Path(tokenizer_path(config, checkpoint.path))
    stored = None if config.model.tokenizer else stored_tokenizer(config, checkpoint.path)
    settings = tokenizer_settings(folder) if stored is None else stored.settings
    head = _head(folder / "tokenizer.json") if stored is None else stored.tokenizer[:_HEAD]
    flag_template = _given_template(config)
    template = flag_template or chat_templates(settings.get("chat_template")) or ""
    templates = {"default": template} if isinstance(template, str) else template
    tools = templates.get("tool_use") or templates.get("default", "")
    return Evidence(
        tools=_plain(tools),
        plain=_plain("\n".join(templates.values())),
        tokens=frozenset(_tokens(settings, head)),
        models=frozenset(_models(checkpoint.config)),
        settings=settings,
    )


def _plain(template: str) -> str:
    """Resolve a template's string escapes, since markers may be written either way."""
    for escape, letter in _ESCAPES:
        template = template.replace(escape, letter)
    return template


def _given_template(config: EngineConfig) -> str | None:
    """Return the template that `--chat-template` names, if the server's flags are present."""
    values = (value for flag, value in config.values() if flag.name == "chat_template")
    value = next(values, None)
    if not isinstance(value, str):
        return None
    from modulm_chat.conversation import load_template

    return load_template(value)


def _models(table: Mapping[str, Any]) -> list[str]:
    names = []
    for part in (table, *(table.get(key) for key in _INNER)):
        if isinstance(part, Mapping):
            names += [part.get("model_type"), *(part.get("architectures") or ())]
    return [name for name in names if isinstance(name, str)]


def _head(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return opened.read(_HEAD)
    except OSError:
        return ""


def _tokens(settings: Mapping[str, Any], head: str) -> list[str]:
    """Return the text of added tokens, from the settings and from the start of tokenizer.json."""
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
