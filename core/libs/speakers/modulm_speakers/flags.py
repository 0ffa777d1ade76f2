"""Flags for models that speak."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["SpeechConfig"]


@flag_group
class SpeechConfig(FlagGroup):
    """Answers in sound."""

    title = "SpeechConfig"

    enable_audio_output: bool = flag(
        False,
        "Load the part of a model that speaks its answers (Qwen-Omni's talker), for `modalities` "
        "with audio and /v1/audio/speech. It takes memory for weights and caches.",
    )
