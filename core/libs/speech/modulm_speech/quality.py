"""Whether an answer is what was said: the thresholds of Whisper's paper and of its README.

A model that repeats itself, or that is unsure of what it says, is asked again with a higher
temperature. Source: Radford et al., Robust Speech Recognition via Large-Scale Weak Supervision,
section 4.5.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from attrs import frozen

__all__ = ["TEMPERATURES", "Quality", "compression_ratio"]

#: In the order in which they are tried.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_REPEATS, _UNSURE, _NOBODY = 2.4, -1.0, 0.6


@frozen
class Quality:
    """An answer in numbers: the mean log probability of its tokens, how well its text can be
    compressed, and the probability that nobody speaks (0.0 where the model does not say).
    """

    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float = 0.0

    @property
    def silent(self) -> bool:
        """Whether nobody spoke, whatever the answer says."""
        return self.no_speech_prob > _NOBODY and self.avg_logprob < _UNSURE

    @property
    def failed(self) -> bool:
        """Whether to ask again."""
        if self.silent:
            return False
        return self.compression_ratio > _REPEATS or self.avg_logprob < _UNSURE

    @classmethod
    def of(cls, text: str, logprobs: Sequence[float], no_speech: float = 0.0) -> Quality:
        """logprobs: of each token of the answer."""
        mean = sum(logprobs) / len(logprobs) if logprobs else 0.0
        return cls(mean, compression_ratio(text), no_speech)


def compression_ratio(text: str) -> float:
    """Bytes of a text over those that are left when it is compressed; 0.0 for no text."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0
