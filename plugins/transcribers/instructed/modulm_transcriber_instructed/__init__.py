"""Transcribers for audio chat models, each with the prompt that it was trained with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from attrs import evolve

from modulm_speech.instructed import InstructedTranscriber
from modulm_speech.transcriber import Segment, Task

__all__ = ["Flamingo", "Granite", "Qwen3Omni", "QwenAudio", "QwenOmni"]

_USER = "<|im_start|>user\n"
_SYSTEM = f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{_USER}"
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
#: Sentence in which a model wraps its transcript, and the quotation mark that opens it.
_QUOTED = re.compile(r"^The (?:spoken content|transcription|transcript) of the audio is (['\"])")


class QwenAudio(InstructedTranscriber):
    """Qwen2-Audio (arXiv 2407.10759): eight languages."""

    form = f"{_SYSTEM}Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\n{{words}}{_ANSWER}"
    known: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "en": "english", "zh": "chinese", "yue": "cantonese", "fr": "french", "it": "italian",
            "es": "spanish", "de": "german", "ja": "japanese",
        }
    )  # fmt: skip


class QwenOmni(QwenAudio):
    """Qwen2.5-Omni (arXiv 2503.20215)."""

    form = f"{_SYSTEM}<|audio_bos|><|AUDIO|><|audio_eos|>{{words}}{_ANSWER}"
    instructions: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {
            "transcribe": "Transcribe the {language} audio into text.",
            "translate": "Translate the {language} speech into English text.",
        }
    )
    without_language: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {
            "transcribe": "Transcribe the audio into text.",
            "translate": "Translate the speech into English text.",
        }
    )


class Qwen3Omni(QwenOmni):
    """Qwen3-Omni (arXiv 2509.17765): nineteen languages."""

    form = f"{_USER}<|audio_start|><|audio_pad|><|audio_end|>{{words}}{_ANSWER}"
    known: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **QwenAudio.known, "ko": "korean", "ru": "russian", "pt": "portuguese", "ms": "malay",
            "nl": "dutch", "id": "indonesian", "tr": "turkish", "vi": "vietnamese",
            "ar": "arabic", "ur": "urdu", "th": "thai",
        }
    )  # fmt: skip


class Flamingo(InstructedTranscriber):
    """Audio Flamingo 3 (arXiv 2507.08128). The sentence around its transcript is removed."""

    form = f"{_SYSTEM}<sound>{{words}}{_ANSWER}"
    instructions: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {"transcribe": "Transcribe the input speech."}
    )
    without_language = instructions

    def read(self, tokens: Sequence[int], seconds: float) -> tuple[Segment, ...]:
        return tuple(
            evolve(segment, text=_unquoted(segment.text))
            for segment in super().read(tokens, seconds)
        )


class Granite(InstructedTranscriber):
    """Granite Speech (arXiv 2505.08699). It detects the language."""

    form = (
        "<|start_of_role|>user<|end_of_role|><|audio|>{words}<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>"
    )
    instructions: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {
            "transcribe": "can you transcribe the speech into a written format?",
            "translate": "translate the speech to English",
        }
    )
    without_language = instructions
    known: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "en": "english", "fr": "french", "de": "german", "es": "spanish", "pt": "portuguese",
            "ja": "japanese",
        }
    )  # fmt: skip


def _unquoted(text: str) -> str:
    match = _QUOTED.match(text.strip())
    if match is None:
        return text
    transcript = text.strip()[match.end() :]
    return transcript.removesuffix(".").removesuffix(match[1])
