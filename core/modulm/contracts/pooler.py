"""Pooler: tasks of pooling models, their prompts, and vectors from hidden states.

Group `modulm.poolers`, chosen by the key `pooler` of `--pooler-config` (default: `standard`). Front
ends import poolers as well and may not have torch.
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
#: The model's `logits`: [n, hidden] and the row of each -> [n, classes].
Head: TypeAlias = "Callable[[torch.Tensor, Sequence[int]], torch.Tensor]"


class Pooler(ABC):
    """A pooling method, constructed without arguments.

    Settings go by their names in `--pooler-config`.
    """

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
        """Return (architecture to run, task) if a generating model is to be pooled, else None.

        names: the checkpoint's architectures. installed: architectures with a driver.
        """

    @abstractmethod
    def convert(
        self,
        driver: type[Model],
        purpose: str,
        table: Mapping[str, object],
        settings: Mapping[str, object],
    ) -> type[Model]:
        """Return a variant of the driver for the task `purpose`. table: config.json."""

    @abstractmethod
    def tasks(
        self, checkpoint: Checkpoint, model: Model, given: Mapping[str, object]
    ) -> tuple[str, ...]:
        """Return the supported tasks. Raises ConfigError if the settings require another one."""

    @abstractmethod
    def settings(
        self, checkpoint: Checkpoint, model: Model, given: Mapping[str, object]
    ) -> dict[str, object]:
        """Return the given settings, completed by the model's defaults, as plain values."""

    @abstractmethod
    def rows(
        self, settings: Mapping[str, object], head: Head, layers: Sequence[Layer]
    ) -> RowPooler:
        """Create the worker's half. layers: applied to pooled vectors.

        Raises ConfigError naming the key.
        """

    @abstractmethod
    def inputs(
        self, info: EngineInfo, tokenizer: Tokenizer | None, template: str | None = None
    ) -> PoolingInputs:
        """Create the front end's half. template: for pairs; overrides the checkpoint's."""


class RowPooler(ABC):
    """Collects hidden states by row and pools them at the row's last token."""

    @abstractmethod
    def width(self, hidden: torch.Tensor) -> int:
        """Return the length of embeddings. hidden: of one token, [1, hidden]."""

    @abstractmethod
    def admit(self, row: int, params: PoolingParams, prompt: np.ndarray) -> None:
        """Start a pooling row at its first token. prompt: [tokens] int64."""

    def watched(self, model: Model, forward: Forward, plan: Plan) -> Forward:
        """Return the forward pass, or a wrapper to observe more than the final hidden states."""
        return forward

    @abstractmethod
    def release(self, row: int) -> None:
        """Forget the row; unknown rows are ignored."""

    @abstractmethod
    def feed(self, row: int, hidden: torch.Tensor) -> None:
        """Add the row's next tokens. hidden: [tokens, hidden]."""

    @abstractmethod
    def finish(self, rows: Sequence[int]) -> dict[int, np.ndarray]:
        """Return the results by row: [vector] fp32, or [tokens, vector] for token-wise tasks."""


@frozen(eq=False)
class PairContent:
    """One side of a pair with images, sound or video.

    text: its prompt without a template. parts: content parts of a chat message, for templates.
    media: as given by the caller, in prompt order; they become the prompt's `multi_modal_data`.
    """

    text: str
    parts: Sequence[Mapping[str, object]]
    media: tuple[object, ...]


@frozen(eq=False)
class PoolingJob:
    """Prompts to pool, their parameters, and a function that turns results into outputs."""

    parts: Sequence[tuple[PromptLike, PoolingParams]]
    join: Callable[[Sequence[PoolingRequestOutput]], list[PoolingRequestOutput]] = list


class PoolingInputs(ABC):
    """Builds an engine's pooling prompts. Methods raise RequestError for unsupported requests."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError if there is none."""

    @abstractmethod
    def read(
        self, text: str, params: PoolingParams, add_special_tokens: bool = True
    ) -> tuple[list[int], PoolingParams]:
        """Tokenize a text, prefixed by the prompt that the request names, or by the default."""

    @abstractmethod
    def job(self, ids: Sequence[int], params: PoolingParams) -> PoolingJob:
        """Build the job for one prompt."""

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
        """Build the job that scores pairs.

        template: overrides all others. variables: additional template variables.
        """


def paired(
    first: str | Sequence[T], second: str | Sequence[T], name: str = "data_2"
) -> tuple[Sequence[str | T], Sequence[str | T]]:
    """Pair two lists of equal length; a single first text is paired with every second one."""
    left: list[str | T] = [first] if isinstance(first, str) else list(first)
    right: list[str | T] = [second] if isinstance(second, str) else list(second)
    if len(left) == 1:
        left = left * len(right)
    if not left or len(left) != len(right):
        raise RequestError(f"{name}: {len(left)} texts are needed, one for each first text", name)
    return left, right
