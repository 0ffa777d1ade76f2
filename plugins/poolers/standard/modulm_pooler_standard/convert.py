"""Convert decoders to pooling models: replace the LM head by a score layer, or drop it."""

from __future__ import annotations

import re
from typing import Any

from attrs import evolve
from torch import Tensor
from torch.nn import Identity, Module, ModuleList

from modulm.contracts.model import Model
from modulm.contracts.weight_names import WeightNames
from modulm.errors import UnsupportedError
from modulm_layers.decoder import DecoderForCausalLM

__all__ = ["as_classifier", "as_embedder", "as_is", "as_reward"]


def as_is(driver: type[Any], tasks: tuple[str, ...]) -> type[Model]:
    """Return `driver` with its head, whose logits of some tokens are the result."""
    return type(driver.__name__, (driver,), {"tasks": tasks})


def as_embedder(driver: type[Any]) -> type[Model]:
    """Return `driver` without its head. Its checkpoint may hold the bare decoder (`...Model`)."""
    tasks = ("embed", "token_embed")
    if not issubclass(driver, DecoderForCausalLM):
        return as_is(driver, tasks)

    def make_head(self: Any, config: Any, b: Any) -> Module:
        return Identity()

    def weights(cls: Any, config: Any) -> WeightNames:
        return _without_head(driver, config, "lm_head", "score")

    members = {"tasks": tasks, "make_head": make_head, "weights": classmethod(weights)}
    return type(driver.__name__, (driver,), members)


def as_classifier(driver: type[Any], classes: int) -> type[Model]:
    """Return `driver` with the linear layer `score` in place of its head, as transformers stores
    it.

    Raises UnsupportedError for models that are not built as `DecoderForCausalLM`.
    """

    def make_head(self: Any, config: Any, b: Any) -> Module:
        head: Module = b.linear("score", config.hidden_size, classes, split=False)
        return head

    return _scored(driver, ("classify", "token_classify"), make_head)


def as_reward(driver: type[Any], rewards: int, *, deep: bool) -> type[Model]:
    """Return `driver` with a head that rates each token with `rewards` numbers.

    deep: the head has two layers `score.0` and `score.2` with a ReLU between them, as in some
    reward models; otherwise it is the layer `score` of a classifier. Raises UnsupportedError as in
    `as_classifier`.
    """

    def make_head(self: Any, config: Any, b: Any) -> Module:
        if deep:
            return _Rating(b, config.hidden_size, rewards)
        head: Module = b.linear("score", config.hidden_size, rewards, split=False)
        return head

    return _scored(driver, ("reward", "token_classify"), make_head)


class _Rating(Module):
    """A head of two linear layers with a ReLU between them."""

    def __init__(self, b: Any, hidden: int, rewards: int) -> None:
        super().__init__()
        widths = {"score.0": hidden, "score.2": rewards}
        self.layers = ModuleList(
            b.linear(name, hidden, width, bias=True, split=False) for name, width in widths.items()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Rate hidden states: x [n, hidden] -> [n, rewards]."""
        first, second = self.layers
        rewards: Tensor = second(first(x).relu())
        return rewards


def _scored(driver: type[Any], tasks: tuple[str, ...], make_head: Any) -> type[Model]:
    if not issubclass(driver, DecoderForCausalLM):
        raise UnsupportedError(f"{driver.__name__} is not supported yet as a model for {tasks[0]}")

    def weights(cls: Any, config: Any) -> WeightNames:
        return _without_head(driver, config, "lm_head")

    members = {"tasks": tasks, "make_head": make_head, "weights": classmethod(weights)}
    return type(driver.__name__, (driver,), members)


def _without_head(driver: type[DecoderForCausalLM], config: Any, *heads: str) -> WeightNames:
    """Return the driver's weight names without the heads, also accepting a bare decoder's names."""
    names = driver.weights(config)
    bare = rf"^(?!{re.escape(driver.root)}\.|lm_head\.|score\.)"
    return evolve(
        names,
        rename=((bare, f"{driver.root}."), *names.rename),
        ignore=(*names.ignore, *(rf"^{head}\." for head in heads)),
    )
