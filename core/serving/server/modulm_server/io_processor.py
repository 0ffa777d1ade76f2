"""IO processors: requests and answers of a form of their own (group `modulm.io_processors`).

A pooling model takes texts and returns vectors. An IO processor reads other data, such as a table
or an image in tiles, makes prompts of it, and makes an answer of the vectors. `POST /pooling` with
`data` goes through the one that `--io-processor-plugin` names. The methods have vLLM's names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.sampling import PoolingParams

__all__ = ["API", "IOProcessor"]

API = 1


class IOProcessor(ABC):
    """Turns the `data` of a request into prompts, and their vectors into an answer.

    One object serves all requests, from several threads: state of a request belongs into the value
    of `parse_data`.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def parse_data(self, data: Any) -> Any:
        """Check the JSON value of a request, and return what the other methods get.

        Raises RequestError for data that it does not accept: clients send anything.
        """

    @abstractmethod
    def pre_process(self, value: Any) -> Sequence[str | Sequence[int]]:
        """Return the prompts: at least one, all texts or all lists of token ids."""

    def merge_pooling_params(self, value: Any, params: PoolingParams) -> PoolingParams:
        """Return the parameters of all prompts; `params` are those of the request."""
        return params

    @abstractmethod
    def post_process(self, value: Any, outputs: Sequence[np.ndarray]) -> Any:
        """Return the answer, as a JSON value. outputs: what the model returned for each prompt."""
