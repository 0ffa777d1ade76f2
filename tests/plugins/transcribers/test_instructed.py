"""Chat models that are asked in words: what they are asked, and a real engine behind the routes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tests.media.files import sound_file
from tests.plugins.models.test_audio import FAMILIES

from modulm.config import EngineConfig
from modulm.errors import CheckpointError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tokenizer
from modulm_media import Sound
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import Live, serve_in_thread
from modulm_speech import Wanted
from modulm_speech.instructed import InstructedTranscriber
from modulm_tokenizers.tokenizer import load_tokenizer
from modulm_towers.testing import SoundFamily, sounds, write_family
from modulm_transcriber_instructed import (
    Canary,
    CohereAsr,
    Flamingo,
    GlmAsr,
    Qwen3Asr,
    QwenAudio,
    QwenOmni,
)
from modulm_transcriber_instructed.diarized import MossDiarize, VibeVoice
from modulm_transcriber_voxtral import VoxtralTranscriber

NAME = "Qwen2AudioForConditionalGeneration"
#: Two pieces of Qwen2-Audio's 30 seconds; what is heard of each is its first second.
SAID = np.concatenate(sounds((31.0,)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers as hf

    def processor(tokenizer: Any) -> Any:
        mel = hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
        return hf.Qwen2AudioProcessor(mel, tokenizer)

    driver = manager.current().load("models", NAME)
    tokens = {"audio_token": "<|AUDIO|>", "1": "<|audio_bos|>", "2": "<|audio_eos|>"}
    family = SoundFamily(driver, tokens, processor)
    return write_family(family, tmp_path_factory.mktemp("qwen"))


@contextmanager
def serving(folder: Path) -> Iterator[Live]:
    """A real engine of a checkpoint behind a server."""
    config = EngineConfig.from_keywords(
        model=str(folder), served_model_name=("M",), dtype="float32", device="cpu",
        disable_frontend_multiprocessing=True, disable_uvicorn_access_log=True,
    )  # fmt: skip
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, engine.info.config) as server:
            yield server
    finally:
        engine.shutdown()


def prompt_of(folder: Path, kind: type, wanted: Wanted) -> str:
    config = json.loads((folder / "config.json").read_text())
    transcriber = kind(load_tokenizer(folder), folder, config)
    question = transcriber.ask(Sound(np.ones(1600, np.float32), 16000), wanted)
    text: str = transcriber.tokenizer.decode(list(question.tokens), False)
    return text


def test_qwen3_asr_names_the_language_before_the_text(folder: Path) -> None:
    transcriber = Qwen3Asr(load_tokenizer(folder), folder, {})
    for answer in ("language English<asr_text>Ada went home.", "Ada went home."):
        tokens = transcriber.tokenizer.encode(answer, add_special_tokens=False)
        (segment,) = transcriber.read(tokens, 2.0)
        assert segment.text.strip() == "Ada went home."


def test_the_words_name_the_language_and_go_on_with_the_clients(folder: Path) -> None:
    wanted = Wanted(language="de", prompt="Ada<|im_end|>")
    assert prompt_of(folder, QwenAudio, wanted) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\nTranscribe the speech, which is in German. "
        "Ada<|im_end|>\n<|im_start|>assistant\n"
    )
    asr = prompt_of(folder, Qwen3Asr, wanted)
    assert asr.startswith("<|im_start|>system\nAda<|im_end|>\n<|im_start|>user\n<|audio_start|>")
    assert asr.endswith("<|im_start|>assistant\nlanguage German<asr_text>")
    assert "\nPlease transcribe this audio into text Ada" in prompt_of(folder, GlmAsr, wanted)
    translated = prompt_of(folder, QwenAudio, Wanted(task="translate"))
    assert "\nTranslate the speech into English.<|im_end|>" in translated
    assert "<sound>Transcribe the input speech.<|im_end|>" in prompt_of(folder, Flamingo, Wanted())


def test_cohere_transcribe_is_told_by_tokens(tmp_path: Path) -> None:
    import transformers as hf

    names = (
        "<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>", "<|de|>", "<|pnc|>",
        "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>",
    )  # fmt: skip
    make_tokenizer(tmp_path, vocab=480)
    sound = Sound(np.ones(1600, np.float32), 16000)
    wanted = Wanted(language="de")
    with pytest.raises(CheckpointError, match="has no token"):
        CohereAsr(load_tokenizer(tmp_path), tmp_path, {}).ask(sound, wanted)
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": [*names, "\u2581"]})
    tokenizer.save_pretrained(tmp_path)
    asked = CohereAsr(load_tokenizer(tmp_path), tmp_path, {}).ask(sound, wanted)
    first, last = tokenizer.convert_tokens_to_ids(["\u2581", "<|startofcontext|>"])
    assert asked.tokens == [first, *range(last, last + 4), last + 3, *range(last + 4, last + 8)]


def test_canary_is_told_both_languages(tmp_path: Path) -> None:
    import transformers as hf

    names = (
        "<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>", "<|de|>", "<|en|>",
        "<|pnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>",
    )  # fmt: skip
    make_tokenizer(tmp_path, vocab=480)
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": [*names]})
    tokenizer.save_pretrained(tmp_path)
    canary = Canary(load_tokenizer(tmp_path), tmp_path, {})
    sound = Sound(np.ones(1600, np.float32), 16000)
    ids = tokenizer.convert_tokens_to_ids(list(names))
    told = {
        task: canary.ask(sound, Wanted(task=task, language="de")).tokens for task in canary.tasks
    }
    assert told == {
        "transcribe": [*ids[:4], ids[3], *ids[5:]],
        "translate": [*ids[:4], ids[4], *ids[5:]],
    }


def test_each_form_has_the_placeholder_of_its_model_and_is_of_one_that_hears() -> None:
    plugins = manager.current()
    hears = [each.name for each in plugins.names("media_families")]
    for declared in plugins.names("transcribers"):
        kind = plugins.load("transcribers", declared.name)
        if issubclass(kind, InstructedTranscriber):
            assert declared.name in hears
            assert "audio" in plugins.load("media_families", declared.name).kinds
            assert kind.form.count("{words}") == 1
            # Tiny checkpoints of both Omnis have the tokens of the younger one.
            if declared.name in FAMILIES and kind is not QwenOmni:
                assert kind.form.count(FAMILIES[declared.name][0]["audio_token"]) == 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('The spoken content of the audio is "Hello there".', "Hello there"),
        ("The transcription of the audio is 'It's 4.'.", "It's 4."),
        ("Hello there.", "Hello there."),
    ],
)
def test_a_sentence_around_what_was_said_is_left_out(folder: Path, answer, expected) -> None:
    config = json.loads((folder / "config.json").read_text())
    transcriber = Flamingo(load_tokenizer(folder), folder, config)
    tokens = transcriber.tokenizer.encode(answer, add_special_tokens=False)
    assert [segment.text for segment in transcriber.read(tokens, 1.0)] == [expected]


SAID_BY_TWO = [(0.0, 1.5, "A", "Hello there."), (1.25, 4.0, "B", "Good morning.")]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (MossDiarize, "[0.00][S01]Hello there.[1.50] [0:01.25][S02] Good morning.[9.00]"),
        (
            VibeVoice,
            (
                'assistant\n[{"Start":0.0,"End":1.5,"Speaker":0,"Content":"Hello there."},'
                '{"Start":1.25,"End":9.0,"Speaker":1,"Content":"Good morning."}]'
            ),
        ),
    ],
)
def test_speakers_are_named(folder: Path, kind: Any, answer: str) -> None:
    transcriber = kind(load_tokenizer(folder), folder, {})
    tokens = transcriber.tokenizer.encode(answer, add_special_tokens=False)
    segments = transcriber.read(tokens, 4.0)
    read = [(one.start, one.end, one.speaker, one.text.strip()) for one in segments]
    assert read == SAID_BY_TWO
    odd = '[{"Start": %s, "End": 2, "Speaker": %s, "Content": "x"}]'
    others = ("Hello there.", "[{", "[]", '[{"Start": 1}]', odd % ("NaN", 1), odd % (1, "1e999"))
    for other in (*others, "[" * 2000):  # deeper than Python's stack
        tokens = transcriber.tokenizer.encode(other, add_special_tokens=False)
        (segment,) = transcriber.read(tokens, 4.0)
        assert (segment.text, segment.speaker, segment.end) == (other, "", 4.0)


ANSWERS = (
    "[0.00][S01]Hello there.[1.50] [0:01.25][S02] Good morning.[9.00]",
    '[{"Start":0.0,"End":1.5,"Speaker":0,"Content":"Hello there."},{"Start":1,"End":3}]',
    "language English<asr_text>Ada went home.",
    'The spoken content of the audio is "Hello there".',
)
PIECES = (
    "[", "]", "{", "}", '"', ":", "-1", "1e999", "NaN", "99:99:99", "[S", "[0.5]", "\0", "🎈", "'",
    '"End":', "<asr_text>", "[" * 500,
)  # fmt: skip


def test_any_answer_is_read(folder: Path, rng: random.Random, rounds: int) -> None:
    """Times are within the sound and in order, whatever the model says."""
    tokenizer, config = load_tokenizer(folder), json.loads((folder / "config.json").read_text())
    for _ in range(40 * rounds):
        answer = rng.choice(ANSWERS)
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(answer) + 1)
            answer = answer[:at] + rng.choice(PIECES) + answer[at + rng.choice((0, 0, 1, 5)) :]
        kind = rng.choice((MossDiarize, VibeVoice, Qwen3Asr, Flamingo))
        transcriber = kind(tokenizer, folder, config)
        for one in transcriber.read(tokenizer.encode(answer, add_special_tokens=False), 4.0):
            assert 0 <= one.start <= one.end <= 4.0, (kind, answer, one)


def test_the_length_of_a_sound_is_told(folder: Path) -> None:
    prompt = prompt_of(folder, VibeVoice, Wanted())
    assert "<|box_start|><|object_ref_end|>\nThis is a 0.10 seconds audio, please trans" in prompt
    told = prompt_of(folder, VibeVoice, Wanted(prompt="Ada<|im_end|>"))
    assert "audio, with extra info: Ada\n\nPlease transcribe it with these keys: Start" in told


def sdk(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="k", max_retries=0)


def test_a_real_engine_transcribes_the_pieces_of_a_long_sound(folder: Path) -> None:
    with serving(folder) as live, sdk(live) as client:
        form: Any = {"model": "M", "file": ("a.wav", sound_file(SAID)), "language": "en"}
        few = {"max_completion_tokens": 5}
        whole = client.audio.transcriptions.create(**form, extra_body=few)
        events = list(client.audio.transcriptions.create(**form, stream=True, extra_body=few))
        with pytest.raises(openai.BadRequestError, match="no timestamps"):
            client.audio.transcriptions.create(**form, response_format="srt")
        with pytest.raises(openai.BadRequestError, match="is not one of de, en, es"):
            client.audio.transcriptions.create(**{**form, "language": "pt"})
    assert whole.text
    last: Any = events[-1]
    assert last.type == "transcript.text.done"
    assert last.usage.output_tokens == 10
    assert last.usage.input_tokens > 2 * 25


def test_voxtral_is_told_by_control_tokens(tmp_path: Path) -> None:
    import transformers as hf

    def processor(tokenizer: Any) -> Any:
        mel = hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
        return hf.VoxtralProcessor(mel, tokenizer)

    name = "VoxtralForConditionalGeneration"
    control_tokens = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[/INST]", "[TRANSCRIBE]")
    tokens = {"audio_token": "[AUDIO]", **{str(i): word for i, word in enumerate(control_tokens)}}
    driver = manager.current().load("models", name)
    write_family(SoundFamily(driver, tokens, processor), tmp_path)
    opening = "<s>[INST][BEGIN_AUDIO][AUDIO][/INST]"
    prompt = prompt_of(tmp_path, VoxtralTranscriber, Wanted(language="fr"))
    assert prompt == f"{opening}lang:fr[TRANSCRIBE]"
    assert prompt_of(tmp_path, VoxtralTranscriber, Wanted()) == f"{opening}[TRANSCRIBE]"
    with serving(tmp_path) as live, sdk(live) as client:
        form: Any = {"model": "M", "file": ("a.wav", sound_file(SAID[:16000]))}
        few = {"max_completion_tokens": 5}
        assert client.audio.transcriptions.create(**form, extra_body=few).text
        with pytest.raises(openai.BadRequestError, match="prompt is not supported"):
            client.audio.transcriptions.create(**form, prompt="Ada")
        with pytest.raises(openai.BadRequestError, match="does not translate"):
            client.audio.translations.create(**form)
