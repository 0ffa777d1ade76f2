"""Transcribes with Parakeet, which says tokens with times instead of generating an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from modulm_speech.transcriber import Emitted, Question, Segment, Transcriber, Wanted, Word

if TYPE_CHECKING:
    import numpy as np

    from modulm_media.values import Sound

__all__ = ["Parakeet"]

#: Languages of `parakeet-tdt-0.6b-v3`, which it detects by itself; the others are of English.
_EUROPE = MappingProxyType(
    {
        "bg": "bulgarian", "hr": "croatian", "cs": "czech", "da": "danish", "nl": "dutch",
        "en": "english", "et": "estonian", "fi": "finnish", "fr": "french", "de": "german",
        "el": "greek", "hu": "hungarian", "it": "italian", "lv": "latvian", "lt": "lithuanian",
        "mt": "maltese", "pl": "polish", "pt": "portuguese", "ro": "romanian", "sk": "slovak",
        "sl": "slovenian", "es": "spanish", "sv": "swedish", "ru": "russian", "uk": "ukrainian",
    }
)  # fmt: skip
#: The smallest vocabulary of a model of several languages.
_MANY = 4096


class Parakeet(Transcriber):
    """The encoder's frames say tokens: `modulm_parakeet` has their form."""

    emits = "token_embed"
    times = True
    takes_prompts = False

    @property
    def languages(self) -> Mapping[str, str]:
        many = int(self.config.get("vocab_size", 0)) > _MANY
        return _EUROPE if many else MappingProxyType({"en": "english"})

    def ask(self, sound: Sound, wanted: Wanted) -> Question:
        return Question(tokens=[0], sound=sound)

    def emitted(self, result: np.ndarray, seconds: float) -> Emitted:
        said = list(_emissions(result))
        tokens = tuple(token for token, _, _ in said)
        words: list[Word] = []
        written = ""
        for count, (_, first, duration) in enumerate(said, 1):
            text = self.tokenizer.decode(list(tokens[:count]))
            piece, written = text[len(written) :], text
            start, end = (min(at * self._frame, seconds) for at in (first, first + duration))
            if not words or piece[:1].isspace():
                words.append(Word(start=start, end=end, text=piece.strip()))
            else:
                joined = words[-1].text + piece
                words[-1] = Word(start=words[-1].start, end=end, text=joined)
        words = [word for word in words if word.text]
        if not words:
            return Emitted()
        segment = Segment(start=words[0].start, end=words[-1].end, text=written, tokens=tokens)
        return Emitted(segments=(segment,), words=tuple(words))

    @cached_property
    def _frame(self) -> float:
        """Seconds of a frame of the encoder."""
        settings: dict[str, Any] = {}
        for name in ("processor_config.json", "preprocessor_config.json"):
            file = self.path / name
            if file.is_file() and not settings:
                table = json.loads(file.read_text(encoding="utf-8"))
                settings = table.get("feature_extractor") or table
        factor = (self.config.get("encoder_config") or {}).get("subsampling_factor", 8)
        hop, rate = settings.get("hop_length", 160), settings.get("sampling_rate", 16000)
        return float(factor * hop / rate)


def _emissions(rows: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Tokens, the frames where they begin, and their durations in frames.

    rows: [frames, columns]: 1 + the number of tokens, then the token and its duration for each.
    """
    for frame, row in enumerate(rows):
        for slot in range(int(row[0]) - 1):
            yield int(row[1 + 2 * slot]), frame, int(row[2 + 2 * slot])
