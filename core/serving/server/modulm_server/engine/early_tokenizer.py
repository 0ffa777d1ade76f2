"""The tokenizer of a front end, opened while the engine's process loads the model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from attrs import frozen

from modulm.loading import open_checkpoint
from modulm_tokenizers.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.engine_info import EngineInfo
    from modulm.contracts.tokenizer import Tokenizer
    from modulm.plugins.manager import PluginManager

__all__ = ["EarlyTokenizer"]

log = logging.getLogger("modulm_server")


@frozen
class EarlyTokenizer:
    """A tokenizer, and what it was opened for.

    path: of the checkpoint. settings: those of the configuration that it depends on.
    """

    tokenizer: Tokenizer | None
    path: str
    settings: tuple[object, ...]

    @classmethod
    def of(cls, config: EngineConfig, plugins: PluginManager) -> EarlyTokenizer | None:
        """Open the tokenizer of a configuration that is not resolved yet.

        None if that fails: once the model is loaded it is opened again, and the error is raised.
        """
        try:
            path = str(open_checkpoint(config, plugins).path)
            return cls(open_tokenizer(config, path), path, _settings(config))
        except Exception as error:
            log.debug("the tokenizer is opened when the model is loaded: %s", error)
            return None

    def fits(self, info: EngineInfo) -> bool:
        """Whether the engine's resolved configuration asks for the same tokenizer."""
        return (self.path, self.settings) == (info.path, _settings(info.config))


def _settings(config: EngineConfig) -> tuple[object, ...]:
    model = config.model
    return (
        model.tokenizer,
        model.tokenizer_mode,
        model.tokenizer_revision,
        model.trust_remote_code,
        model.skip_tokenizer_init,
    )
