"""What encodes conversations of a checkpoint, and why: for `modulm explain`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from modulm.contracts.decision import Decision
from modulm.plugins.defaults import choose_tokenizer
from modulm.text.tokenizer import tokenizer_settings

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.plugins.manager import PluginManager

__all__ = ["chat_decisions"]

_SUBJECT = "chat template"


def chat_decisions(
    config: EngineConfig, path: Path, plugins: PluginManager, given: str | None = None
) -> list[Decision]:
    """How the tokenizer of the checkpoint at `path` is opened, and which chat template is taken.

    given: `--chat-template`. Raises PluginNotFound for an unknown `--tokenizer-mode`.
    """
    folder = Path(config.model.tokenizer or path)
    if config.model.skip_tokenizer_init or not folder.is_dir():
        return []
    settings = tokenizer_settings(folder)
    own = bool(settings.get("chat_template"))
    mode = config.model.tokenizer_mode
    if mode == "auto" and own and (folder / "tokenizer.json").is_file():
        reason = "tokenizer.json and a chat template are there"
        tokenizer = Decision("tokenizer", (), "hf", reason)
    elif mode == "hf":
        tokenizer = Decision("tokenizer", (), "hf", "asked for by name")
    else:
        tokenizer = choose_tokenizer(plugins, folder, mode).decision
    return [tokenizer, _template(given, tokenizer.winner or "hf", own)]


def _template(given: str | None, tokenizer: str, own: bool) -> Decision:
    if given is not None:
        return Decision(_SUBJECT, (), given.partition("\n")[0][:80], "given by --chat-template")
    if tokenizer not in ("hf", "slow"):
        return Decision(_SUBJECT, (), tokenizer, "this tokenizer brings what encodes conversations")
    if own:
        return Decision(_SUBJECT, (), "the checkpoint's", "beside or in tokenizer_config.json")
    reason = (
        "the checkpoint brings none, and nothing in its files says that it was taught a format; "
        "--chat-template NAME takes one of `modulm plugins list chat_templates`"
    )
    return Decision(_SUBJECT, (), None, reason)
