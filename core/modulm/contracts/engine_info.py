"""What a front end knows about its engine. Needs no torch, since a front end may not have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from modulm.contracts.executor import ModelDescription
from modulm.contracts.pooling import TextRules
from modulm.contracts.sampling import SamplingParams

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["API", "EngineInfo"]

API = 1


@frozen(kw_only=True)
class EngineInfo:
    """What front ends need to know about an engine.

    config: resolved. models: served names. path: the checkpoint's folder. vocabulary: width of
    the logits. eos: token ids that end a generation. defaults: the checkpoint's sampling defaults,
    by field of SamplingParams. tasks: what requests may ask for. notes: for people. description:
    from the executor. texts: how a pooling model's prompts are built. cache_tokens: capacity of the
    KV cache in tokens, block_size: tokens per block; 0 if no layer caches whole sequences. parts:
    `Capacity.parts`.
    """

    config: EngineConfig
    models: tuple[str, ...]
    path: str
    architecture: str
    max_model_len: int
    vocabulary: int
    hidden: int
    dtype: str
    eos: tuple[int, ...]
    defaults: Mapping[str, Any] = field(factory=dict)
    tasks: tuple[str, ...] = ("generate",)
    notes: tuple[str, ...] = ()
    description: ModelDescription = field(factory=ModelDescription)
    texts: TextRules = field(factory=TextRules)
    cache_tokens: int = 0
    block_size: int = 0
    parts: Mapping[str, Mapping[str, Any]] = field(factory=dict)

    def limit(self, part: str, name: str) -> int:
        """Return a number of a step part's capacity, or 0 if the part is off."""
        return int(self.parts.get(part, {}).get(name, 0))

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters of a request that sets none."""
        return SamplingParams(**self.defaults)
