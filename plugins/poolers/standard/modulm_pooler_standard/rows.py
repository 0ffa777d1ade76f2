"""Pool the hidden states of rows into vectors, for pooling requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, field, fields, frozen, validators

from modulm.contracts.pooler import Head, Layer, RowPooler
from modulm.contracts.sampling import PoolingParams
from modulm.errors import ConfigError

__all__ = ["PoolerConfig", "StandardRows"]

#: Tasks whose vectors pass through the model's head (its `logits`) and an activation.
_HEADED = frozenset({"classify", "score", "token_classify", "reward"})
_PER_TOKEN = frozenset({"token_embed", "token_classify", "reward"})
_MODES = ("CLS", "LAST", "MEAN", "MAX", "MEAN_SQRT_LEN", "WEIGHTED_MEAN", "ALL")
#: Rows whose logits are computed at once: a head may be as wide as the vocabulary.
_SLICE = 64
#: vLLM's current and former names for our settings.
_ALIASES = {"seq_pooling_type": "pooling_type", "logit_bias": "logit_mean"}
#: Settings of the same table that are used elsewhere: by loading and by front ends.
_ELSEWHERE = ("enable_chunked_processing", "max_embed_len", "enable_flash_late_interaction")

_ACTIVATIONS: dict[str, Layer] = {
    "softmax": lambda x: x.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "identity": lambda x: x,
}


def _modes(value: Any) -> tuple[str, ...]:
    """Parse one pooling type or several, whose vectors are concatenated."""
    parts = value.split("+") if isinstance(value, str) else value
    return tuple(part.upper() for part in parts)


def _ids(value: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


@frozen
class PoolerConfig:
    """How hidden states become one vector: the table of `--pooler-config`.

    pooling_type: one type, or several as in "CLS+MAX". "LAST" token, "CLS" (the first token),
    "MEAN" or "MAX" of all tokens, "MEAN_SQRT_LEN" (sum divided by the root of the length),
    "WEIGHTED_MEAN" (weighted by position, from 1), or "ALL" tokens. normalize: scale embeddings to
    length 1.

    Class logits: `returned_token_ids` selects some of them; `contrast` takes the second minus the
    first. They become (logit - logit_mean) / logit_sigma and then, if `use_activation`, pass the
    function `activation`: by default softmax, or sigmoid if there is one class or `multi_label`.

    step_tag_id: tasks that rate tokens rate only tokens with this id (tok_pooling_type "ALL": all).
    task: what the model is used for, if it supports several; vectors of this task, else of "embed",
    pass the additional layers. layers_task: the task whose vectors do, if it is another one. media:
    only vectors of media tokens are returned, unmodified; others are zero. skipped_token_ids: by
    task, tokens whose vectors or ratings are left out. embedded_token_ids: `token_embed` returns
    the vectors of these tokens only, in this order. pooled_span: two token ids; if a prompt has
    both, one vector is pooled from the first to the second.

    Parameters of a request take precedence.
    """

    pooling_type: tuple[str, ...] = field(
        default=("LAST",),
        converter=_modes,
        validator=[validators.min_len(1), validators.deep_iterable(validators.in_(_MODES))],
    )
    normalize: bool = True
    use_activation: bool | None = None
    activation: str | None = field(
        default=None, validator=validators.optional(validators.in_(_ACTIVATIONS))
    )
    dimensions: int | None = field(
        default=None, validator=validators.optional(validators.instance_of(int))
    )
    multi_label: bool = False
    logit_mean: float = field(default=0.0, converter=float)
    logit_sigma: float = field(default=1.0, converter=float)
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = field(default=None, converter=_ids)
    contrast: bool = False
    tok_pooling_type: str | None = field(
        default=None, validator=validators.optional(validators.in_(("ALL", "STEP")))
    )
    task: str = "embed"
    media: bool = False
    layers_task: str | None = None
    skipped_token_ids: Mapping[str, Sequence[int]] = field(factory=dict)
    embedded_token_ids: tuple[int, ...] | None = field(default=None, converter=_ids)
    pooled_span: tuple[int, ...] | None = field(default=None, converter=_ids)

    def __attrs_post_init__(self) -> None:
        if "ALL" in self.pooling_type and len(self.pooling_type) > 1:
            raise ValueError("pooling_type: ALL cannot be combined with other types")
        if self.pooled_span is not None and len(self.pooled_span) != 2:
            raise ValueError("pooled_span: must be two token ids")
        if not self.logit_sigma:
            raise ValueError("logit_sigma: must not be 0")
        if self.tok_pooling_type == "STEP" and self.step_tag_id is None:
            raise ValueError("tok_pooling_type: STEP needs step_tag_id")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> PoolerConfig:
        """Structure the table. Raises ConfigError naming the key."""
        settings = {_ALIASES.get(key, key): value for key, value in table.items()}
        if (scale := settings.pop("logit_scale", None)) is not None:
            settings["logit_sigma"] = 1 / scale if scale else 0.0
        if settings.get("pooling_type") == "STEP":
            settings["tok_pooling_type"] = settings.pop("pooling_type")
        known = {f.name for f in fields(cls)}
        for key in settings:
            if key not in known and key not in _ELSEWHERE:
                raise ConfigError("pooler_config", f"{key!r} is not one of {', '.join(known)}")
        supported = {
            key: value for key, value in settings.items() if key in known and value is not None
        }
        try:
            return cls(**supported)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError("pooler_config", str(error.args[0])) from error

    def scores(self, logits: torch.Tensor, use_activation: bool | None) -> torch.Tensor:
        """Convert logits [n, outputs] to scores [n, classes].

        use_activation: of the request; None for the default.
        """
        if self.contrast:
            logits = logits[:, 1:] - logits[:, :1]
        logits = (logits - self.logit_mean) / self.logit_sigma
        used = self.use_activation if use_activation is None else use_activation
        independent = self.multi_label or logits.shape[-1] == 1
        name = self.activation or ("sigmoid" if independent else "softmax")
        return logits if used is False else _ACTIVATIONS[name](logits)


@define(eq=False)
class _Collected:
    """State of a row whose prompt may arrive in several steps."""

    params: PoolingParams
    prompt: np.ndarray
    first: torch.Tensor | None = None
    last: torch.Tensor | None = None
    high: torch.Tensor | None = None
    total: torch.Tensor | None = None
    weighted: torch.Tensor | None = None
    parts: list[torch.Tensor] = field(factory=list)
    seen: int = 0
    inside: np.ndarray | None = None
    passed: int = 0

    def within(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the row's next tokens that are pooled."""
        if self.inside is None:
            return hidden
        start, self.passed = self.passed, self.passed + len(hidden)
        indices = np.flatnonzero(self.inside[start : self.passed])
        return hidden[torch.from_numpy(indices).to(hidden.device)]

    def feed(self, hidden: torch.Tensor, modes: Sequence[str]) -> None:
        """Add the row's next tokens; hidden: [tokens, hidden]."""
        start, self.seen = self.seen, self.seen + len(hidden)
        left_out = max(self.params.pool_from - start, 0)
        start, hidden = start + left_out, hidden[left_out:]
        if not len(hidden):
            return
        if self.first is None:
            self.first = hidden[:1].clone()
        self.last = hidden[-1:].clone()
        if "ALL" in modes:
            self.parts.append(hidden.clone())
        if "MAX" in modes:
            parts = [hidden] if self.high is None else [self.high, hidden]
            self.high = torch.cat(parts).amax(0, keepdim=True)
        if "MEAN" in modes or "MEAN_SQRT_LEN" in modes:
            self.total = _sum(self.total, hidden.double())
        if "WEIGHTED_MEAN" in modes:
            ranks = torch.arange(start + 1, self.seen + 1, device=hidden.device)
            self.weighted = _sum(self.weighted, hidden.double() * ranks[:, None])

    def pooled(self, modes: Sequence[str]) -> torch.Tensor:
        """Return [1, modes * hidden], or [tokens, hidden] for the type ALL."""
        if self.first is None or self.last is None:
            raise ValueError("no token left to pool after the prompt")
        if "ALL" in modes:
            return torch.cat(self.parts)
        return torch.cat([self._pooled(mode) for mode in modes], dim=-1).to(self.first.dtype)

    def _pooled(self, mode: str) -> torch.Tensor:
        start, end = min(self.params.pool_from, self.seen), self.seen
        count = end - start
        plain: dict[str, Any] = {"CLS": self.first, "LAST": self.last, "MAX": self.high}
        sums: dict[str, tuple[Any, float]] = {
            "MEAN": (self.total, count),
            "MEAN_SQRT_LEN": (self.total, count**0.5),
            "WEIGHTED_MEAN": (self.weighted, count * (start + 1 + end) / 2),
        }
        if mode in plain:
            return plain[mode]  # type: ignore[no-any-return]
        total, weight = sums[mode]
        return total / weight  # type: ignore[no-any-return]


def _sum(before: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """Add token by token, so that the result does not depend on how the prompt was split into
    steps.
    """
    start = torch.zeros_like(values[:1]) if before is None else before
    return torch.cat([start, values]).cumsum(dim=0)[-1:]


def _between(prompt: np.ndarray, first: int, last: int) -> np.ndarray | None:
    """Return [tokens] bool: True from the first token `first` to the last token `last`; None if the
    prompt lacks them.
    """
    starts, stops = np.flatnonzero(prompt == first), np.flatnonzero(prompt == last)
    if not len(starts) or not len(stops) or stops[-1] < starts[0]:
        return None
    positions = np.arange(len(prompt))
    inside: np.ndarray = (positions >= starts[0]) & (positions <= stops[-1])
    return inside


class StandardRows(RowPooler):
    """Collects hidden states by row and returns the result with the row's last token.

    head: the model's `logits`, ([n, hidden], row of each [n]) -> [n, classes]. layers: applied to a
    vector before it is truncated and normalised.
    """

    def __init__(self, config: PoolerConfig, head: Head, layers: Sequence[Layer] = ()) -> None:
        self.config = config
        self.head = head
        self.layers = tuple(layers)
        self._rows: dict[int, _Collected] = {}

    def width(self, hidden: torch.Tensor) -> int:
        """Return the width of embeddings; hidden: the hidden state of one token, [1, hidden]."""
        vector = hidden.repeat(1, len(self._modes(PoolingParams(task=self.config.task))))
        passes = self.config.layers_task in (None, self.config.task)
        for layer in self.layers if passes else ():
            vector = layer(vector)
        return vector.shape[-1]

    def admit(self, row: int, params: PoolingParams, prompt: np.ndarray) -> None:
        """Start a pooling row at its first token. prompt: [tokens] int64."""
        span = None if params.task in _PER_TOKEN else self.config.pooled_span
        inside = None if span is None else _between(prompt, *span)
        self._rows[row] = _Collected(params, prompt, inside=inside)

    def release(self, row: int) -> None:
        """Forget a row; unknown rows are ignored."""
        self._rows.pop(row, None)

    def feed(self, row: int, hidden: torch.Tensor) -> None:
        """Add the row's next tokens; hidden: [tokens, hidden]."""
        state = self._rows[row]
        state.feed(state.within(hidden), self._modes(state.params))

    def finish(self, rows: Sequence[int]) -> dict[int, np.ndarray]:
        """Return results by row: [vector] fp32, or [tokens, vector] for tasks with one vector per
        token.
        """
        pooled = {row: self._pooled(self._rows[row]) for row in rows}
        single = [row for row in rows if self._task(row) in _HEADED - _PER_TOKEN]
        if single:
            sizes = [len(pooled[row]) for row in single]
            owners = np.repeat(single, sizes).tolist()
            logits = self._logits(torch.cat([pooled[row] for row in single]), owners)
            pooled |= zip(single, torch.split(logits, sizes), strict=True)
        return {row: self._result(row, vectors) for row, vectors in pooled.items()}

    def _result(self, row: int, pooled: torch.Tensor) -> np.ndarray:
        params = self._rows[row].params
        if params.task in _HEADED:
            each = params.task in _PER_TOKEN
            logits = self._logits(pooled, [row] * len(pooled)) if each else pooled
            pooled = self.config.scores(logits, params.use_activation)
        elif self.config.media:
            pooled = pooled[pooled.any(dim=-1)]
        else:
            pooled = self._embed(pooled, params)
        result = pooled.float().cpu().numpy()
        vector: np.ndarray = result if "ALL" in self._modes(params) else result[0]
        return vector

    def _task(self, row: int) -> str:
        return self._rows[row].params.task

    def _modes(self, params: PoolingParams) -> tuple[str, ...]:
        return ("ALL",) if params.task in _PER_TOKEN else self.config.pooling_type

    def _pooled(self, state: _Collected) -> torch.Tensor:
        pooled = state.pooled(self._modes(state.params))
        picked = self._picked(state)
        if picked is not None:
            return pooled[torch.from_numpy(picked).to(pooled.device)]
        step, rated = self.config.step_tag_id, state.params.task in _HEADED & _PER_TOKEN
        if step is None or not rated or self.config.tok_pooling_type == "ALL":
            return pooled
        indices = np.flatnonzero(state.prompt == step)
        return pooled[torch.from_numpy(indices).to(pooled.device)]

    def _picked(self, state: _Collected) -> np.ndarray | None:
        """Return the places of the tokens that a task per token returns; None for all of them."""
        task, prompt = state.params.task, state.prompt
        if task == "token_embed" and self.config.embedded_token_ids is not None:
            places = [np.flatnonzero(prompt == each) for each in self.config.embedded_token_ids]
            return np.concatenate(places)
        skipped = self.config.skipped_token_ids.get(task)
        if not skipped or task not in _PER_TOKEN:
            return None
        kept: np.ndarray = np.flatnonzero(~np.isin(prompt, skipped))
        return kept

    def _logits(self, pooled: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Apply the head: [n, hidden] of `rows` [n] -> [n, outputs] fp32. Of a wide head, only the
        returned tokens are computed.
        """
        columns = self.config.returned_token_ids
        if columns is None:
            return self.head(pooled, rows).float()
        wanted = list(columns)
        slices = [slice(at, at + _SLICE) for at in range(0, len(pooled), _SLICE)]
        return torch.cat([self.head(pooled[s], rows[s]).float()[:, wanted] for s in slices])

    def _embed(self, pooled: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Truncate Matryoshka embeddings (arXiv 2205.13147), then normalise."""
        passes = params.task == (self.config.layers_task or self.config.task)
        for layer in self.layers if passes else ():
            pooled = layer(pooled)
        pooled = pooled.float()[:, : params.dimensions or self.config.dimensions]
        wishes = (params.normalize, params.use_activation, self.config.use_activation)
        normalize = next((wish for wish in wishes if wish is not None), self.config.normalize)
        return torch.nn.functional.normalize(pooled, dim=-1) if normalize else pooled
