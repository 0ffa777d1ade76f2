"""Locally typical sampling (Meister et al., arXiv 2202.00666)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from modulm.contracts.sampling import RowView
from modulm_samplers import SettingsProcessor, number

if TYPE_CHECKING:
    import torch

__all__ = ["TypicalP"]


@frozen(kw_only=True)
class _Settings:
    """typical_p: the total probability of the kept tokens; 1 disables it."""

    typical_p: float = number(1.0, least=0, most=1)

    @property
    def active(self) -> bool:
        return self.typical_p < 1


class TypicalP(SettingsProcessor[_Settings]):
    """Keeps the tokens whose surprise is nearest to the entropy, up to a total of `typical_p`.

    At least one token is kept.
    """

    settings = _Settings

    def apply_row(self, view: RowView, logits: torch.Tensor) -> torch.Tensor:
        import torch

        logprobs = logits.log_softmax(0)
        probabilities = logprobs.exp()
        entropy = -(probabilities * logprobs).nan_to_num(0.0).sum()
        distance = (-logprobs - entropy).abs()
        order = distance.argsort(stable=True)
        before = probabilities[order].cumsum(0) - probabilities[order]
        left_out = order[(before >= self.rows[view.row].typical_p).nonzero().flatten()]
        left_out = left_out[left_out != order[0]]
        return logits.index_fill_(0, left_out.to(torch.int64), float("-inf"))
