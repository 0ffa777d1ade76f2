"""Checks that a draft and its target have the same vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.errors import ConfigError, ModulmError
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm_tokenizers.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from modulm.contracts.tokenizer import Tokenizer
    from modulm_speculation.draft_model import DraftModel
    from modulm_speculation.target import Target

__all__ = ["check_vocabulary"]


def check_vocabulary(target: Target, draft: DraftModel) -> None:
    """Raise ConfigError unless token ids have the same meaning for both models.

    Logits may be padded differently. If one model has no tokenizer, logits must be equally wide.
    """
    name = draft.config.model.model
    theirs = open_checkpoint(target.config, manager.current()).path
    own = open_checkpoint(draft.config, manager.current()).path
    pair = _tokenizer(theirs), _tokenizer(own)
    if pair[0] is None or pair[1] is None:
        sizes = target.loaded.vocabulary, draft.loaded.vocabulary
        if sizes[0] != sizes[1]:
            raise _wrong(name, f"{sizes[1]} tokens, the target has {sizes[0]}")
        return
    if len(pair[0]) != len(pair[1]):
        raise _wrong(name, f"{len(pair[1])} tokens, the target has {len(pair[0])}")
    for index in range(len(pair[0])):
        tokens = pair[0].id_to_token(index), pair[1].id_to_token(index)
        if tokens[0] != tokens[1]:
            raise _wrong(name, f"token {index} is {tokens[1]!r}, the target's is {tokens[0]!r}")


def _tokenizer(path: Path) -> Tokenizer | None:
    try:
        return load_tokenizer(str(path))
    except ModulmError:
        return None


def _wrong(name: str, message: str) -> ConfigError:
    return ConfigError(
        "speculative_config", f"model {name}: its tokens differ from the target model's: {message}"
    )
