"""Dynamic temperature: low if the model is certain, high if not.

The temperature is `low + (high - low) * (H / H_max) ** exponent`, where H is the entropy of the
next token at temperature 1, H_max the logarithm of the number of tokens, and low and high are the
request's temperature minus and plus `dynatemp_range`, at least 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import frozen

from modulm.contracts.sampling import RowView, SamplingParams
from modulm.errors import RequestError
from modulm_samplers import SettingsProcessor, number

if TYPE_CHECKING:
    import torch

__all__ = ["DynamicTemperature"]

#: The minimum temperature, at which only the best token remains.
_COLDEST = 1e-5


@frozen(kw_only=True)
class _Settings:
    """dynatemp_range: half the range of temperatures; 0 disables it."""

    dynatemp_range: float = number(0.0, least=0, most=100)
    dynatemp_exponent: float = number(1.0, least=0, most=100)

    @property
    def active(self) -> bool:
        return self.dynatemp_range > 0


class DynamicTemperature(SettingsProcessor[_Settings]):
    """Replaces the temperature by one that depends on the entropy."""

    settings = _Settings

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        if cls.settings_of(params) is not None and params.greedy:
            message = "dynatemp_range needs a temperature above 0"
            raise RequestError(message, "dynatemp_range")

    def apply_row(self, view: RowView, logits: torch.Tensor) -> torch.Tensor:
        settings, base = self.rows[view.row], view.params.temperature
        plain = logits * base
        logprobs = plain.log_softmax(0)
        entropy = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum()
        tokens = int(logits.isfinite().sum())
        share = float(entropy) / math.log(tokens) if tokens > 1 else 0.0
        low = max(base - settings.dynatemp_range, 0.0)
        high = base + settings.dynatemp_range
        warmth = min(max(share, 0.0), 1.0) ** settings.dynatemp_exponent
        return plain / max(low + (high - low) * warmth, _COLDEST)
