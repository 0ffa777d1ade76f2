"""What Whisper is asked, and what is read of its answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.speech.whisper import whisper_words

from modulm_media import Sound
from modulm_speech import Segment, Wanted
from modulm_tokenizers.tokenizer import load_tokenizer
from modulm_transcriber_whisper import WhisperTranscriber

SOUND = Sound(np.ones(16000, np.float32), 16000)


class Opened:
    """A transcriber and the ids of its tokens."""

    def __init__(self, folder: Path, **options: bool) -> None:
        self.ids = whisper_words(folder, **options)
        config = json.loads((folder / "config.json").read_text())
        self.transcriber = WhisperTranscriber(load_tokenizer(folder), folder, config)

    def tokens(self, *names: str) -> list[int]:
        return [self.ids[name] for name in names]

    def time(self, seconds: float) -> int:
        return self.ids["notimestamps"] + 1 + round(seconds / 0.02)

    def words(self, text: str) -> list[int]:
        return self.transcriber.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(tmp_path_factory.mktemp("many"))


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(tmp_path_factory.mktemp("english"), languages=False)


def test_language_task_and_times_are_tokens(many: Opened) -> None:
    assert many.transcriber.languages == {"en": "english", "zh": "chinese", "de": "german"}
    assert many.transcriber.tasks == ("transcribe", "translate")
    plain = many.transcriber.ask(SOUND, Wanted(language="de"))
    start = many.tokens("startoftranscript", "de", "transcribe")
    assert plain.tokens == [*start, many.ids["notimestamps"]]
    assert plain.no_speech == (1, many.ids["nospeech"])
    rules = plain.params["extra_args"]["transcript_rules"]
    assert rules["end"] == many.ids["endoftext"]
    assert (rules["written"], rules["times"]) == (False, many.time(0))
    assert rules["hidden_first"] == [7, many.ids["endoftext"]]
    assert {5, 6, *many.tokens("startoftranscript", "translate", "nospeech")} <= {*rules["hidden"]}
    assert many.ids["endoftext"] not in rules["hidden"]
    timed = many.transcriber.ask(SOUND, Wanted(task="translate", language="zh", times=True))
    assert timed.tokens == many.tokens("startoftranscript", "zh", "translate")
    rules = timed.params["extra_args"]["transcript_rules"]
    assert (rules["written"], rules["latest"]) == (True, 25)


def test_a_prompt_is_what_was_said_before(many: Opened) -> None:
    question = many.transcriber.ask(SOUND, Wanted(language="en", prompt="Ada<|translate|>"))
    before = [many.ids["startofprev"], *many.words(" Ada")]
    assert question.tokens[: len(before)] == before
    assert question.tokens[len(before)] == many.ids["startoftranscript"]
    assert question.no_speech == (len(before) + 1, many.ids["nospeech"])
    long = many.transcriber.ask(SOUND, Wanted(language="en", prompt="word " * 900))
    assert len(long.tokens) == 1 + 223 + 4
    assert long.tokens[1:224] == many.words(" " + ("word " * 900).strip())[-223:]


def test_a_language_is_one_token_of_those_it_knows(many: Opened) -> None:
    question = many.transcriber.ask_language(SOUND)
    assert question.tokens == many.tokens("startoftranscript")
    assert sorted(question.params["allowed_token_ids"]) == sorted(many.tokens("en", "zh", "de"))
    assert many.transcriber.language(many.tokens("zh")) == "zh"


def test_models_of_english_alone_are_told_nothing(english: Opened) -> None:
    transcriber = english.transcriber
    assert (transcriber.tasks, dict(transcriber.languages)) == (("transcribe",), {"en": "english"})
    assert not transcriber.detects
    question = transcriber.ask(SOUND, Wanted(language="en", times=True))
    assert question.tokens == english.tokens("startoftranscript")
    assert question.no_speech == (1, english.ids["nospeech"])


def test_older_checkpoints_say_it_by_the_names_of_tokens(tmp_path: Path) -> None:
    older = Opened(tmp_path, with_generation_config=False)
    assert set(older.transcriber.languages) == {"en", "zh", "de"}
    question = older.transcriber.ask(SOUND, Wanted(language="en"))
    names = ("startoftranscript", "en", "transcribe", "notimestamps")
    assert question.tokens == older.tokens(*names)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], []),
        ([0.0, "One two.", 2.0, 2.0, "Three.", 4.5], [(0, 2, "One two."), (2, 4.5, "Three.")]),
        ([0.5, "One two."], [(0.5, 5, "One two.")]),
        (["One two."], [(0, 5, "One two.")]),
        ([0.0, "One.", 2.0, 3.0, "Two.", 9.0], [(0, 2, "One."), (3, 5, "Two.")]),
        ([0.0, 1.0, "One."], [(1, 5, "One.")]),
    ],
)
def test_segments_are_text_between_times(many: Opened, parts, expected) -> None:
    tokens = []
    for part in parts:
        tokens += many.words(part) if isinstance(part, str) else [many.time(part)]
    segments = many.transcriber.read([*tokens, many.ids["endoftext"]], 5.0)
    assert [(s.start, s.end, s.text) for s in segments] == [
        (pytest.approx(a), pytest.approx(b), text) for a, b, text in expected
    ]
    assert all(isinstance(one, Segment) and one.tokens for one in segments)
