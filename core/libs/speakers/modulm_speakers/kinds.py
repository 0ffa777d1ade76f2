"""The driver kind that this package adds: speakers."""

from modulm.plugins.kinds import Kind

__all__ = ["SPEAKERS"]

SPEAKERS = Kind(
    "speakers",
    "speaker",
    "speaker",
    "modulm_speakers.speaker:Speaker",
    kit="modulm_speakers.testing:check_speaker",
)
