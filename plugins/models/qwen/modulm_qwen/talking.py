"""What Qwen-Omni models with a talker share: texts, and rows that speak them, in one engine.

Rows of both kinds share steps. A step with one kind runs only that kind's layers; a mixed step runs
both over all its tokens, since small steps take as long as reading the weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from modulm.contracts.model import Batch, CacheSpec
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames
from modulm_qwen.omni import SPEAKING
from modulm_speakers.flags import SpeechConfig
from modulm_speakers.model import CODES, MIXED, SpeakingModel

__all__ = ["Talking"]

_RATE = 24000


class Talking(SpeakingModel):
    """Mixin before a thinker. It speaks with --enable-audio-output; without, it only writes.

    A family sets `talker`, the model that gives first codes, and what `SpeakingModel` lists, in
    `make_talker`.
    """

    kit_not_run = ""
    no_drafts = None
    speaks = False
    rate = _RATE
    config: Any
    only_encodes: bool
    device: torch.device
    #: Parts whose weights are in the checkpoint, by the first part of their names.
    parts: ClassVar[tuple[str, ...]]
    #: The model of first codes, and the size of their vocabulary.
    talker: Any
    first_codes: int

    def __init__(self, config: Any, build: Builder) -> None:
        super().__init__(config, build)  # type: ignore[call-arg]
        engine = build.shared.config
        wanted = engine is not None and engine.group(SpeechConfig).enable_audio_output
        self._speaking: Tensor | bool = False
        if not wanted or self.only_encodes:
            return
        if config.talker is None:
            raise CheckpointError(
                "enable_audio_output: this checkpoint has no talker: leave the flag out"
            )
        self.speaks = True
        # Adapters are of the thinker.
        self.make_talker(config, evolve(build, shared=evolve(build.shared, adapters=None)))
        # The names depend on the flag, not only on the class.
        object.__setattr__(self, "weights", partial(_whole, type(self)))

    @abstractmethod
    def make_talker(self, config: Any, b: Builder) -> None:
        """Make the parts that speak; `b` points at the root."""

    @abstractmethod
    def allowed(self, ids: Tensor) -> Tensor:
        """Return which first codes may be sampled: [n] -> [n] bool."""

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        caches: tuple[CacheSpec, ...]
        caches = self.talker.caches if self.speaks else super().caches  # type: ignore[misc]
        return caches

    def forward(self, batch: Batch) -> Tensor:
        return self._both(batch, super().forward)  # type: ignore[misc]

    def states(self, batch: Batch, layers: Sequence[int]) -> tuple[Tensor, ...]:
        if CODES in batch.extras and MIXED not in batch.extras:
            return (self._spoken(batch),) * (1 + len(layers))
        inner: list[Tensor] = []

        def think(own: Batch) -> Tensor:
            hidden: Tensor
            hidden, *others = super(Talking, self).states(own, layers)  # type: ignore[misc]
            inner.extend(others)
            return hidden

        return (self._both(batch, think), *inner)

    def _both(self, batch: Batch, think: Callable[[Batch], Tensor]) -> Tensor:
        """Run the layers of the kinds of rows in the batch."""
        if CODES not in batch.extras:
            return think(batch)
        spoken, mixed = self._spoken(batch), batch.extras.get(MIXED)
        return spoken if mixed is None else torch.where(mixed[:, None], spoken, think(batch))

    def _spoken(self, batch: Batch) -> Tensor:
        """The talker's states, as wide as the thinker's: [tokens, hidden]."""
        hidden = self.talker(batch)
        return F.pad(hidden, (0, self.config.hidden_size - hidden.shape[1]))

    def of_talker(self, hidden: Tensor) -> Tensor:
        """Undo the padding of the talker's states."""
        width: int = self.talker.config.hidden_size
        return hidden[:, :width].contiguous()

    def focus(self, speaking: np.ndarray | None) -> None:
        if speaking is None or speaking.all():
            self._speaking = speaking is not None
        else:
            self._speaking = torch.from_numpy(speaking).to(self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        speaking = self._speaking if self.speaks else False
        if speaking is False:
            texts: Tensor = super().logits(hidden)  # type: ignore[misc]
            return texts
        first = self.talker.logits(self.of_talker(hidden))
        ids = torch.arange(first.shape[1], device=first.device)
        first = first.masked_fill(~self.allowed(ids), -torch.inf)
        more = self.config.vocab_size - first.shape[1]
        spoken = F.pad(first, (0, more), value=-torch.inf)
        if speaking is True:
            return spoken
        texts = super().logits(hidden)  # type: ignore[misc]
        return torch.where(speaking[:, None], spoken.to(texts.dtype), texts)


def _whole(driver: Any, config: Any) -> WeightNames:
    """Names of all weights, those of the talker included."""
    names: WeightNames = driver.weights(config)
    return evolve(names, ignore=tuple(each for each in names.ignore if each != SPEAKING))
