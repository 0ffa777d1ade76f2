"""The driver kind that this package adds: transcribers."""

from modulm.plugins.kinds import Kind

__all__ = ["TRANSCRIBERS"]

TRANSCRIBERS = Kind(
    "transcribers",
    "transcriber",
    "transcriber",
    "modulm_speech.transcriber:Transcriber",
    kit="modulm_speech.testing:check_transcriber",
)
