"""The flags of speech to text: `config.group(TranscriptionConfig)`."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["TranscriptionConfig"]


@flag_group
class TranscriptionConfig(FlagGroup):
    """Speech to text."""

    title = "Transcription"
    server = True

    max_audio_clip_filesize_mb: int = flag(
        25, "Maximum size of an audio file to transcribe.", unit="MB", least=1
    )
    max_transcription_seconds: float = flag(
        7200.0, "Maximum length of audio to transcribe.", unit="s", least=1
    )
    max_transcription_pieces: int = flag(
        32, "Maximum pieces of one audio file to transcribe at a time.", least=1
    )
    max_realtime_sessions: int = flag(
        256, "Maximum open /v1/realtime sessions of a server process.", least=1
    )
    max_realtime_seconds: float = flag(
        600.0, "Maximum length of audio between two commits of a session.", unit="s", least=1
    )
    realtime_idle_timeout: float = flag(
        300.0, "Idle time after which a session is closed.", unit="s", least=1
    )
