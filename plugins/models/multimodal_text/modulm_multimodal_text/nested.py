"""The text model of a checkpoint that has others around it, by the plugin for that text model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch, CacheSpec, Model, MtpLayer
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, WeightNames, read_config
from modulm.plugins import current
from modulm_layers import tiny_config
from modulm_multimodal_text.kinds import text_architecture

__all__ = ["NestedConfig", "NestedText"]

log = logging.getLogger("modulm.models")

#: Where text models lie in files, and where their own plugins look.
_NAMES = (
    (r"^language_model\.(model|lm_head)\.", r"\1."),
    (r"^model\.(language_model|text_model)\.", "model."),
)
#: What belongs to the models around them.
_OTHERS = (
    r"^(model\.)?(vision|visual|image|audio|embed_vision|embed_audio|multi_modal|connector|mm_)",
)


@frozen(eq=False)
class NestedConfig:
    """The text model's driver and its configuration, with what transformers adds to the file.

    Files of such checkpoints leave out what is a default of the text model's class there.
    """

    driver: Any
    text: Any
    name: str

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> NestedConfig:
        """Raises UnsupportedError for a text model that no plugin provides, CheckpointError for
        values that transformers or that plugin refuses."""
        name, text = str(table["architectures"][0]), text_architecture(table)
        if text is None:
            raise UnsupportedError(f"{name}: no plugin provides its text model")
        driver = current().load("models", text)
        return cls(
            driver, read_config(_text_table(name, table, file), driver.config_type, file), name
        )

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary."""
        return int(self.text.vocab_size)

    @property
    def max_length(self) -> int:
        """The longest sequence the text model is meant for, in tokens."""
        return int(self.text.max_length)

    @property
    def sliding_window(self) -> int | None:
        """The text model's window, in tokens."""
        window: int | None = self.text.sliding_window
        return window


def _text_table(name: str, table: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """The text model's keys, completed."""
    import transformers

    model = getattr(transformers, name, None)
    if model is None:
        nested: Mapping[str, Any] = table.get("text_config", table)
        return nested
    try:
        values: dict[str, Any] = model.config_class.from_dict(table).get_text_config().to_dict()
    except Exception as error:
        raise CheckpointError(f"{file}: {error}") from error
    if "tie_word_embeddings" in table:
        values["tie_word_embeddings"] = table["tie_word_embeddings"]
    return values


class NestedText(Module, Model):
    """A text model under the names that its weights have in the whole checkpoint."""

    api = 1
    config_type = NestedConfig

    def __init__(self, config: NestedConfig, build: Builder) -> None:
        super().__init__()
        log.warning("%s: only its text model is loaded; images and sound are not read", config.name)
        self.text = config.driver(config.text, build)

    @classmethod
    def weights(cls, config: NestedConfig) -> WeightNames:
        names: WeightNames = config.driver.weights(config.text)
        return evolve(names, rename=(*_NAMES, *names.rename), ignore=(*_OTHERS, *names.ignore))

    @classmethod
    def mtp(cls, config: NestedConfig) -> MtpLayer | None:
        layer: MtpLayer | None = config.driver.mtp(config.text)
        return layer

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        found: tuple[CacheSpec, ...] = self.text.caches
        return found

    def forward(self, batch: Batch) -> Tensor:
        hidden: Tensor = self.text(batch)
        return hidden

    def states(self, batch: Batch, layers: Sequence[int]) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.text.states(batch, layers)
        return found

    def embeddings(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.text.embeddings(tokens)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.text.logits(hidden)
        return logits

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        text = tiny_config("gemma3_text", "", head_dim=24, sliding_window=12)
        vision = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        }
        return {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "mm_tokens_per_image": 4,
            "text_config": {
                **text,
                "query_pre_attn_scalar": 20,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": vision,
        }
