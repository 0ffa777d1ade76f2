"""`modulm serve` with a tiny Whisper: sound in, what transformers' model would say out."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from tests.media.files import sound_file
from tests.speech.whisper import HEADS, write_whisper
from transformers.models.whisper.tokenization_whisper import _collate_word_timestamps
from transformers.utils import ModelOutput
from websockets.sync.client import connect

import modulm
from modulm_media import Sound
from modulm_speech import Transcriber, Wanted
from modulm_speech.cutting import pieces
from modulm_tokenizers.tokenizer import load_tokenizer
from modulm_towers.testing import sounds
from modulm_transcriber_whisper import WhisperTranscriber

#: Tokens of an answer, seconds that the model hears at once.
FEW, HEARD = 8, 4
SHORT, LONG = sounds((3.0, 9.5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    write_whisper(folder, HEARD)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path, serve_here: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    flags = ["--served-model-name", "whisper", "--device", "cpu", "--dtype", "float32",
             "--max-audio-clip-filesize-mb", "1"]  # fmt: skip
    with serve_here(folder / "log", [folder, *flags]) as url:
        yield url


@pytest.fixture(scope="module")
def sdk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        yield client


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


class Reference:
    """transformers' model of the checkpoint, and what Whisper is asked."""

    def __init__(self, folder: Path) -> None:
        import transformers as hf

        self.model = hf.WhisperForConditionalGeneration.from_pretrained(
            folder, attn_implementation="eager"
        ).eval()
        self.folder = folder
        self.ends_with = config_of(folder)["eos_token_id"]
        self.hears = hf.WhisperFeatureExtractor.from_pretrained(folder)
        self.tokenizer = load_tokenizer(folder)
        config = config_of(folder)
        self.asks: Transcriber = WhisperTranscriber(self.tokenizer, folder, config)
        self.ids = {name: self.tokenizer.token_to_id(f"<|{name}|>") for name in ("en", "de", "zh")}

    def scores(self, samples: np.ndarray, tokens: list[int]) -> torch.Tensor:
        """[vocabulary], of what comes next."""
        features = self.hears(samples, sampling_rate=16000, return_tensors="pt")
        with torch.no_grad():
            output = self.model(**features, decoder_input_ids=torch.tensor([tokens]))
        scores: torch.Tensor = output.logits[0, -1].clone()
        return scores

    def language(self, samples: np.ndarray) -> str:
        question = self.asks.ask_language(Sound(samples, 16000))
        scores = self.scores(samples, list(question.tokens))
        return max(self.ids, key=lambda code: float(scores[self.ids[code]]))

    def ends(self, samples: np.ndarray, prefix: list[int], spoken_tokens: list[int]) -> list[float]:
        """Seconds at which each of these tokens has been said, and the end behind them."""
        features = self.hears(samples, sampling_rate=16000, return_tensors="pt")
        heard = spoken_tokens[:-1] if spoken_tokens[-1] == self.ends_with else spoken_tokens
        sequence = torch.tensor([[*prefix, *heard, self.ends_with]])
        with torch.no_grad():
            out = self.model(**features, decoder_input_ids=sequence[:, :-1], output_attentions=True)
        seen = ModelOutput(cross_attentions=[out.cross_attentions], sequences=sequence)
        frames = -(-len(samples) // 160)
        times = self.model._extract_token_timestamps(
            seen, HEADS, num_frames=frames, num_input_ids=len(prefix)
        )
        return [float(time) for time in times[0, len(prefix) :]]

    def text(self, samples: np.ndarray, wanted: Wanted) -> str:
        """What is said greedily, without times."""
        question = self.asks.ask(Sound(samples, 16000), wanted)
        rules = question.params["extra_args"]["transcript_rules"]
        tokens: list[int] = []
        while len(tokens) < FEW:
            scores = self.scores(samples, [*question.tokens, *tokens])
            scores[[*rules["hidden"], *([] if tokens else rules["hidden_first"])]] = -torch.inf
            scores[rules["times"] :] = -torch.inf
            tokens.append(int(scores.argmax()))
            if tokens[-1] == rules["end"]:
                break
        return self.tokenizer.decode(tokens)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def streamed(sdk: openai.OpenAI, samples: np.ndarray, **options: Any) -> str:
    """The text of a stream, which is asked for once and greedily."""
    few = {"max_completion_tokens": FEW}
    events = list(
        sdk.audio.transcriptions.create(
            model="whisper", file=("a.wav", sound_file(samples, kind="FLOAT")), stream=True,
            extra_body=few, **options,
        )
    )  # fmt: skip
    last: Any = events[-1]
    assert last.text == "".join(event.delta for event in events[:-1]).rstrip()  # type: ignore[union-attr]
    text: str = last.text
    return text


def test_a_stream_says_what_transformers_model_says(sdk, reference: Reference) -> None:
    expected = reference.text(SHORT, Wanted(language="de", prompt="Ada"))
    assert expected.strip()
    assert streamed(sdk, SHORT, language="de", prompt="Ada") == expected.strip()


def test_long_sound_is_heard_in_pieces_and_its_language_is_found(sdk, reference) -> None:
    parts = [LONG[first:end] for first, end in pieces(LONG, 16000, HEARD)]
    assert len(parts) == 3
    wanted = Wanted(language=reference.language(parts[0]))
    expected = [reference.text(part, wanted).split() for part in parts]
    assert streamed(sdk, LONG).split() == [word for piece in expected for word in piece]


def test_every_format(sdk: openai.OpenAI) -> None:
    """Greedy answers are tried again, at higher temperatures: the first two are alike. The others
    are drawn once.
    """
    options: Any = {"model": "whisper", "file": ("a.wav", sound_file(SHORT)), "language": "en",
                  "extra_body": {"max_completion_tokens": 12}}  # fmt: skip
    plain = sdk.audio.transcriptions.create(**options)
    assert plain.text
    assert sdk.audio.transcriptions.create(**options).text == plain.text
    options |= {"temperature": 0.7}
    plain = sdk.audio.transcriptions.create(**options)
    assert sdk.audio.transcriptions.create(**options, response_format="text").strip() == plain.text
    verbose = sdk.audio.transcriptions.create(**options, response_format="verbose_json")
    assert (verbose.language, verbose.duration) == ("english", 3.0)
    assert verbose.segments
    times = [time for one in verbose.segments for time in (one.start, one.end)]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= 3.0
    assert all(0 <= one.no_speech_prob <= 1 for one in verbose.segments)
    count = len(verbose.segments)
    srt: Any = sdk.audio.transcriptions.create(**options, response_format="srt")
    vtt: Any = sdk.audio.transcriptions.create(**options, response_format="vtt")
    assert srt.count(" --> ") == vtt.count(" --> ") == count
    tokens = sdk.audio.transcriptions.create(**options, include=["logprobs"]).logprobs
    assert tokens
    assert all(one.logprob is not None and one.logprob <= 0 for one in tokens)


def test_words_have_the_times_that_transformers_gives_them(sdk, reference: Reference) -> None:
    """The same engine in this process says what tokens the server's answers have."""
    drawn: dict[str, Any] = {"temperature": 0.7, "seed": 0, "max_tokens": 24}
    most = {"max_completion_tokens": drawn["max_tokens"]}
    options: Any = {"model": "whisper", "file": ("a.wav", sound_file(LONG, kind="FLOAT")),
                  "language": "en", "response_format": "verbose_json", "temperature": 0.7,
                  "extra_body": most}  # fmt: skip
    verbose = sdk.audio.transcriptions.create(
        **options, timestamp_granularities=["word", "segment"]
    )
    cut = [(first / 16000, LONG[first:end]) for first, end in pieces(LONG, 16000, HEARD)]
    wanted = Wanted(language="en", times=True)
    questions = [reference.asks.ask(Sound(samples, 16000), wanted) for _, samples in cut]
    with modulm.LLM(str(reference.folder), device="cpu", dtype="float32") as llm:
        answers = llm.generate(
            [
                {"prompt_token_ids": one.tokens, "multi_modal_data": {"audio": (samples, 16000)}}
                for one, (_, samples) in zip(questions, cut, strict=True)
            ],
            [modulm.SamplingParams(**drawn, **one.params) for one in questions],
        )
    tokenizer_view, expected = Shown(reference.tokenizer), list[tuple[str, float, float]]()
    for (start, samples), one, answer in zip(cut, questions, answers, strict=True):
        token_ids = answer.outputs[0].token_ids
        ends = [
            start,
            *(start + end for end in reference.ends(samples, list(one.tokens), token_ids)),
        ]
        last = start + len(samples) / 16000
        times = [(min(a, last), min(b, last)) for a, b in pairwise(ends)]
        for segment in reference.asks.read(token_ids, 4.0):
            index = next(
                n
                for n in range(24)
                if tuple(token_ids[n:])[: len(segment.tokens)] == segment.tokens
            )
            spoken = list(segment.tokens)
            word_times = times[index : index + len(spoken)]
            timed_words = _collate_word_timestamps(
                tokenizer_view, spoken, word_times, "english", False
            )
            expected += [(word["text"].strip(), *word["timestamp"]) for word in timed_words]
    expected = [word for word in expected if word[0]]
    assert len(expected) > 12
    assert [word.word for word in verbose.words] == [word for word, _, _ in expected]
    got = [(word.start, word.end) for word in verbose.words]
    assert got == [pytest.approx(pair, abs=2e-3) for _, *pair in expected]
    few = sdk.audio.transcriptions.create(**options, timestamp_granularities=["word"])
    assert (few.segments, few.words) == (None, verbose.words)
    plain = sdk.audio.transcriptions.create(**options)
    assert (plain.segments, plain.words) == (verbose.segments, None)


class Shown:
    """The tokenizer as transformers' functions call one."""

    eos_token_id = 1 << 30

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def decode(self, tokens: list[int], **how: Any) -> str:
        text: str = self.tokenizer.decode(list(tokens))
        return text


def test_translations(url: str) -> None:
    form = {"response_format": "verbose_json", "max_completion_tokens": "8", "language": "de"}
    file = {"file": sound_file(SHORT, 16000, "FLAC")}
    body = httpx.post(f"{url}/v1/audio/translations", files=file, data=form, timeout=300).json()
    assert (body["task"], body["language"]) == ("translate", "english")
    assert body["text"]


@pytest.mark.parametrize(
    ("file", "fields", "param"),
    [
        (b"\0" * 5000, {}, "file"),
        (sound_file(SHORT, 16000, "MP3")[:300], {}, "file"),
        (sound_file(SHORT[:1000]), {}, "file"),
        (sound_file(np.resize(LONG, 16000 * 40)), {}, "file"),
        (sound_file(SHORT), {"language": "xx"}, "language"),
        (
            sound_file(SHORT),
            {"response_format": "srt", "timestamp_granularities[]": "word"},
            "timestamp_granularities",
        ),
    ],
)
def test_what_is_wrong_is_named(url: str, file: bytes, fields: dict[str, str], param: str) -> None:
    answer = httpx.post(
        f"{url}/v1/audio/transcriptions", files={"file": ("a.wav", file)}, data=fields, timeout=300
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_web_socket(url: str, reference: Reference) -> None:
    samples = (SHORT * 32767).astype("<i2")
    heard = samples.astype(np.float32) / 32768
    with connect(f"{url.replace('http', 'ws')}/v1/realtime") as it:
        assert json.loads(it.recv(timeout=300))["type"] == "session.created"
        it.send(json.dumps({"type": "session.update", "model": "whisper", "language": "de"}))
        for part in np.array_split(samples, 5):
            audio = base64.b64encode(part.tobytes()).decode()
            it.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        it.send(json.dumps({"type": "input_audio_buffer.commit", "final": True}))
        text, event = "", json.loads(it.recv(timeout=300))
        while event["type"] == "transcription.delta":
            text, event = text + event["delta"], json.loads(it.recv(timeout=300))
    assert event["type"] == "transcription.done", event
    assert event["text"] == text.rstrip()
    assert event["usage"]["completion_tokens"] > FEW
    assert text.startswith(reference.text(heard, Wanted(language="de")).strip()[:12])
