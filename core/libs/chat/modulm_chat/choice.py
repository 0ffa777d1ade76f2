"""Explain which tokenizer and chat template a checkpoint uses, for `modulm explain`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from modulm.contracts.decision import Decision
from modulm.loading.sources import tokenizer_path
from modulm.plugins.defaults import choose_tokenizer
from modulm_tokenizers.tokenizer import tokenizer_settings

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.plugins.manager import PluginManager

__all__ = ["chat_decisions"]

_SUBJECT = "chat template"


def chat_decisions(
    config: EngineConfig, path: Path, plugins: PluginManager, chat_template: str | None = None
) -> list[Decision]:
    """Explain the choice of tokenizer and chat template for the checkpoint at `path`.

    chat_template: `--chat-template`. Raises PluginNotFound for an unknown `--tokenizer-mode`.
    """
    folder = Path(tokenizer_path(config, path))
    if config.model.skip_tokenizer_init or not folder.is_dir():
        return []
    settings = tokenizer_settings(folder)
    has_template = bool(settings.get("chat_template"))
    mode = config.model.tokenizer_mode
    if mode == "auto" and has_template and (folder / "tokenizer.json").is_file():
        reason = "the checkpoint has tokenizer.json and a chat template"
        tokenizer = Decision("tokenizer", (), "hf", reason)
    elif mode == "hf":
        tokenizer = Decision("tokenizer", (), "hf", "set by --tokenizer-mode")
    else:
        tokenizer = choose_tokenizer(plugins, folder, mode).decision
    return [tokenizer, _template_decision(chat_template, tokenizer.winner or "hf", has_template)]


def _template_decision(chat_template: str | None, tokenizer: str, has_template: bool) -> Decision:
    if chat_template is not None:
        return Decision(
            _SUBJECT, (), chat_template.partition("\n")[0][:80], "set by --chat-template"
        )
    if tokenizer not in ("hf", "slow"):
        return Decision(_SUBJECT, (), tokenizer, "the tokenizer encodes conversations itself")
    if has_template:
        return Decision(
            _SUBJECT, (), "the checkpoint's", "in tokenizer_config.json or a file beside it"
        )
    reason = (
        "the checkpoint has none, and its files name no chat format; choose one of "
        "`modulm plugins list chat_templates` with --chat-template NAME"
    )
    return Decision(_SUBJECT, (), None, reason)
