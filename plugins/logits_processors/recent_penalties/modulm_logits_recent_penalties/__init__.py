"""Penalties for tokens among the last ones of prompt and answer, as in llama.cpp.

A request sets them with `recent_penalties` in its extra arguments: a table of `last_n` (the number
of tokens considered, -1: all), `repeat`, `presence` and `frequency`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt

from modulm.contracts.sampling import LogitsProcessor, RowView, SamplingParams
from modulm.errors import RequestError

if TYPE_CHECKING:
    import torch

__all__ = ["RecentPenalties"]

_FIELD = "recent_penalties"


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{value!r} is not a number")
    return float(value)


@frozen(kw_only=True)
class _Penalties:
    """A row's penalties. Logits above 0 are divided by `repeat`, others are multiplied by it."""

    last_n: int = field(default=64, validator=ge(-1), converter=int)
    repeat: float = field(default=1.0, validator=gt(0), converter=_number)
    presence: float = field(default=0.0, converter=_number)
    frequency: float = field(default=0.0, converter=_number)

    @classmethod
    def of(cls, params: SamplingParams) -> _Penalties | None:
        """Structure the request's table. Raises RequestError if it is invalid."""
        table = (params.extra_args or {}).get(_FIELD)
        if table is None:
            return None
        try:
            if not isinstance(table, Mapping):
                raise TypeError("must be a table")
            return cls(**table)
        except (TypeError, ValueError) as error:
            raise RequestError(f"{_FIELD}: {error}", _FIELD) from error


class RecentPenalties(LogitsProcessor):
    """Lowers the probability of recently generated tokens."""

    api = 1
    fields = ("extra_args",)

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        super().__init__(vocabulary, device)
        self._rows: dict[int, _Penalties] = {}

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        _Penalties.of(params)

    def admit(self, view: RowView) -> bool:
        penalties = _Penalties.of(view.params)
        if penalties is None or penalties.last_n == 0:
            return False
        self._rows[view.row] = penalties
        return True

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def apply_row(self, view: RowView, logits: torch.Tensor) -> torch.Tensor:
        import torch

        penalties = self._rows[view.row]
        counts = Counter(_last(view, penalties.last_n))
        if not counts:
            return logits
        ids = torch.tensor(list(counts), device=logits.device)
        often = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        values = logits[ids]
        values = torch.where(values > 0, values / penalties.repeat, values * penalties.repeat)
        logits[ids] = values - penalties.presence - penalties.frequency * often
        return logits


def _last(view: RowView, count: int) -> list[int]:
    """Return the last tokens of prompt and answer."""
    answer = list(view.output)
    if count < 0:
        return [*map(int, view.prompt), *answer]
    missing = count - len(answer)
    before = list(map(int, view.prompt[-missing:])) if missing > 0 else []
    return [*before, *answer[-count:]]
