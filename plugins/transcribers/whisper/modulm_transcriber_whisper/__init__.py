"""Whisper: language, task and timestamps are tokens of its decoder.

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

    from modulm.contracts.tokenizer import Tokenizer
    from modulm_media.values import Sound

__all__ = ["WhisperTranscriber"]

#: Seconds between two timestamp tokens, and the highest index of a first segment's timestamp.
_STEP, _LATEST = 0.02, 50
#: Characters of a prompt's end that are tokenized: more than fit.
_PROMPT = 8192


class WhisperTranscriber(Transcriber):
    """One checkpoint; token ids are read from generation_config.json or found by name."""

    times = True
    aligns = "align"

    def __init__(self, tokenizer: Tokenizer, path: Path, config: Mapping[str, Any]) -> None:
        super().__init__(tokenizer, path, config)
        self._generation = _table(Path(path) / "generation_config.json")
        self.longest = _longest(Path(path))
        self._start = self._token_id("decoder_start_token_id", "<|startoftranscript|>")
        self._end = self._token_id("eos_token_id", "<|endoftext|>")
        self._no_times = self._token_id("no_timestamps_token_id", "<|notimestamps|>")
        self._first_time = self._no_times + 1

    @property
    def detects(self) -> bool:  # type: ignore[override]
        """Whether the model detects languages; English-only models have no language tokens."""
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
        tokens = self._previous(wanted.prompt)
        no_speech_index = len(tokens) + 1
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
        no_speech = self._no_speech
        return Question(
            tokens=tokens,
            sound=sound,
            params={"extra_args": {"transcript_rules": rules}},
            no_speech=None if no_speech is None else (no_speech_index, no_speech),
        )

    def ask_language(self, sound: Sound) -> Question:
        allowed = tuple(self._language_ids.values())
        return Question(tokens=[self._start], sound=sound, params={"allowed_token_ids": allowed})

    def language(self, tokens: Sequence[int]) -> str:
        codes = {token: code for code, token in self._language_ids.items()}
        return codes[tokens[0]]

    def read(self, tokens: Sequence[int], seconds: float) -> tuple[Segment, ...]:
        """Return the segments between timestamps; a segment without an end timestamp lasts to the
        end.
        """
        segments: list[Segment] = []
        begin, text = 0.0, []
        for token in tokens:
            if token < self._first_time:
                text += [] if token in self._special else [token]
                continue
            time = min((token - self._first_time) * _STEP, seconds)
            if text:
                segments.append(self._segment(begin, time, text))
            begin, text = time, []
        if text:
            segments.append(self._segment(begin, seconds, text))
        return tuple(segments)

    def align(self, question: Question, tokens: Sequence[int]) -> Alignment | None:
        answer = self._answer_ids(tokens)
        if all(token in self._special or token >= self._first_time for token in answer):
            return None
        # Encoder frames: half as many as feature frames, of which there are 100 a second.
        sound = question.sound
        frames = max(-(-len(sound.samples) * 100 // sound.rate) // 2, 1)
        params = {"pool_from": len(question.tokens), "extra_args": {"frames": frames}}
        return Alignment(tokens=[*question.tokens, *answer], params=params)

    def words(
        self, tokens: Sequence[int], alignment: np.ndarray, seconds: float, language: str | None
    ) -> tuple[Word, ...]:
        """Return the words with their times. A token starts where the previous one ends; words do
        not cross segments.
        """
        from modulm_transcriber_whisper.words import UNSPACED, end_frames, group_words

        answer = self._answer_ids(tokens)
        ends = [min(float(frame) * _STEP, seconds) for frame in end_frames(alignment)]
        timed: list[Word] = []
        runs: list[list[int]] = [[]]
        for i, token in enumerate(answer):
            if token >= self._first_time:
                runs.append([])
            elif token not in self._special:
                runs[-1].append(i)
        for run in runs:
            parts = group_words(
                [answer[i] for i in run],
                self.tokenizer.decode,
                spaced=language not in UNSPACED,
            )
            for text, first, end in parts:
                begin = ends[run[first] - 1] if run[first] else 0.0
                if text.strip():
                    timed.append(Word(start=begin, end=ends[run[end - 1]], text=text.strip()))
        return tuple(timed)

    def _answer_ids(self, tokens: Sequence[int]) -> list[int]:
        """Return an answer's tokens without the end token."""
        listed = list(tokens)
        return listed[:-1] if listed and listed[-1] == self._end else listed

    def _segment(self, begin: float, end: float, tokens: list[int]) -> Segment:
        text = self.tokenizer.decode(tokens)
        return Segment(start=begin, end=max(begin, end), text=text, tokens=tuple(tokens))

    def _previous(self, prompt: str) -> list[int]:
        """Return the tokens that present the prompt as previous text; of long prompts, only the
        end, up to half the context.
        """
        opening = self.tokenizer.token_to_id("<|startofprev|>")
        if not prompt.strip() or opening is None:
            return []
        end = prompt.strip()[-_PROMPT:]
        ids = self.tokenizer.encode(f" {end}", add_special_tokens=False)
        spoken = [token for token in ids if token not in self._special]
        most = int(self.config.get("max_target_positions", 448)) // 2 - 1
        return [opening, *spoken[-most:]]

    def _token_id(self, key: str, name: str) -> int:
        """Return a token's id from the configuration or by its name. Raises CheckpointError."""
        by_name = self.tokenizer.token_to_id(name)
        stated = self._generation.get(key, self.config.get(key))
        index = stated if isinstance(stated, int) else by_name
        if index is None:
            raise CheckpointError(f"{self.path}: the vocabulary has no token {name}")
        return int(index)

    def _listed(self, key: str) -> list[int]:
        ids = self._generation.get(key, self.config.get(key))
        vocabulary = int(self.config.get("vocab_size", 1 << 31))
        return [int(one) for one in ids or () if 0 <= int(one) < vocabulary]

    @cached_property
    def _language_ids(self) -> Mapping[str, int]:
        """Language code -> token; empty for English-only models."""
        if self._generation.get("is_multilingual") is False:
            return {}
        stated = self._generation.get("lang_to_id")
        if isinstance(stated, Mapping) and stated:
            return {str(name).strip("<|>"): int(token) for name, token in stated.items()}
        ids = {code: self.tokenizer.token_to_id(f"<|{code}|>") for code in _names()}
        return {code: token for code, token in ids.items() if token is not None}

    @cached_property
    def _task_ids(self) -> Mapping[str, int]:
        stated = self._generation.get("task_to_id") or {}
        return {
            task: int(stated[task]) if task in stated else self._token_id("", f"<|{task}|>")
            for task in ("transcribe", "translate")
        }

    @cached_property
    def _no_speech(self) -> int | None:
        names = ("<|nospeech|>", "<|nocaptions|>")
        ids = [self.tokenizer.token_to_id(name) for name in names]
        return next((token for token in ids if token is not None), None)

    @cached_property
    def _special(self) -> frozenset[int]:
        """Special tokens, without timestamps."""
        return frozenset({*self.tokenizer.special_ids, self._start, self._end, self._no_times})

    @cached_property
    def _hidden(self) -> list[int]:
        """Tokens that are never generated: those of the configuration, and tokens that only prompts
        contain.
        """
        prompts = {token for token in self._special if token < self._first_time}
        return sorted({*self._listed("suppress_tokens"), *prompts} - {self._end})


def _longest(folder: Path) -> float:
    """Return the seconds of audio per window; newer checkpoints keep the processor's settings in
    one file.
    """
    parts = _table(folder / "processor_config.json").get("feature_extractor")
    hears = parts if isinstance(parts, dict) else _table(folder / "preprocessor_config.json")
    return float(hears.get("chunk_length", 30))


def _table(file: Path) -> Mapping[str, Any]:
    """Parse a JSON file of settings; empty if it does not exist."""
    table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return table if isinstance(table, dict) else {}


def _names() -> Mapping[str, str]:
    """Return code -> name of Whisper's languages."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    languages: Mapping[str, str] = LANGUAGES
    return languages
