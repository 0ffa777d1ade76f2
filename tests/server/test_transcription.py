"""Speech to text over HTTP: an engine that says by script what is heard in which sound."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from attrs import evolve
from loop_turns import BOUND, Beat
from tests.server.hearing import LEVELS, serve_ears, sound, wav
from websockets.sync.client import connect

from modulm.contracts.sampling import OutputKind
from modulm.plugins import manager
from modulm_media import Sound
from modulm_route_audio.speech import Joiner, Speech, TranscriptionOptions
from modulm_server.scripted import Reply
from modulm_server.testing import Live, error_of

PATH = "/v1/audio/transcriptions"
#: A masked frame without data.
PING = b"\x89\x80\x00\x00\x00\x00"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, watched: Callable[..., Any]) -> Iterator[Live]:
    with serve_ears(tmp_path_factory.mktemp("whisper"), watched) as server:
        yield server


@pytest.fixture(autouse=True)
def fresh(live: Live) -> None:
    live.engine.said, live.engine.tries, live.engine.code = dict(LEVELS), {}, "en"
    live.engine.nobody = 0.0
    live.engine.seen.clear()


@pytest.fixture
def sdk(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
def http(live: Live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client


def short() -> tuple[str, bytes]:
    return ("a.wav", wav(sound((1, 2.0))))


def long() -> tuple[str, bytes]:
    """66 s: three voices with pauses between them, so that it is cut at 28.1 and 55.3 s."""
    parts = sound((1, 28.0), (0, 0.2), (2, 27.0), (0, 0.2), (3, 10.6))
    return ("long.wav", wav(parts))


def test_a_long_sound_holds_no_turn_of_the_loop(http: httpx.Client, live: Live) -> None:
    """It is decoded in another process, and cut and prepared in threads."""
    minutes = 2
    minute = np.tile(sound((1, 9.0), (0, 1.0), rate=8000), 6)
    data = wav(np.tile(minute, minutes), 8000, "FLAC")
    beat = Beat(live.loop)
    answer = http.post(
        PATH, files={"file": ("a.flac", data)}, data={"model": "M", "language": "en"}, timeout=300
    )
    longest = beat.end()
    print("LONGEST", longest)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["seconds"] == 60 * minutes
    assert longest < BOUND


@pytest.mark.parametrize(
    ("seconds", "frames"),
    [(0.04, 1), pytest.param(1.0, 1, marks=pytest.mark.exhaustive), (1.0, 1000)],
)
def test_the_largest_events_hold_no_turn_of_the_loop(
    live: Live, seconds: float, frames: int
) -> None:
    """/v1/realtime: sound as long as a message may be, with as many turns as there can be in it;
    and as many pings as one read may bring.
    """
    part = (sound((1, seconds / 2), (0, seconds / 2), rate=24000) * 32767).astype("<i2").tobytes()
    count = (15 << 20) * 3 // 4 // len(part)
    append = {"type": "input_audio_buffer.append", "audio": b64encode(part * count).decode()}
    silence = {"type": "server_vad", "silence_duration_ms": 20}
    update = {"type": "session.update", "session": {
        "type": "transcription", "audio": {"input": {"turn_detection": silence}},
    }}  # fmt: skip
    live.engine.said[0] = ""
    events = [update, append, {"type": "x" * (1 << 20)}, {f"k{one}": "" for one in range(400_000)}]
    texts = [json.dumps(event) for event in events]
    with connect(f"{live.url.replace('http', 'ws')}/v1/realtime") as socket:
        socket.recv(timeout=300)
        beat = Beat(live.loop)
        for text in texts:
            size = -(-len(text) // frames)
            pieces = (text[start : start + size] for start in range(0, len(text), size))
            socket.send(text if frames == 1 else pieces)
        socket.socket.sendall(PING * 40_000)
        refused = 0
        while refused < 3:
            refused += json.loads(socket.recv(timeout=300))["type"] == "error"
        longest = beat.end()
    print("LONGEST", longest)
    assert longest < BOUND


def test_json_and_text(sdk: openai.OpenAI) -> None:
    response = sdk.audio.transcriptions.create(model="M", file=short(), language="en")
    assert response.text == "Ask not what."
    assert response.usage is not None
    assert response.usage.to_dict() == {"type": "duration", "seconds": 2}
    options = {"model": "M", "file": short(), "language": "en"}
    assert sdk.audio.transcriptions.create(**options, response_format="text") == "Ask not what.\n"


def test_verbose_json_has_segments_with_times(sdk: openai.OpenAI, live: Live) -> None:
    live.engine.said[1] = [0.0, " Ask not", 1.0, 1.0, " what.", 1.8]
    response = sdk.audio.transcriptions.create(
        model="M", file=short(), language="german", response_format="verbose_json",
        timestamp_granularities=["segment"],
    )  # fmt: skip
    assert (response.text, response.language, response.duration) == ("Ask not what.", "german", 2.0)
    assert response.segments is not None
    times = [(one.id, one.seek, one.start, one.end, one.text) for one in response.segments]
    assert times == [(0, 0, 0.0, 1.0, " Ask not"), (1, 0, 1.0, 1.8, " what.")]
    assert response.segments[0].avg_logprob == pytest.approx(-0.5)
    assert response.segments[0].tokens == live.engine.words(" Ask not")
    assert 0 < response.segments[0].compression_ratio < 2.4
    rules = live.engine.seen[-1][1].extra_args["transcript_rules"]
    assert rules["written"] is True


def test_speakers_of_a_model_that_names_them(
    sdk: openai.OpenAI, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(openai.BadRequestError, match="diarized_json needs a model that names"):
        sdk.audio.transcriptions.create(model="M", file=short(), response_format="diarized_json")
    kind = manager.current().load("transcribers", "WhisperForConditionalGeneration")
    read = kind.read

    def named(self: Any, tokens: Any, seconds: float) -> Any:
        return tuple(evolve(segment, speaker="B") for segment in read(self, tokens, seconds))

    monkeypatch.setattr(kind, "read", named)
    monkeypatch.setattr(kind, "diarizes", True)
    told: Any = sdk.audio.transcriptions.create(
        model="M", file=short(), response_format="diarized_json"
    )
    (segment,) = told.segments
    assert (segment.speaker, segment.text, segment.end) == ("B", "Ask not what.", 2.0)
    assert (told.text, told.duration, told.usage.seconds) == ("Ask not what.", 2.0, 2)


def test_subtitles(sdk: openai.OpenAI, live: Live) -> None:
    live.engine.said[1] = [0.0, " Ask not", 1.0, 1.0, " what.", 1.8]
    options: Any = {"model": "M", "file": short(), "language": "en"}
    srt = sdk.audio.transcriptions.create(**options, response_format="srt")
    assert srt == (
        "1\n00:00:00,000 --> 00:00:01,000\nAsk not\n\n2\n00:00:01,000 --> 00:00:01,800\nwhat.\n\n"
    )
    vtt = sdk.audio.transcriptions.create(**options, response_format="vtt")
    assert str(vtt).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nAsk not\n")


def test_long_sound_is_cut_at_pauses_and_joined(sdk: openai.OpenAI, live: Live) -> None:
    live.engine.most = 0
    live.engine.said |= {1: [0.0, " Ask not what.", 2.0], 2: [0.5, " Your country.", 3.0],
                         3: [0.0, " Can do.", 1.0]}  # fmt: skip
    response = sdk.audio.transcriptions.create(
        model="M", file=long(), language="en", response_format="verbose_json"
    )
    assert response.text == "Ask not what. Your country. Can do."
    assert response.segments is not None
    starts = [(one.start, one.end) for one in response.segments]
    assert starts[0] == (0.0, 2.0)
    assert starts[1] == pytest.approx((28.1 + 0.5, 28.1 + 3.0), abs=0.11)
    assert starts[2] == pytest.approx((55.3, 56.3), abs=0.11)
    assert response.segments[0].seek == 0
    assert response.segments[1].seek == pytest.approx(2810, abs=11)
    assert live.engine.most == 3


def test_streams_are_openais_events_and_vllms_chunks(sdk: openai.OpenAI, live: Live) -> None:
    events = list(
        sdk.audio.transcriptions.create(
            model="M", file=long(), language="en", stream=True, include=["logprobs"]
        )
    )
    assert {event.type for event in events[:-1]} == {"transcript.text.delta"}
    deltas = [event.delta for event in events[:-1] if event.type == "transcript.text.delta"]
    assert len(deltas) > 5
    last = events[-1]
    assert last.type == "transcript.text.done"
    assert last.text == "".join(deltas) == "Ask not what. Your country. Can do."
    assert last.usage is not None
    assert last.usage.total_tokens == last.usage.input_tokens + last.usage.output_tokens
    assert last.usage.input_tokens == 12
    first: Any = events[0]
    assert first.logprobs[0].logprob == pytest.approx(-0.5)
    chunks: list[Any] = [event.to_dict() for event in events]
    assert all(chunk["object"] == "transcription.chunk" for chunk in chunks)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == last.text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]


def test_the_language_is_found_where_none_is_given(sdk: openai.OpenAI, live: Live) -> None:
    live.engine.code = "zh"
    live.engine.said |= {1: "不要问", 2: "你的", 3: "国家"}
    response = sdk.audio.transcriptions.create(
        model="M", file=long(), response_format="verbose_json"
    )
    assert (response.language, response.text) == ("chinese", "不要问你的国家")
    detections = [params for _, params in live.engine.seen if params.allowed_token_ids]
    assert len(detections) == 1
    assert detections[0].max_tokens == 1


def test_translations(http: httpx.Client, sdk: openai.OpenAI, live: Live) -> None:
    live.engine.code = "de"
    fields = {"prompt": "Ada", "response_format": "verbose_json"}
    body = http.post("/v1/audio/translations", files={"file": short()}, data=fields).json()
    assert (body["task"], body["language"]) == ("translate", "english")
    assert body["text"] == "Ask not what."
    prompt, _ = live.engine.seen[-1]
    text = live.engine.tokenizer.decode(list(prompt["prompt_token_ids"]), False)
    assert text == "<|startofprev|> Ada<|startoftranscript|><|de|><|translate|>"
    with pytest.warns(DeprecationWarning, match="deprecated"):
        plain = sdk.audio.translations.create(model="M", file=short())
    assert plain.text == "Ask not what."


def test_unlikely_answers_are_asked_again_with_higher_temperatures(
    sdk: openai.OpenAI, live: Live
) -> None:
    live.engine.tries = {0.0: " ha" * 60, 0.2: " ho" * 60}
    options: Any = {"model": "M", "file": short(), "language": "en"}
    response = sdk.audio.transcriptions.create(**options, response_format="verbose_json")
    assert response.text == "Ask not what."
    assert response.segments is not None
    assert response.segments[0].temperature == 0.4
    tried = [(params.temperature, params.seed) for _, params in live.engine.seen]
    assert tried == [(0.0, None), (0.2, 0), (0.4, 0)]
    live.engine.seen.clear()
    live.engine.tries[0.4] = " hm" * 60
    again = sdk.audio.transcriptions.create(**options, temperature=0.4, extra_body={"seed": 7})
    assert again.text.startswith("hm hm")
    tried = [(params.temperature, params.seed) for _, params in live.engine.seen]
    assert tried == [(0.4, 7)]


@pytest.mark.parametrize(("nobody", "tries"), [(0.9, 1), (0.4, 6)])
def test_what_is_said_where_nobody_speaks_is_left_out(
    sdk: openai.OpenAI, live: Live, nobody: float, tries: int
) -> None:
    """A model that is unsure of both is asked again, at last with the highest temperature."""
    live.engine.nobody = nobody
    options: Any = {"model": "M", "file": short(), "language": "en"}
    response = sdk.audio.transcriptions.create(**options, response_format="verbose_json")
    assert len(live.engine.seen) == tries
    if tries == 1:
        assert (response.text, response.segments) == ("", [])
        return
    assert response.text == "Ask not what."
    assert response.segments is not None
    assert response.segments[0].no_speech_prob == pytest.approx(nobody)
    assert (response.segments[0].temperature, response.segments[0].avg_logprob) == (1.0, -1.5)


def test_silence_has_no_text_and_costs_nothing(sdk: openai.OpenAI, live: Live) -> None:
    quiet = ("quiet.wav", wav(np.zeros(16000 * 40, np.float32)))
    options: Any = {"model": "M", "file": quiet}
    assert sdk.audio.transcriptions.create(**options).text == ""
    assert sdk.audio.transcriptions.create(**options, response_format="srt") == ""
    events = list(sdk.audio.transcriptions.create(**options, stream=True))
    assert [event.type for event in events] == ["transcript.text.done"]
    assert live.engine.seen == []


def test_other_rates_and_channels_are_resampled(sdk: openai.OpenAI, live: Live) -> None:
    both = np.stack([sound((1, 1.0), rate=44100)] * 2, axis=1)
    response = sdk.audio.transcriptions.create(
        model="M", file=("a.flac", wav(both, 44100, "FLAC")), language="en"
    )
    assert response.text == "Ask not what."
    assert live.engine.lengths[-1] == pytest.approx(16000, abs=2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "klingon"}, "language"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": "3"}, "temperature"),
        ({"response_format": "xml"}, "response_format"),
        ({"response_format": "srt", "stream": "true"}, "stream"),
        ({"stream": "maybe"}, "stream"),
        ({"stream_include_usage": "true"}, "stream_include_usage"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities"),
        (
            {"timestamp_granularities[]": "page", "response_format": "verbose_json"},
            "timestamp_granularities",
        ),
        (
            {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
            "timestamp_granularities",
        ),
        (
            {
                "timestamp_granularities[]": "word",
                "response_format": "verbose_json",
                "stream": "true",
            },
            "stream",
        ),
        ({"include[]": "all"}, "include"),
        ({"include[]": "logprobs", "response_format": "text"}, "include"),
        ({"n": "2"}, "n"),
        ({"use_beam_search": "true"}, "use_beam_search"),
        ({"top_p": "0"}, "top_p"),
        ({"max_completion_tokens": "0"}, "max_completion_tokens"),
        ({"chunking_strategy": "vad"}, "chunking_strategy"),
        ({"prompt": "x" * 17_000}, "prompt"),
        ({"length_penalty": "2"}, "length_penalty"),
        ({"to_language": "de"}, "to_language"),
        ({"stream": "true", "temperature": "inf"}, "temperature"),
        ({"language": ""}, "language"),
    ],
)
def test_wrong_fields_are_named(http: httpx.Client, fields: dict[str, str], param: str) -> None:
    answer = http.post(PATH, files={"file": short()}, data={"language": "en", **fields})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


def test_a_translation_is_into_english(http: httpx.Client) -> None:
    path = "/v1/audio/translations"
    answer = http.post(path, files={"file": short()}, data={"to_language": "de"})
    assert error_of(answer)["param"] == "to_language"


def files() -> dict[str, Any]:
    samples = sound((1, 1.0))
    samples[5] = np.nan
    mp3 = wav(sound((1, 3.0)), form="MP3")
    return {
        "empty": b"",
        "no sound": b"hello " * 100,
        "a head alone": wav(sound((1, 1.0)))[:44],
        "cut off": mp3[: len(mp3) // 200],
        "too short": wav(sound((1, 0.05))),
        "not a number": wav(samples, kind="FLOAT"),
        "too large": wav(sound((1, 110.0))),
        "too long": wav(sound((1, 130.0), rate=1000), 1000),
    }


@pytest.mark.parametrize("name", files())
def test_wrong_files_are_refused(http: httpx.Client, name: str) -> None:
    answer = http.post(PATH, files={"file": ("a.wav", files()[name])}, data={"language": "en"})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "file"


def test_what_is_no_upload_is_refused(http: httpx.Client) -> None:
    assert http.post(PATH, json={"file": "x"}).status_code == 415
    answer = http.post(PATH, data={"file": "x"}, files={"other": b"x"})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "file")
    answer = http.post(PATH, files={"model": b"M"})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "file")
    answer = http.post(PATH, files={"file": short()}, data={"model": "other"})
    assert answer.status_code == 404


def test_who_leaves_ends_all_pieces(live: Live) -> None:
    live.engine.said = dict.fromkeys((1, 2, 3), Reply("word ", delay=0.02, endless=True))
    before = len(live.engine.aborted)
    live.abandon(PATH, requests=3, files={"file": long()}, data={"language": "en"})
    live.engine.until_idle()
    assert len(live.engine.aborted) - before == 3


def test_a_stream_that_nobody_reads_ends(live: Live) -> None:
    """Its client left before the first event was taken from it."""
    live.engine.said = dict.fromkeys((1, 2, 3), Reply("word ", delay=0.02, endless=True))
    before = len(live.engine.aborted)
    speech = Speech(live.served.generation)
    options = TranscriptionOptions(
        task_options=speech.task_options("transcribe", "en", "", False),
        params={"output_kind": OutputKind.DELTA},
    )

    async def ask() -> None:
        parts = speech.cut(Sound(sound((1, 2.0)), 16000))
        deltas = await speech.stream(options, parts)
        assert live.engine.active == 1
        del deltas
        while live.engine.active:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(ask(), 300))
    assert len(live.engine.aborted) == before + 1


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(http: httpx.Client, live) -> None:
    live.engine.said[2] = Reply(error_at=2)
    answer = http.post(PATH, files={"file": long()}, data={"language": "en", "stream": "true"})
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    text = "".join(json.loads(event)["delta"] for event in events[:-2])
    assert text.startswith("Ask not what.")
    assert json.loads(events[-2])["error"]["type"] == "server_error"
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("language", "texts", "expected"),
    [
        ("en", [[" One", " two."], [" Three."]], "One two. Three."),
        ("en", [["One."], [], ["Two."]], "One. Two."),
        ("zh", [["一"], ["二"]], "一二"),
        (None, [["A "], ["B"]], "A B"),
        ("en", [[""], [" ", "A"]], "A"),
    ],
)
def test_pieces_are_joined_as_the_language_is_written(language, texts, expected) -> None:
    joiner = Joiner(language)
    written = []
    for piece in texts:
        joiner.piece()
        written += [joiner.add(text) for text in piece]
    assert "".join(written) == expected
