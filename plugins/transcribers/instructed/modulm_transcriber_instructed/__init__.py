"""Chat models that hear: each is asked in the form and in the words that it was taught with."""

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
#: How a model begins that puts what was said into a sentence, and the quotation mark that opens it.
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
    told: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {
            "transcribe": "Transcribe the {language} audio into text.",
            "translate": "Translate the {language} speech into English text.",
        }
    )
    untold: ClassVar[Mapping[Task, str]] = MappingProxyType(
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
    """Audio Flamingo 3 (arXiv 2507.08128); its sentence around what was said is left out."""

    form = f"{_SYSTEM}<sound>{{words}}{_ANSWER}"
    told: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {"transcribe": "Transcribe the input speech."}
    )
    untold = told

    def read(self, tokens: Sequence[int], seconds: float) -> tuple[Segment, ...]:
        return tuple(
            evolve(segment, text=_unquoted(segment.text))
            for segment in super().read(tokens, seconds)
        )


class Granite(InstructedTranscriber):
    """Granite Speech (arXiv 2505.08699); it finds the language itself."""

    form = (
        "<|start_of_role|>user<|end_of_role|><|audio|>{words}<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>"
    )
    told: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {
            "transcribe": "can you transcribe the speech into a written format?",
            "translate": "translate the speech to English",
        }
    )
    untold = told
    known: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "en": "english", "fr": "french", "de": "german", "es": "spanish", "pt": "portuguese",
            "ja": "japanese",
        }
    )  # fmt: skip


def _unquoted(text: str) -> str:
    found = _QUOTED.match(text.strip())
    if found is None:
        return text
    said = text.strip()[found.end() :]
    return said.removesuffix(".").removesuffix(found[1])
