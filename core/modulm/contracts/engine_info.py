"""What a front end knows of its engine. Nothing here needs torch: a front end may have none."""

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
    """What front ends need to know of an engine.

    config: resolved; models: served names; path: the checkpoint's folder; vocabulary: width of
    the logits; eos: ids that end an answer; defaults: sampling defaults of the checkpoint, by
    field of SamplingParams; tasks: what the model is for; notes: for people; description: the
    executor's; texts: how they become prompts of a pooling model; cache_tokens: how many tokens'
    keys and values fit, 0 where nothing is kept of all of a sequence; parts: what step parts say of
    their capacity, as `Capacity.parts` has it.
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
    parts: Mapping[str, Mapping[str, Any]] = field(factory=dict)

    def limit(self, part: str, name: str) -> int:
        """A number of a step part's capacity; 0 where the part is off."""
        return int(self.parts.get(part, {}).get(name, 0))

    def default_params(self) -> SamplingParams:
        """What a caller gets who gives no parameters."""
        return SamplingParams(**self.defaults)
