"""XTC, "exclude top choices" (https://github.com/oobabooga/text-generation-webui/pull/6335).

With probability `xtc_probability` per step, removes all tokens of at least probability
`xtc_threshold` except the least probable of them.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from modulm.contracts.sampling import RowView
from modulm_samplers import SettingsProcessor, number

if TYPE_CHECKING:
    import torch

    from modulm.contracts.sampling import SamplingParams

__all__ = ["Xtc", "chance"]

#: Number of the answer's last tokens that determine a step's random number.
_LAST = 32


@frozen(kw_only=True)
class _Settings:
    """xtc_probability: 0 disables it, as does a threshold above 0.5."""

    xtc_probability: float = number(0.0, least=0, most=1)
    xtc_threshold: float = number(0.1, least=0, most=1)

    @property
    def active(self) -> bool:
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5


class Xtc(SettingsProcessor[_Settings]):
    """Removes the most probable tokens if several exceed the threshold."""

    settings = _Settings

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        super().__init__(vocabulary, device)
        self._seeds: dict[int, int] = {}

    def admit(self, view: RowView) -> bool:
        if not super().admit(view):
            return False
        self._seeds[view.row] = _seed(view.params)
        return True

    def release(self, row: int) -> None:
        super().release(row)
        self._seeds.pop(row, None)

    def apply_row(self, view: RowView, logits: torch.Tensor) -> torch.Tensor:
        settings = self.rows[view.row]
        if chance(self._seeds[view.row], view.output) >= settings.xtc_probability:
            return logits
        probabilities = logits.softmax(0)
        above = (probabilities >= settings.xtc_threshold).nonzero().flatten()
        if len(above) < 2:
            return logits
        kept = above[probabilities[above].argmin()]
        return logits.index_fill_(0, above[above != kept], float("-inf"))


def _seed(params: SamplingParams) -> int:
    return secrets.randbits(63) if params.seed is None else params.seed


def chance(seed: int, output: object) -> float:
    """Derive a number between 0 and 1 from the seed and the answer so far.

    The result does not depend on how the row is scheduled, and differs between choices with the
    same seed.
    """
    tokens = np.asarray(output, dtype=np.int64)
    text = f"{seed} {len(tokens)}".encode() + tokens[-_LAST:].tobytes()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") / 2**64
