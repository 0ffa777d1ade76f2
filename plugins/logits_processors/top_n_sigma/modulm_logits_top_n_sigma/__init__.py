"""Top-n-sigma (Tang et al., arXiv 2411.07641): keep logits within n deviations of the best one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from modulm.contracts.sampling import RowView
from modulm_samplers import SettingsProcessor, number

if TYPE_CHECKING:
    import torch

__all__ = ["TopNSigma"]


@frozen(kw_only=True)
class _Settings:
    """top_n_sigma: the number of standard deviations; -1 and 0 disable it."""

    top_n_sigma: float = number(-1.0, least=-1)

    @property
    def active(self) -> bool:
        return self.top_n_sigma > 0


class TopNSigma(SettingsProcessor[_Settings]):
    """Removes tokens whose logit is more than n standard deviations below the largest.

    The result does not depend on the temperature. Tokens that were removed before do not count for
    the deviation.
    """

    settings = _Settings

    def apply_row(self, view: RowView, logits: torch.Tensor) -> torch.Tensor:
        finite = logits[logits.isfinite()]
        if len(finite) < 2:
            return logits
        least = finite.max() - self.rows[view.row].top_n_sigma * finite.std(correction=0)
        return logits.masked_fill_(logits < least, float("-inf"))
