"""Whisper: its decoder is told language, task and times by tokens; its times are tokens too.

Source: Radford et al., Robust Speech Recognition via Large-Scale Weak Supervision, section 2.3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.errors import CheckpointError
from modulm_speech import Alignment, Question, Segment, Transcriber, Wanted, Word
from modulm_speech.transcriber import Task

if TYPE_CHECKING:
    import numpy as np

    from modulm.text.tokenizer import Tokenizer
    from modulm_media.values import Sound

__all__ = ["WhisperTranscriber"]

#: Seconds between two tokens of time, and times at which a first segment may begin.
_STEP, _LATEST = 0.02, 50
#: Characters of a prompt's end that are looked at: more than fit.
_PROMPT = 8192


class WhisperTranscriber(Transcriber):
    """One checkpoint: what its tokens are is in generation_config.json, or known by their names."""

    times = True
    aligns = "align"

    def __init__(self, tokenizer: Tokenizer, path: Path, config: Mapping[str, Any]) -> None:
        super().__init__(tokenizer, path, config)
        self._generation = _table(Path(path) / "generation_config.json")
        self.longest = _longest(Path(path))
        self._start = self._told("decoder_start_token_id", "<|startoftranscript|>")
        self._end = self._told("eos_token_id", "<|endoftext|>")
        self._no_times = self._told("no_timestamps_token_id", "<|notimestamps|>")
        self._first_time = self._no_times + 1

    @property
    def detects(self) -> bool:  # type: ignore[override]
        """Models of English alone are told no language."""
        return bool(self._language_ids)

    @property
    def tasks(self) -> tuple[Task, ...]:
        return ("transcribe", "translate") if self._language_ids else ("transcribe",)

    @cached_property
    def languages(self) -> Mapping[str, str]:
        names = _names()
        if not self._language_ids:
            return {"en": "english"}
        return {code: names.get(code, code) for code in self._language_ids}

    def ask(self, sound: Sound, wanted: Wanted) -> Question:
        tokens = self._before(wanted.prompt)
        place = len(tokens) + 1
        tokens.append(self._start)
        if self._language_ids:
            tokens.append(self._language_ids[wanted.language or "en"])
            tokens.append(self._task_ids[wanted.task])
        rules: dict[str, Any] = {
            "times": self._first_time,
            "written": wanted.times,
            "end": self._end,
            "hidden": self._hidden,
            "hidden_first": self._listed("begin_suppress_tokens"),
        }
        if wanted.times:
            latest = self._generation.get("max_initial_timestamp_index")
            rules["latest"] = _LATEST if latest is None else int(latest)
        else:
            tokens.append(self._no_times)
        nobody = self._no_speech
        return Question(
            tokens=tokens,
            sound=sound,
            params={"extra_args": {"transcript_rules": rules}},
            no_speech=None if nobody is None else (place, nobody),
        )

    def ask_language(self, sound: Sound) -> Question:
        allowed = tuple(self._language_ids.values())
        return Question(tokens=[self._start], sound=sound, params={"allowed_token_ids": allowed})

    def language(self, tokens: Sequence[int]) -> str:
        codes = {token: code for code, token in self._language_ids.items()}
        return codes[tokens[0]]

    def read(self, tokens: Sequence[int], seconds: float) -> tuple[Segment, ...]:
        """Text between two times is a segment; what has no second one lasts to the end."""
        found: list[Segment] = []
        begin, text = 0.0, []
        for token in tokens:
            if token < self._first_time:
                text += [] if token in self._special else [token]
                continue
            time = min((token - self._first_time) * _STEP, seconds)
            if text:
                found.append(self._segment(begin, time, text))
            begin, text = time, []
        if text:
            found.append(self._segment(begin, seconds, text))
        return tuple(found)

    def align(self, question: Question, tokens: Sequence[int]) -> Alignment | None:
        said = self._said(tokens)
        if all(token in self._special or token >= self._first_time for token in said):
            return None
        # Half as many as the features, of which there are a hundred a second.
        sound = question.sound
        frames = max(-(-len(sound.samples) * 100 // sound.rate) // 2, 1)
        params = {"pool_from": len(question.tokens), "extra_args": {"frames": frames}}
        return Alignment(tokens=[*question.tokens, *said], params=params)

    def words(
        self, tokens: Sequence[int], found: np.ndarray, seconds: float, language: str | None
    ) -> tuple[Word, ...]:
        """A token is said from where the one before it ends; words do not cross segments."""
        from modulm_transcriber_whisper.words import UNSPACED, ends_of, joined

        said = self._said(tokens)
        ends = [min(float(frame) * _STEP, seconds) for frame in ends_of(found)]
        words: list[Word] = []
        runs: list[list[int]] = [[]]
        for place, token in enumerate(said):
            if token >= self._first_time:
                runs.append([])
            elif token not in self._special:
                runs[-1].append(place)
        for run in runs:
            parts = joined(
                [said[place] for place in run],
                self.tokenizer.decode,
                spaced=language not in UNSPACED,
            )
            for text, first, end in parts:
                begin = ends[run[first] - 1] if run[first] else 0.0
                if text.strip():
                    words.append(Word(start=begin, end=ends[run[end - 1]], text=text.strip()))
        return tuple(words)

    def _said(self, tokens: Sequence[int]) -> list[int]:
        """An answer without what ends it."""
        listed = list(tokens)
        return listed[:-1] if listed and listed[-1] == self._end else listed

    def _segment(self, begin: float, end: float, tokens: list[int]) -> Segment:
        text = self.tokenizer.decode(tokens)
        return Segment(start=begin, end=max(begin, end), text=text, tokens=tuple(tokens))

    def _before(self, prompt: str) -> list[int]:
        """The prompt as what was said before; its end, where it is longer than half the room."""
        opening = self.tokenizer.token_to_id("<|startofprev|>")
        if not prompt.strip() or opening is None:
            return []
        end = prompt.strip()[-_PROMPT:]
        given = self.tokenizer.encode(f" {end}", add_special_tokens=False)
        spoken = [token for token in given if token not in self._special]
        most = int(self.config.get("max_target_positions", 448)) // 2 - 1
        return [opening, *spoken[-most:]]

    def _told(self, key: str, name: str) -> int:
        """A token's id, by the settings or by its name. Raises CheckpointError."""
        named = self.tokenizer.token_to_id(name)
        stated = self._generation.get(key, self.config.get(key))
        found = stated if isinstance(stated, int) else named
        if found is None:
            raise CheckpointError(f"{self.path}: there is no token {name}")
        return int(found)

    def _listed(self, key: str) -> list[int]:
        given = self._generation.get(key, self.config.get(key))
        vocabulary = int(self.config.get("vocab_size", 1 << 31))
        return [int(one) for one in given or () if 0 <= int(one) < vocabulary]

    @cached_property
    def _language_ids(self) -> Mapping[str, int]:
        """Code -> token; none for models of English alone."""
        if self._generation.get("is_multilingual") is False:
            return {}
        stated = self._generation.get("lang_to_id")
        if isinstance(stated, Mapping) and stated:
            return {str(name).strip("<|>"): int(token) for name, token in stated.items()}
        found = {code: self.tokenizer.token_to_id(f"<|{code}|>") for code in _names()}
        return {code: token for code, token in found.items() if token is not None}

    @cached_property
    def _task_ids(self) -> Mapping[str, int]:
        stated = self._generation.get("task_to_id") or {}
        return {
            task: int(stated[task]) if task in stated else self._told("", f"<|{task}|>")
            for task in ("transcribe", "translate")
        }

    @cached_property
    def _no_speech(self) -> int | None:
        names = ("<|nospeech|>", "<|nocaptions|>")
        found = [self.tokenizer.token_to_id(name) for name in names]
        return next((token for token in found if token is not None), None)

    @cached_property
    def _special(self) -> frozenset[int]:
        """Tokens that are no text, beside those of time."""
        return frozenset({*self.tokenizer.special_ids, self._start, self._end, self._no_times})

    @cached_property
    def _hidden(self) -> list[int]:
        """What no answer has: what the settings name, and tokens that only prompts have."""
        prompts = {token for token in self._special if token < self._first_time}
        return sorted({*self._listed("suppress_tokens"), *prompts} - {self._end})


def _longest(folder: Path) -> float:
    """Seconds of what is heard at once: newer checkpoints have all of a processor in one file."""
    parts = _table(folder / "processor_config.json").get("feature_extractor")
    hears = parts if isinstance(parts, dict) else _table(folder / "preprocessor_config.json")
    return float(hears.get("chunk_length", 30))


def _table(file: Path) -> Mapping[str, Any]:
    """What a file of settings holds, nothing where there is none."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def _names() -> Mapping[str, str]:
    """Code -> name of the languages that Whisper was taught."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    found: Mapping[str, str] = LANGUAGES
    return found
