"""Penalties for tokens that stand among the last ones, prompt or answer, as llama.cpp counts them.

A request asks for them with `recent_penalties` in its extra arguments: a table of `last_n` (how
many tokens are looked at, -1: all), `repeat`, `presence` and `frequency`.
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
    """What a row asked for. A logit above 0 is divided by `repeat`, one below is multiplied."""

    last_n: int = field(default=64, validator=ge(-1), converter=int)
    repeat: float = field(default=1.0, validator=gt(0), converter=_number)
    presence: float = field(default=0.0, converter=_number)
    frequency: float = field(default=0.0, converter=_number)

    @classmethod
    def of(cls, params: SamplingParams) -> _Penalties | None:
        """Raises RequestError for a table that is none."""
        given = (params.extra_args or {}).get(_FIELD)
        if given is None:
            return None
        try:
            if not isinstance(given, Mapping):
                raise TypeError("a table is expected")
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise RequestError(f"{_FIELD}: {error}", _FIELD) from error


class RecentPenalties(LogitsProcessor):
    """Makes tokens less likely that were said lately."""

    api = 1
    fields = ("extra_args",)

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        super().__init__(vocabulary, device)
        self._rows: dict[int, _Penalties] = {}

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        _Penalties.of(params)

    def admit(self, view: RowView) -> bool:
        asked = _Penalties.of(view.params)
        if asked is None or asked.last_n == 0:
            return False
        self._rows[view.row] = asked
        return True

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def apply_row(self, view: RowView, logits: torch.Tensor) -> torch.Tensor:
        import torch

        asked = self._rows[view.row]
        counts = Counter(_last(view, asked.last_n))
        if not counts:
            return logits
        ids = torch.tensor(list(counts), device=logits.device)
        often = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        found = logits[ids]
        found = torch.where(found > 0, found / asked.repeat, found * asked.repeat)
        logits[ids] = found - asked.presence - asked.frequency * often
        return logits


def _last(view: RowView, count: int) -> list[int]:
    """The last tokens of prompt and answer."""
    answer = list(view.output)
    if count < 0:
        return [*map(int, view.prompt), *answer]
    missing = count - len(answer)
    before = list(map(int, view.prompt[-missing:])) if missing > 0 else []
    return [*before, *answer[-count:]]
