"""Vectors instead of tokens: what pooling requests get from the hidden states of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, field, fields, frozen, validators

from modulm.contracts.sampling import PoolingParams
from modulm.errors import ConfigError

__all__ = ["Pooler", "PoolerConfig"]

#: Tasks whose vectors go through the model's head (its `logits`) and an activation.
_HEADED = frozenset({"classify", "score", "token_classify", "reward"})
_PER_TOKEN = frozenset({"token_embed", "token_classify", "reward"})
#: [n, inputs] -> [n, outputs].
Layer = Callable[[torch.Tensor], torch.Tensor]


def _upper(name: str) -> str:
    return name.upper()


@frozen
class PoolerConfig:
    """How hidden states become one vector; the table of `--pooler-config`.

    pooling_type: "LAST" token, "CLS" (the first), "MEAN" or "MAX" of all, or "ALL" of them.
    normalize: embeddings get length 1. use_activation: scores go through softmax, or sigmoid if
    there is one class or `multi_label` (each class for itself). A request's own parameters come
    first.
    """

    pooling_type: str = field(
        default="LAST",
        converter=_upper,
        validator=validators.in_(("LAST", "CLS", "MEAN", "MAX", "ALL")),
    )
    normalize: bool = True
    use_activation: bool = True
    dimensions: int | None = None
    multi_label: bool = False


@define(eq=False)
class _Row:
    """What has been seen of a row whose prompt may come in several steps."""

    params: PoolingParams
    parts: list[torch.Tensor] = field(factory=list)
    total: torch.Tensor | None = None
    tokens: int = 0
    dtype: torch.dtype = torch.float32


class Pooler:
    """Collects hidden states by row and makes the result at the row's last token.

    head: the model's `logits`, [n, hidden] -> [n, classes]. dense: layers that a text's vector
    passes before it is cut and normalised.
    """

    def __init__(self, config: PoolerConfig, head: Layer, dense: Sequence[Layer] = ()) -> None:
        self.config = config
        self.head = head
        self.dense = tuple(dense)
        self._rows: dict[int, _Row] = {}

    @classmethod
    def from_table(
        cls, table: Mapping[str, Any] | None, head: Layer, dense: Sequence[Layer] = ()
    ) -> Pooler:
        """A pooler from the table of `--pooler-config`. Raises ConfigError naming the key."""
        known = {f.name for f in fields(PoolerConfig)}
        for key in table or {}:
            if key not in known:
                raise ConfigError("pooler_config", f"{key!r} is not one of {', '.join(known)}")
        try:
            return cls(PoolerConfig(**(table or {})), head, dense)
        except (ValueError, AttributeError) as error:
            raise ConfigError("pooler_config", f"pooling_type: {error.args[0]}") from error

    def admit(self, row: int, params: PoolingParams) -> None:
        """A pooling row starts, from its first token."""
        self._rows[row] = _Row(params)

    def release(self, row: int) -> None:
        """The row is gone; unknown rows are ignored."""
        self._rows.pop(row, None)

    def feed(self, row: int, hidden: torch.Tensor) -> None:
        """hidden: [tokens, hidden], the next tokens of the row."""
        state = self._rows[row]
        kind = self._kind(state.params)
        if kind == "ALL":
            state.parts.append(hidden.clone())
        elif kind == "MEAN":
            # A running sum keeps the result the same for every way of cutting the prompt.
            state.dtype = hidden.dtype
            start = torch.zeros_like(hidden[:1], dtype=torch.float64)
            before = start if state.total is None else state.total
            state.total = torch.cat([before, hidden.double()]).cumsum(dim=0)[-1:]
        elif kind == "MAX":
            state.parts = [torch.cat([*state.parts, hidden]).amax(0, keepdim=True)]
        elif kind == "LAST":
            state.parts = [hidden[-1:].clone()]
        elif not state.parts:
            state.parts = [hidden[:1].clone()]
        state.tokens += len(hidden)

    def finish(self, row: int) -> np.ndarray:
        """[vector] fp32, or [tokens, vector] for the tasks that give one per token."""
        state = self._rows[row]
        if state.total is None:
            pooled = torch.cat(state.parts)
        else:
            pooled = (state.total / state.tokens).to(state.dtype)
        headed = state.params.task in _HEADED
        pooled = self._scores(pooled, state.params) if headed else self._embed(pooled, state.params)
        result = pooled.float().cpu().numpy()
        vector: np.ndarray = result if self._kind(state.params) == "ALL" else result[0]
        return vector

    def _kind(self, params: PoolingParams) -> str:
        return "ALL" if params.task in _PER_TOKEN else self.config.pooling_type

    def _embed(self, pooled: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Matryoshka embeddings (arXiv 2205.13147) are cut first and then normalised."""
        dimensions = params.dimensions or self.config.dimensions
        for layer in self.dense if params.task == "embed" else ():
            pooled = layer(pooled)
        pooled = pooled.float()[:, :dimensions]
        normalize = self.config.normalize if params.normalize is None else params.normalize
        return torch.nn.functional.normalize(pooled, dim=-1) if normalize else pooled

    def _scores(self, pooled: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        scores = self.head(pooled).float()
        wants = params.use_activation
        if not (self.config.use_activation if wants is None else wants):
            return scores
        alone = self.config.multi_label or scores.shape[-1] == 1
        return scores.sigmoid() if alone else scores.softmax(dim=-1)
