"""The flags of speech to text: `config.group(TranscriptionConfig)`."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["TranscriptionConfig"]


@flag_group
class TranscriptionConfig(FlagGroup):
    """Speech to text, for models that hear."""

    title = "Transcription"
    server = True

    max_audio_clip_filesize_mb: int = flag(
        25, "Most megabytes of a file of sound to transcribe.", unit="MB", least=1
    )
    max_transcription_seconds: float = flag(
        7200.0, "Longest sound to transcribe.", unit="s", least=1
    )
    max_transcription_pieces: int = flag(
        32, "Most pieces of one sound that are transcribed at a time.", least=1
    )
    max_realtime_sessions: int = flag(
        256, "Most open web sockets of /v1/realtime of a server process.", least=1
    )
    max_realtime_seconds: float = flag(
        600.0, "Longest sound that a web socket sends between two commits.", unit="s", least=1
    )
    realtime_idle_timeout: float = flag(
        300.0, "Silence after which a web socket is closed.", unit="s", least=1
    )
