"""Transcribers for chat models that are prompted with instructions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from modulm_speech.transcriber import Question, Task, Transcriber, Wanted

if TYPE_CHECKING:
    from modulm_media.values import Sound

__all__ = ["InstructedTranscriber"]


class InstructedTranscriber(Transcriber):
    """A chat model that is prompted with `form`.

    `form` holds the audio placeholder and `{words}`, which is replaced by the instruction.
    instructions: prompts by task if the language is known; they may contain `{language}`.
    without_language: prompts without a language. The client's prompt is appended as text; control
    tokens in it are not recognized.
    """

    form: ClassVar[str]
    instructions: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {
            "transcribe": "Transcribe the speech, which is in {language}.",
            "translate": "Translate the speech, which is in {language}, into English.",
        }
    )
    without_language: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {
            "transcribe": "Transcribe the speech.",
            "translate": "Translate the speech into English.",
        }
    )
    #: Languages that it understands: code -> English name.
    known: ClassVar[Mapping[str, str]] = MappingProxyType({"en": "english"})

    @property
    def tasks(self) -> tuple[Task, ...]:
        return tuple(self.without_language)

    @property
    def languages(self) -> Mapping[str, str]:
        return self.known

    def ask(self, sound: Sound, wanted: Wanted) -> Question:
        name = self.known.get(wanted.language or "")
        instruction = self.without_language[wanted.task]
        if name is not None:
            instruction = self.instructions[wanted.task].format(language=name.title())
        before, _, after = self.form.partition("{words}")
        prompt_tokens = self._plain(f" {wanted.prompt.strip()}") if wanted.prompt.strip() else []
        return Question(
            tokens=[*self._ids(before + instruction), *prompt_tokens, *self._ids(after)],
            sound=sound,
        )

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _plain(self, text: str) -> list[int]:
        """Token ids of a client's text, without control tokens."""
        special = self.tokenizer.special_ids
        return [token for token in self._ids(text) if token not in special]
