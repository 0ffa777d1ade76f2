"""Transcribers for audio chat models, each with the prompt that it was trained with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from attrs import evolve

from modulm.errors import CheckpointError
from modulm_speech.instructed import InstructedTranscriber
from modulm_speech.transcriber import Question, Segment, Task, Transcriber, Wanted

if TYPE_CHECKING:
    from modulm_media.values import Sound

__all__ = [
    "Canary",
    "CohereAsr",
    "FireRed",
    "Flamingo",
    "FunAsr",
    "GlmAsr",
    "Granite",
    "KimiAudio",
    "Qwen3Asr",
    "Qwen3Omni",
    "QwenAudio",
    "QwenOmni",
]

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


class Qwen3Asr(InstructedTranscriber):
    """Qwen3-ASR: thirty languages.

    The answer names the language and goes on after `<asr_text>`; a known language is written in the
    prompt. The client's prompt is the system message.
    """

    known: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "ar": "arabic", "yue": "cantonese", "zh": "chinese", "cs": "czech", "da": "danish",
            "nl": "dutch", "en": "english", "fil": "filipino", "fi": "finnish", "fr": "french",
            "de": "german", "el": "greek", "hi": "hindi", "hu": "hungarian", "id": "indonesian",
            "it": "italian", "ja": "japanese", "ko": "korean", "mk": "macedonian", "ms": "malay",
            "fa": "persian", "pl": "polish", "pt": "portuguese", "ro": "romanian",
            "ru": "russian", "es": "spanish", "sv": "swedish", "th": "thai", "tr": "turkish",
            "vi": "vietnamese",
        }
    )  # fmt: skip
    form = (
        f"<|im_start|>system\n{{words}}<|im_end|>\n{_USER}<|audio_start|><|audio_pad|><|audio_end|>"
        f"{_ANSWER}"
    )
    without_language: ClassVar[Mapping[Task, str]] = MappingProxyType({"transcribe": ""})

    def ask(self, sound: Sound, wanted: Wanted) -> Question:
        name = self.known.get(wanted.language or "")
        spoken = f"language {name.title()}<asr_text>" if name else ""
        before, _, after = self.form.partition("{words}")
        prompt = self._plain(wanted.prompt.strip()) if wanted.prompt.strip() else []
        tokens = [*self._ids(before), *prompt, *self._ids(after + spoken)]
        return Question(tokens=tokens, sound=sound)

    def read(self, tokens: Sequence[int], seconds: float) -> tuple[Segment, ...]:
        mark = self._ids("<asr_text>")
        starts = [i for i in range(len(tokens)) if list(tokens[i : i + len(mark)]) == mark]
        spoken = list(tokens)[starts[0] + len(mark) :] if starts else tokens
        return super().read(spoken, seconds)


class GlmAsr(InstructedTranscriber):
    """GLM-ASR: it detects the language."""

    form = "<|user|>\n<|begin_of_audio|><|pad|><|end_of_audio|><|user|>\n{words}<|assistant|>\n"
    instructions: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {"transcribe": "Please transcribe this audio into text"}
    )
    without_language = instructions
    known: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"en": "english", "zh": "chinese", "yue": "cantonese"}
    )


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


class FunAsr(InstructedTranscriber):
    """Fun-ASR Nano (arXiv 2509.12508): it detects the language."""

    form = f"{_SYSTEM}{{words}}<|AUDIO|>{_ANSWER}"
    instructions: ClassVar[Mapping[Task, str]] = MappingProxyType({"transcribe": "语音转写："})
    without_language = instructions
    takes_prompts = False
    known: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"en": "english", "zh": "chinese", "ja": "japanese"}
    )


class FireRed(InstructedTranscriber):
    """FireRedASR 2 (arXiv 2501.14350)."""

    form = f"{_USER}<|AUDIO|>{{words}}{_ANSWER}"
    instructions: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {"transcribe": "请转写音频为文字"}
    )
    without_language = instructions
    takes_prompts = False
    known: ClassVar[Mapping[str, str]] = MappingProxyType({"en": "english", "zh": "chinese"})


class KimiAudio(InstructedTranscriber):
    """Kimi-Audio (arXiv 2504.18425): it detects the language."""

    form = (
        "<|im_kimia_user_msg_start|>{words}<|im_media_begin|><|im_kimia_text_blank|>"
        "<|im_media_end|><|im_msg_end|><|im_kimia_assistant_msg_start|>"
    )
    instructions: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {"transcribe": "Please transcribe the following audio:"}
    )
    without_language = instructions
    known: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "en": "english", "zh": "chinese", "ja": "japanese", "ko": "korean", "de": "german",
            "fr": "french", "es": "spanish", "it": "italian", "pt": "portuguese",
            "ru": "russian", "ar": "arabic",
        }
    )  # fmt: skip


class CohereAsr(Transcriber):
    """Cohere Transcribe: fourteen languages, named by tokens of its decoder."""

    takes_prompts = False
    known: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "ar": "arabic", "de": "german", "el": "greek", "en": "english", "es": "spanish",
            "fr": "french", "it": "italian", "ja": "japanese", "ko": "korean", "nl": "dutch",
            "pl": "polish", "pt": "portuguese", "vi": "vietnamese", "zh": "chinese",
        }
    )  # fmt: skip

    @property
    def languages(self) -> Mapping[str, str]:
        return self.known

    #: Whether the decoder's text begins with the token of a space.
    spaced: ClassVar[bool] = True

    def ask(self, sound: Sound, wanted: Wanted) -> Question:
        language = f"<|{wanted.language or 'en'}|>"
        written = "<|en|>" if wanted.task == "translate" else language
        names = (
            *["\u2581"] * self.spaced, "<|startofcontext|>", "<|startoftranscript|>",
            "<|emo:undefined|>", language, written, "<|pnc|>", "<|noitn|>", "<|notimestamp|>",
            "<|nodiarize|>",
        )  # fmt: skip
        tokens = [self.tokenizer.token_to_id(name) for name in names]
        missing = [name for name, token in zip(names, tokens, strict=True) if token is None]
        if missing:
            raise CheckpointError(f"{self.path}: the vocabulary has no token {missing[0]}")
        return Question(tokens=[int(token) for token in tokens if token is not None], sound=sound)


class Canary(CohereAsr):
    """Canary (arXiv 2509.14128): 25 languages of Europe, also translated into English."""

    spaced = False
    known: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "bg": "bulgarian", "hr": "croatian", "cs": "czech", "da": "danish", "nl": "dutch",
            "en": "english", "et": "estonian", "fi": "finnish", "fr": "french", "de": "german",
            "el": "greek", "hu": "hungarian", "it": "italian", "lv": "latvian",
            "lt": "lithuanian", "mt": "maltese", "pl": "polish", "pt": "portuguese",
            "ro": "romanian", "sk": "slovak", "sl": "slovenian", "es": "spanish",
            "sv": "swedish", "ru": "russian", "uk": "ukrainian",
        }
    )  # fmt: skip

    @property
    def tasks(self) -> tuple[Task, ...]:
        return ("transcribe", "translate")


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
