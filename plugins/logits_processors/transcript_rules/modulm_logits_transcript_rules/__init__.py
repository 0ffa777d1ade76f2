"""Rules for timestamp tokens in transcripts, as Whisper models were trained to write them.

A request sets them with `transcript_rules` in its extra arguments: a table of `times` (the token of
second 0; tokens of later times follow it), `written` (whether timestamps are generated), `end` (the
token that ends an answer), `latest` (how far above `times` the first timestamp may be), `hidden`
(tokens that are never generated) and `hidden_first` (tokens that may not come first either).

With timestamps, an answer begins with one, times never decrease, and each segment is text between
two of them. If all timestamps together are more probable than the best text token, a timestamp is
generated. Source: Radford et al., Robust Speech Recognition via Large-Scale Weak Supervision,
section 4.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen

from modulm.contracts.sampling import LogitsProcessor, RowView, SamplingParams
from modulm.errors import RequestError

if TYPE_CHECKING:
    import torch

__all__ = ["TranscriptRules"]

_FIELD = "transcript_rules"
_MOST = 4096


def _id(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"{value!r:.40} is not a token id")
    return value


def _ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > _MOST:
        raise ValueError(f"at most {_MOST} token ids are allowed")
    return tuple(_id(one) for one in value)


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r:.40} is not a boolean")
    return value


def _some_id(value: object) -> int | None:
    return None if value is None else _id(value)


@frozen(kw_only=True)
class _Rules:
    """A row's rules."""

    end: int = field(converter=_id)
    times: int = field(converter=_id)
    written: bool = field(default=True, converter=_truth)
    latest: int | None = field(default=None, converter=_some_id)
    hidden: tuple[int, ...] = field(default=(), converter=_ids)
    hidden_first: tuple[int, ...] = field(default=(), converter=_ids)

    @classmethod
    def of(cls, params: SamplingParams) -> _Rules | None:
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


@frozen(eq=False)
class _Row:
    rules: _Rules
    hidden: torch.Tensor
    hidden_first: torch.Tensor


class TranscriptRules(LogitsProcessor):
    """Applies the rules to the rows that requested them."""

    api = 1
    fields = ("extra_args",)

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        super().__init__(vocabulary, device)
        self._rows: dict[int, _Row] = {}
        self._tensors: dict[tuple[int, ...], torch.Tensor] = {}

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        _Rules.of(params)

    def admit(self, view: RowView) -> bool:
        rules = _Rules.of(view.params)
        if rules is None:
            return False
        ids = (rules.end, rules.times, *rules.hidden, *rules.hidden_first)
        if max(ids) >= self.vocabulary:
            raise RequestError(f"{_FIELD}: {max(ids)} is not a token of this model", _FIELD)
        hidden, first = self._tensor(rules.hidden), self._tensor(rules.hidden_first)
        self._rows[view.row] = _Row(rules, hidden, first)
        return True

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def apply_row(self, view: RowView, logits: torch.Tensor) -> torch.Tensor:
        row, never = self._rows[view.row], float("-inf")
        rules = row.rules
        logits[row.hidden] = never
        if not view.output:
            logits[row.hidden_first] = never
        if rules.written:
            _keep_times(logits, view.output, rules)
        else:
            logits[rules.times :] = never
        return logits

    def _tensor(self, ids: tuple[int, ...]) -> torch.Tensor:
        """Return the ids on the device, cached: a model's are the same for all of its rows."""
        import torch

        if len(self._tensors) > 16:
            self._tensors.clear()
        if ids not in self._tensors:
            self._tensors[ids] = torch.tensor(ids, dtype=torch.int64, device=self.device)
        return self._tensors[ids]


def _keep_times(logits: torch.Tensor, output: Sequence[int], rules: _Rules) -> None:
    """Mask, in place, the tokens that may not follow `output`."""
    import torch

    never, times = float("-inf"), rules.times
    if not output:
        logits[:times] = never
        if rules.latest is not None:
            logits[times + rules.latest + 1 :] = never
        return
    if output[-1] >= times:
        if len(output) < 2 or output[-2] >= times:
            logits[times:] = never
        else:
            end = logits[rules.end].clone()
            logits[:times] = never
            logits[rules.end] = end
    last = next((token for token in reversed(output) if token >= times), None)
    if last is not None:
        # A segment may begin where the previous one ended, but not end where it began.
        opens = output[-1] >= times and len(output) > 1 and output[-2] < times
        logits[times : last + (0 if opens else 1)] = never
    scores = torch.log_softmax(logits, dim=-1)
    certain = torch.logsumexp(scores[times:], dim=-1) > scores[:times].max()
    logits[:times] = torch.where(certain, never, logits[:times])
