"""Voxtral (arXiv 2507.13264): a prompt of its own for transcripts, told by a control token."""

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
    """It finds the language itself where it is told none, and takes no words of the client's."""

    longest = 60.0
    takes_prompts = False
    known: ClassVar[Mapping[str, str]] = MappingProxyType(_LANGUAGES)

    @property
    def languages(self) -> Mapping[str, str]:
        return self.known

    def ask(self, sound: Sound, wanted: Wanted) -> Question:
        names = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]", "[TRANSCRIBE]")
        *opening, transcribe = map(self._token, names)
        told: list[int] = []
        if wanted.language is not None:
            told = self.tokenizer.encode(f"lang:{wanted.language}", add_special_tokens=False)
        return Question(tokens=[*opening, *told, transcribe], sound=sound)

    def _token(self, name: str) -> int:
        found = self.tokenizer.token_to_id(name)
        if found is None:
            raise CheckpointError(f"{self.path}: there is no token {name}")
        return found
