"""Transcribers of chat models, which are asked in words and answer in words."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from modulm_speech.transcriber import Question, Task, Transcriber, Wanted

if TYPE_CHECKING:
    from modulm_media.values import Sound

__all__ = ["InstructedTranscriber"]


class InstructedTranscriber(Transcriber):
    """A model that is asked by `form`: a prompt with the sound's placeholder, in whose place of
    `{words}` stands what is wanted.

    told: what is wanted, by task, where the language is known `{language}` stands for it; untold:
    where it is not. What the client has to say comes behind that, as text: nothing in it becomes a
    control token.
    """

    form: ClassVar[str]
    told: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {
            "transcribe": "Transcribe the speech, which is in {language}.",
            "translate": "Translate the speech, which is in {language}, into English.",
        }
    )
    untold: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {
            "transcribe": "Transcribe the speech.",
            "translate": "Translate the speech into English.",
        }
    )
    #: Code -> English name of what it understands.
    known: ClassVar[Mapping[str, str]] = MappingProxyType({"en": "english"})

    @property
    def tasks(self) -> tuple[Task, ...]:
        return tuple(self.untold)

    @property
    def languages(self) -> Mapping[str, str]:
        return self.known

    def ask(self, sound: Sound, wanted: Wanted) -> Question:
        name = self.known.get(wanted.language or "")
        words = self.untold[wanted.task]
        if name is not None:
            words = self.told[wanted.task].format(language=name.title())
        before, _, after = self.form.partition("{words}")
        given = self._plain(f" {wanted.prompt.strip()}") if wanted.prompt.strip() else []
        return Question(tokens=[*self._ids(before + words), *given, *self._ids(after)], sound=sound)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _plain(self, text: str) -> list[int]:
        """The ids of a client's text, without those of control tokens."""
        special = self.tokenizer.special_ids
        return [token for token in self._ids(text) if token not in special]
