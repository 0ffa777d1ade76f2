"""Decoders as pooling models: the head gives way to a classifier, or to nothing."""

from __future__ import annotations

import re
from typing import Any

from attrs import evolve
from torch.nn import Identity, Module

from modulm.contracts.model import Model
from modulm.errors import UnsupportedError
from modulm.nn.decoder import DecoderForCausalLM
from modulm.nn.names import WeightNames

__all__ = ["as_classifier", "as_embedder"]


def as_embedder(driver: type[Any]) -> type[Model]:
    """`driver` without its head. Its checkpoint may hold the bare decoder (`...Model`)."""
    tasks = ("embed", "token_embed")
    if not issubclass(driver, DecoderForCausalLM):
        return type(driver.__name__, (driver,), {"tasks": tasks})

    def make_head(self: Any, config: Any, b: Any) -> Module:
        return Identity()

    def weights(cls: Any, config: Any) -> WeightNames:
        return _without_head(driver, config, "lm_head", "score")

    own = {"tasks": tasks, "make_head": make_head, "weights": classmethod(weights)}
    return type(driver.__name__, (driver,), own)


def as_classifier(driver: type[Any], classes: int) -> type[Model]:
    """`driver` with the linear layer `score` in place of its head, as transformers stores it.

    Raises UnsupportedError for models that are not built as `DecoderForCausalLM`.
    """
    if not issubclass(driver, DecoderForCausalLM):
        raise UnsupportedError(f"{driver.__name__} as a classifier: not yet")

    def make_head(self: Any, config: Any, b: Any) -> Module:
        head: Module = b.linear("score", config.hidden_size, classes, split=False)
        return head

    def weights(cls: Any, config: Any) -> WeightNames:
        return _without_head(driver, config, "lm_head")

    own = {"tasks": ("classify",), "make_head": make_head, "weights": classmethod(weights)}
    return type(driver.__name__, (driver,), own)


def _without_head(driver: type[DecoderForCausalLM], config: Any, *heads: str) -> WeightNames:
    """The driver's names, where the decoder may stand at the top and the heads are left out."""
    names = driver.weights(config)
    bare = rf"^(?!{re.escape(driver.root)}\.|lm_head\.|score\.)"
    return evolve(
        names,
        rename=((bare, f"{driver.root}."), *names.rename),
        ignore=(*names.ignore, *(rf"^{head}\." for head in heads)),
    )
