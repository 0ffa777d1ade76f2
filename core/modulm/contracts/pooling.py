"""Pooling settings read from a checkpoint's files by plugins (hook `modulm_pooling`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from attrs import field, frozen

if TYPE_CHECKING:
    import torch

__all__ = ["API", "Layers", "PoolingRecipe", "TextRules"]

API = 1

#: Returns the layers applied to pooled vectors, each [n, inputs] -> [n, outputs] in fp32. Called
#: with the device when the model is loaded.
Layers: TypeAlias = "Callable[[torch.device], tuple[Callable[[torch.Tensor], torch.Tensor], ...]]"


def _no_layers(device: torch.device) -> tuple[Callable[[torch.Tensor], torch.Tensor], ...]:
    return ()


@frozen(kw_only=True)
class TextRules:
    """How texts become prompts and pairs of vectors become scores. Plain values for front ends.

    prompts: name -> text to put before an input. default_prompt: name of the one used if a request
    names none. pools_prompt: whether prompt tokens are pooled. lower_case: convert texts to lower
    case. similarity: "cosine", "dot", "euclidean" or "manhattan" (the last two negated).
    dimensions: allowed lengths of truncated vectors; empty: any. joined: a pair is concatenated
    without a separator. template: chat template for pairs, with the roles query and document.
    """

    prompts: Mapping[str, str] = field(factory=dict)
    default_prompt: str | None = None
    pools_prompt: bool = True
    lower_case: bool = False
    similarity: str = "cosine"
    dimensions: tuple[int, ...] = field(default=(), converter=tuple)
    joined: bool = False
    template: str | None = None


@frozen(kw_only=True)
class PoolingRecipe:
    """Pooling settings of a checkpoint.

    kind: "embed", "classify" or "reward" if the checkpoint is a pooling model although its
    architecture generates. settings: defaults for `--pooler-config`, by the same names. max_length:
    maximum input length in tokens that the model was trained for.
    """

    kind: str | None = None
    settings: Mapping[str, object] = field(factory=dict)
    layers: Layers = _no_layers
    max_length: int | None = None
    texts: TextRules = TextRules()
