"""Pooling: what a model is for beside generating, its prompts of texts, vectors of hidden states.

Group `modulm.poolers`: by the key `pooler` of `--pooler-config`, else `standard`. Front ends import
a pooler, too, and may have no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypeVar

from attrs import frozen

from modulm.contracts.sampling import PoolingParams
from modulm.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.engine_info import EngineInfo
    from modulm.contracts.executor import Plan
    from modulm.contracts.kernels import Forward
    from modulm.contracts.model import Model
    from modulm.contracts.outputs import PoolingRequestOutput
    from modulm.contracts.pooling import PoolingRecipe
    from modulm.contracts.requests import PromptLike
    from modulm.contracts.tokenizer import Tokenizer

__all__ = [
    "API", "Head", "Layer", "PairContent", "Pooler", "PoolingInputs", "PoolingJob", "RowPooler",
    "paired",
]  # fmt: skip

API = 1

T = TypeVar("T")

#: [n, inputs] -> [n, outputs].
Layer: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
#: The model's `logits`: [n, hidden] and whose row each is -> [n, classes].
Head: TypeAlias = "Callable[[torch.Tensor, Sequence[int]], torch.Tensor]"


class Pooler(ABC):
    """How models pool; made without arguments. settings: by their names in `--pooler-config`."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @abstractmethod
    def conversion(
        self,
        config: EngineConfig,
        names: Sequence[str],
        installed: Collection[str],
        recipe: PoolingRecipe,
    ) -> tuple[str, str] | None:
        """(architecture to run, what for) if a decoder is to be pooled, else None.

        names: the checkpoint's architectures; installed: those that there are drivers for.
        """

    @abstractmethod
    def convert(
        self,
        driver: type[Model],
        purpose: str,
        table: Mapping[str, object],
        settings: Mapping[str, object],
    ) -> type[Model]:
        """The driver as a model for `purpose`; table: config.json."""

    @abstractmethod
    def tasks(
        self, checkpoint: Checkpoint, model: Model, given: Mapping[str, object]
    ) -> tuple[str, ...]:
        """What requests may ask for. Raises ConfigError if the settings ask for something else."""

    @abstractmethod
    def settings(
        self, checkpoint: Checkpoint, model: Model, given: Mapping[str, object]
    ) -> dict[str, object]:
        """The settings that were given, with the model's own for the others; plain values."""

    @abstractmethod
    def rows(
        self, settings: Mapping[str, object], head: Head, layers: Sequence[Layer]
    ) -> RowPooler:
        """For a worker; layers: those that a vector passes. Raises ConfigError naming the key."""

    @abstractmethod
    def inputs(
        self, info: EngineInfo, tokenizer: Tokenizer | None, template: str | None = None
    ) -> PoolingInputs:
        """For a front end; template: of pairs, before the checkpoint's own."""


class RowPooler(ABC):
    """Collects hidden states by row and makes the result at the row's last token."""

    @abstractmethod
    def width(self, hidden: torch.Tensor) -> int:
        """How wide embeddings are, by the hidden state of one token: [1, hidden]."""

    @abstractmethod
    def admit(self, row: int, params: PoolingParams, prompt: np.ndarray) -> None:
        """A pooling row starts, from its first token. prompt: [tokens] int64."""

    def watched(self, model: Model, forward: Forward, plan: Plan) -> Forward:
        """The forward pass of a step with rows that pool, for what no hidden state shows."""
        return forward

    @abstractmethod
    def release(self, row: int) -> None:
        """The row is gone; unknown rows are ignored."""

    @abstractmethod
    def feed(self, row: int, hidden: torch.Tensor) -> None:
        """hidden: [tokens, hidden], the next tokens of the row."""

    @abstractmethod
    def finish(self, rows: Sequence[int]) -> dict[int, np.ndarray]:
        """By row: [vector] fp32, or [tokens, vector] for the tasks that give one per token."""


@frozen(eq=False)
class PairContent:
    """One side of a pair with images, sound or video. text: the prompt that it is by itself; parts:
    of a message's content, for templates. media: in the order of their places, as the caller gave
    them; a prompt made of sides with media is a table that has theirs as `multi_modal_data`.
    """

    text: str
    parts: Sequence[Mapping[str, object]]
    media: tuple[object, ...]


@frozen(eq=False)
class PoolingJob:
    """Prompts to pool with their parameters, and how answers are made of what comes of them."""

    parts: Sequence[tuple[PromptLike, PoolingParams]]
    join: Callable[[Sequence[PoolingRequestOutput]], list[PoolingRequestOutput]] = list


class PoolingInputs(ABC):
    """How one engine's texts become prompts. All raise RequestError for what it cannot serve."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError if there is none."""

    @abstractmethod
    def read(
        self, text: str, params: PoolingParams, add_special_tokens: bool = True
    ) -> tuple[list[int], PoolingParams]:
        """The ids of a text, behind the prompt that the request names or the default one."""

    @abstractmethod
    def job(self, ids: Sequence[int], params: PoolingParams) -> PoolingJob:
        """What to ask of the engine for one prompt."""

    @abstractmethod
    def pairs(
        self,
        left: Sequence[str | PairContent],
        right: Sequence[str | PairContent],
        params: PoolingParams,
        *,
        template: str | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> PoolingJob:
        """Scores of pairs; template: before all others, variables: more of them for it."""


def paired(
    first: str | Sequence[T], second: str | Sequence[T], name: str = "data_2"
) -> tuple[Sequence[str | T], Sequence[str | T]]:
    """Two lists of one length; a single first text goes with every second one."""
    left: list[str | T] = [first] if isinstance(first, str) else list(first)
    right: list[str | T] = [second] if isinstance(second, str) else list(second)
    if len(left) == 1:
        left = left * len(right)
    if not left or len(left) != len(right):
        raise RequestError(f"{name}: {len(left)} texts are needed, one for each first text", name)
    return left, right
