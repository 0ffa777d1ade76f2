"""Acceptance of transcripts, by the thresholds of Whisper's paper and README.

A transcript that repeats itself or has a low probability is generated again at a higher
temperature. Source: Radford et al., Robust Speech Recognition via Large-Scale Weak Supervision,
section 4.5.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from attrs import frozen

__all__ = ["TEMPERATURES", "Quality", "compression_ratio"]

#: Temperatures in the order they are tried.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_REPEATS, _UNSURE, _NOBODY = 2.4, -1.0, 0.6


@frozen
class Quality:
    """Quality measures of a transcript.

    The mean log probability of its tokens, the compression ratio of its text, and the probability
    that there is no speech (0.0 if the model does not provide it).
    """

    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float = 0.0

    @property
    def silent(self) -> bool:
        """Whether there is no speech; the text is discarded then."""
        return self.no_speech_prob > _NOBODY and self.avg_logprob < _UNSURE

    @property
    def failed(self) -> bool:
        """Whether to generate again."""
        if self.silent:
            return False
        return self.compression_ratio > _REPEATS or self.avg_logprob < _UNSURE

    @classmethod
    def of(cls, text: str, logprobs: Sequence[float], no_speech: float = 0.0) -> Quality:
        """Measure a transcript. logprobs: log probability of each of its tokens."""
        mean = sum(logprobs) / len(logprobs) if logprobs else 0.0
        return cls(mean, compression_ratio(text), no_speech)


def compression_ratio(text: str) -> float:
    """Size of a text divided by its compressed size; 0.0 for an empty text."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0
