"""Voxtral (arXiv 2507.13264): transcribes with a prompt of its own, selected by a control token."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from modulm.errors import CheckpointError
from modulm_speech import Question, Transcriber, Wanted

if TYPE_CHECKING:
    from modulm_media.values import Sound

__all__ = ["VoxtralTranscriber"]

_LANGUAGES = {
    "de": "german", "en": "english", "es": "spanish", "fr": "french", "hi": "hindi",
    "it": "italian", "nl": "dutch", "pt": "portuguese",
}  # fmt: skip


class VoxtralTranscriber(Transcriber):
    """Detects the language if none is requested. Does not support the client's `prompt`."""

    longest = 60.0
    takes_prompts = False
    known: ClassVar[Mapping[str, str]] = MappingProxyType(_LANGUAGES)

    @property
    def languages(self) -> Mapping[str, str]:
        return self.known

    def ask(self, sound: Sound, wanted: Wanted) -> Question:
        names = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]", "[TRANSCRIBE]")
        *opening, transcribe = map(self._token, names)
        language: list[int] = []
        if wanted.language is not None:
            language = self.tokenizer.encode(f"lang:{wanted.language}", add_special_tokens=False)
        return Question(tokens=[*opening, *language, transcribe], sound=sound)

    def _token(self, name: str) -> int:
        index = self.tokenizer.token_to_id(name)
        if index is None:
            raise CheckpointError(f"{self.path}: the vocabulary has no token {name}")
        return index
