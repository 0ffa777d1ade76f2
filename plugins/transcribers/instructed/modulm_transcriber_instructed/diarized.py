"""Transcribers for models that say who speaks when."""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from modulm_speech.instructed import InstructedTranscriber
from modulm_speech.transcriber import Question, Segment, Task, Wanted

if TYPE_CHECKING:
    from modulm_media.values import Sound

__all__ = ["MossDiarize", "VibeVoice"]

#: Seconds of one prompt: speakers keep their names within it.
_LONGEST = 600.0
#: `[0.48][S01]Hello there.[1.66]`; times may be written as minutes and seconds.
_SPOKEN = re.compile(
    r"\[(?P<start>[\d.:]{1,32})\]\s*\[S(?P<speaker>\d{1,4})\](?P<text>.*?)\[(?P<end>[\d.:]{1,32})\]",
    re.DOTALL,
)

#: Start and end in seconds, number of the speaker from 0, text.
Spoken = tuple[float, float, int, str]


class _Diarizing(InstructedTranscriber):
    """A model whose answers are parsed by `spoken`."""

    longest = _LONGEST
    times = True
    diarizes = True
    known: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @abstractmethod
    def spoken(self, answer: str) -> Iterator[Spoken]:
        """Parse an answer. Raises ValueError, TypeError or KeyError for one in another form."""

    def read(self, tokens: Sequence[int], seconds: float) -> tuple[Segment, ...]:
        """Segments in the order of the answer, which may overlap; a whole segment without a
        speaker for an answer in another form.
        """
        answer = self.tokenizer.decode(list(tokens))
        try:
            spoken = [each for each in self.spoken(answer) if each[3].strip()]
            finite = all(math.isfinite(time) for each in spoken for time in each[:2])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            spoken, finite = [], True
        if not spoken or not finite:
            return super().read(tokens, seconds)
        segments = []
        for start, end, speaker, text in spoken:
            first = min(max(start, 0.0), seconds)
            last = min(max(end, first), seconds)
            segments.append(
                Segment(start=first, end=last, text=f" {text.strip()}", speaker=_name(speaker))
            )
        return tuple(segments)


def _name(speaker: int) -> str:
    """A letter for each of the first speakers, as OpenAI's API has them."""
    return chr(ord("A") + speaker) if 0 <= speaker < 26 else str(speaker)


class MossDiarize(_Diarizing):
    """MOSS-Transcribe-Diarize. The client's prompt follows its instruction."""

    form = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<|audio_start|><|audio_pad|><|audio_end|>\n{words}<|im_end|>\n<|im_start|>assistant\n"
    )
    without_language: ClassVar[Mapping[Task, str]] = MappingProxyType(
        {
            "transcribe": (
                "请将音频转写为文本，每一段需以起始时间戳和说话人编号"
                "（[S01]、[S02]、[S03]…）开头，正文为对应的语音内容，"
                "并在段末标注结束时间戳，以清晰标明该段语音范围。"
            )
        }
    )
    instructions = without_language

    def spoken(self, answer: str) -> Iterator[Spoken]:
        for match in _SPOKEN.finditer(answer):
            start, end = _seconds(match["start"]), _seconds(match["end"])
            yield start, end, int(match["speaker"]) - 1, match["text"]


def _seconds(text: str) -> float:
    """Seconds of "7.56", "1:23" or "01:02:03". Raises ValueError."""
    return sum(float(part) * 60.0**i for i, part in enumerate(reversed(text.split(":"))))


class VibeVoice(_Diarizing):
    """VibeVoice ASR, which is told how long a sound is, and answers in JSON."""

    form = (
        "<|im_start|>system\nYou are a helpful assistant that transcribes audio input into text "
        "output in JSON format.<|im_end|>\n<|im_start|>user\n"
        "<|object_ref_start|><|box_start|><|object_ref_end|>\n{words}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    without_language: ClassVar[Mapping[Task, str]] = MappingProxyType({"transcribe": ""})
    instructions = without_language

    def ask(self, sound: Sound, wanted: Wanted) -> Question:
        before, _, after = self.form.partition("{words}")
        told = self._plain(wanted.prompt.strip()) if wanted.prompt.strip() else []
        keys = "transcribe it with these keys: Start time, End time, Speaker ID, Content"
        length = f"This is a {sound.seconds:.2f} seconds audio, "
        if told:
            words = [*self._ids(f"{before}{length}with extra info: "), *told]
            words += self._ids(f"\n\nPlease {keys}{after}")
        else:
            words = self._ids(f"{before}{length}please {keys}{after}")
        return Question(tokens=words, sound=sound)

    def spoken(self, answer: str) -> Iterator[Spoken]:
        entries: list[Mapping[str, Any]] = json.loads(answer[answer.index("[") :])
        for entry in entries:
            times = float(entry["Start"]), float(entry["End"])
            yield *times, int(entry.get("Speaker", 0)), str(entry["Content"])
