"""The kind of driver that this package brings: how a model is asked for the text of sound."""

from modulm.plugins.kinds import Kind

__all__ = ["TRANSCRIBERS"]

TRANSCRIBERS = Kind(
    "transcribers", "transcriber", "transcriber", "modulm_speech.transcriber:Transcriber"
)
