"""What a checkpoint's files say of pooling, as plugins read them (hook `modulm_pooling`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from attrs import field, frozen

if TYPE_CHECKING:
    import torch

__all__ = ["API", "Layers", "PoolingRecipe", "TextRules"]

API = 1

#: Called with the device when the model is loaded: the layers that a vector passes after pooling,
#: each [n, inputs] -> [n, outputs] in fp32.
Layers: TypeAlias = "Callable[[torch.device], tuple[Callable[[torch.Tensor], torch.Tensor], ...]]"


def _no_layers(device: torch.device) -> tuple[Callable[[torch.Tensor], torch.Tensor], ...]:
    return ()


@frozen(kw_only=True)
class TextRules:
    """How texts become prompts, and pairs of vectors scores. Plain values: they reach front ends.

    prompts: by their names, what may be put before a text; default_prompt: the name of the one
    that is, where a request names none; pools_prompt: whether its tokens take part in pooling.
    lower_case: texts are lowered first. similarity: "cosine", "dot", "euclidean" or "manhattan"
    (the last two negated). dimensions: those to which vectors may be cut; empty: any. joined: a
    pair is one text without anything in between. template: chat template of a pair, whose
    messages have the roles query and document.
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
    """What a checkpoint says of pooling beside its architecture.

    kind: "embed", "classify" or "reward" for a decoder that is not there to generate, though its
    architecture may say so. settings: by their names in `--pooler-config`, which comes first.
    max_length: the longest text it was trained for, in tokens.
    """

    kind: str | None = None
    settings: Mapping[str, object] = field(factory=dict)
    layers: Layers = _no_layers
    max_length: int | None = None
    texts: TextRules = TextRules()
