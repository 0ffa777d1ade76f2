"""Qwen3-Omni says what transformers' does, beside the texts that it answers with."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
import transformers
from attrs import frozen
from speaking import make_omni, make_omni25
from tests.server.browser import BROWSER, Browser

from modulm.config.sources import keywords
from modulm.contracts.sampling import OutputKind, SamplingParams
from modulm.testing.checkpoints import make_tokenizer
from modulm_qwen.omni25_speaker import Omni25Speaker
from modulm_qwen.omni_speaker import OmniSpeaker
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import Live, error_of, serve_in_thread
from modulm_speakers.script import states_wanted
from modulm_speakers.speaker import Answer, Speaker

#: What users say, the voice, and tokens of the answer. The first has tokens that stand for media,
#: whose states are spoken.
SAID = (
    ("The capital of France", "chelsie", 6),
    ("Hello! How are you today?", "ethan", 9),
)
FRAMES = 12
#: How far a sample of 16 bits may be from its value.
STEP = 1 / 32767
PATH = "/v1/chat/completions"


@frozen(eq=False)
class Spoken:
    """What transformers answers: tokens of the text, frames, samples."""

    prompt: list[int]
    tokens: list[int]
    codes: np.ndarray
    samples: np.ndarray


@frozen(eq=False)
class World:
    live: Live
    client: openai.OpenAI
    speaker: Speaker
    wanted: list[Spoken]


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server whose steps have few tokens, so that prompts are split."""
    folder = tmp_path_factory.mktemp("omni")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(make_tokenizer(folder))
    model = make_omni(folder, tokenizer)
    config = keywords(
        model=str(folder), served_model_name="m", device="cpu", dtype="float32",
        max_model_len=96, block_size=16, max_num_batched_tokens=20, enable_audio_output=True,
        disable_frontend_multiprocessing=True,
    ).config  # fmt: skip
    engine = AsyncLLM.from_config(config)
    table = json.loads((folder / "config.json").read_text())
    try:
        wanted = [generated(model, tokenizer, *said) for said in SAID]
        with (
            serve_in_thread(engine, config) as live,
            openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield World(live, client, OmniSpeaker(engine.tokenizer, folder, table), wanted)
    finally:
        engine.shutdown()


def generated(model: Any, tokenizer: Any, text: str, voice: str, tokens: int) -> Spoken:
    """transformers speaks all tokens of the text but its last, which is the end of a turn."""
    prompt = tokenizer.apply_chat_template(messages(text), add_generation_prompt=True)["input_ids"]
    frames: list[torch.Tensor] = []
    decode = model.code2wav.chunked_decode
    model.code2wav.chunked_decode = lambda codes, **more: decode(frames.append(codes) or codes)
    with torch.inference_mode():
        sequence, samples = model.generate(
            input_ids=torch.tensor([prompt]), speaker=voice, return_audio=True,
            thinker_max_new_tokens=tokens + 1, thinker_do_sample=False, thinker_eos_token_id=2,
            talker_max_new_tokens=FRAMES + 1, talker_do_sample=False,
            talker_suppress_tokens=list(range(65, 80)),
        )  # fmt: skip
    model.code2wav.chunked_decode = decode
    answer = sequence[0, len(prompt) :].tolist()[:tokens]
    return Spoken(prompt, answer, frames[0][0].T.numpy(), samples[0, 0].numpy())


async def run(engine: Any, name: str, tokens: list[int], **params: Any) -> Any:
    sampling = SamplingParams(temperature=0, output_kind=OutputKind.FINAL_ONLY, **params)
    source = engine.generate({"prompt_token_ids": tokens, "cache_salt": name}, sampling, name)
    return [output async for output in source][-1].outputs[0]


async def converse(
    world: World, index: int, wanted: Spoken, voice: str, seed: int | None = None
) -> tuple[Any, Any]:
    """An answer, and its sound."""
    engine, speaker = world.live.engine, world.speaker
    runs = speaker.states_of(wanted.prompt)
    extra: Any = dict(states_wanted(runs))
    count = len(wanted.tokens)
    text = await run(
        engine, f"t{index}", wanted.prompt, max_tokens=count, extra_args=extra, speculative=0
    )
    states = (text.arrays or {}).get("states")
    said = speaker.reply(Answer(prompt=wanted.prompt, tokens=text.token_ids, states=states), voice)
    params = {**said.params, "max_tokens": FRAMES, "detokenize": False, "ignore_eos": True}
    del params["temperature"]
    sound = await run(engine, f"s{index}", list(said.tokens), speculative=0, seed=seed, **params)
    return text, sound


def test_frames_and_sound_are_those_of_transformers(world: World) -> None:
    """Both conversations at once, the second begun while the first is spoken."""

    async def both() -> list[Any]:
        runs = [
            converse(world, index, wanted, said[1])
            for index, (wanted, said) in enumerate(zip(world.wanted, SAID, strict=True))
        ]
        return await asyncio.gather(*runs)

    answers = asyncio.run_coroutine_threadsafe(both(), world.live.loop).result()
    for (text, sound), wanted in zip(answers, world.wanted, strict=True):
        assert text.token_ids == wanted.tokens
        assert np.array_equal(sound.arrays["codes"], wanted.codes)
        count = len(wanted.samples)
        assert sound.arrays["samples"][:count] == pytest.approx(wanted.samples, abs=1e-5)
        assert 0.05 < np.abs(wanted.samples).max() < 1


def test_the_openai_client_gets_an_answer_in_sound(world: World) -> None:
    (text, voice, count), wanted = SAID[0], world.wanted[0]
    asked: Any = {
        "model": "m", "messages": messages(text), "temperature": 0, "max_tokens": count,
        "modalities": ["text", "audio"],
    }  # fmt: skip
    create = world.client.chat.completions.create
    answer = create(**asked, audio={"voice": voice, "format": "wav"})
    message = answer.choices[0].message
    assert message.content is None
    said = world.live.engine.tokenizer.decode(wanted.tokens, True)
    assert message.audio.transcript == said
    assert (message.audio.expires_at, message.audio.id[:6]) == (0, "audio_")
    wave, rate = soundfile.read(io.BytesIO(base64.b64decode(message.audio.data)), dtype="float32")
    assert rate == 24000
    heard = min(len(wanted.samples), len(wave))
    assert wave[:heard] == pytest.approx(wanted.samples[:heard], abs=STEP)
    assert answer.usage.completion_tokens_details.audio_tokens > FRAMES
    assert answer.usage.completion_tokens > count

    options: Any = {"include_usage": True}
    audio: Any = {"voice": voice, "format": "pcm16"}
    chunks = list(create(**asked, audio=audio, stream=True, stream_options=options))
    assert chunks[-1].usage == answer.usage
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    pieces = [audio for choice in choices if (audio := choice.delta.audio) is not None]
    assert "".join(piece.transcript or "" for piece in pieces) == said
    assert len({piece.id for piece in pieces}) == 1
    samples = b"".join(base64.b64decode(piece.data or "") for piece in pieces)
    assert np.array_equal(np.frombuffer(samples, "<i2"), np.round(wave * 32768))
    assert sum(piece.data is not None for piece in pieces) > FRAMES
    assert not any(choice.delta.content for choice in choices)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert choices[-1].finish_reason == "length"


def test_texts_are_read_aloud(world: World) -> None:
    """Reading is the same every time, and words change it."""
    pcm = [
        world.client.audio.speech.create(
            model="m", input=text, voice="ethan", response_format="pcm",
            extra_body={"max_new_tokens": 5},
        ).content
        for text in ("Hello.", "Hello.", "Good morning.")
    ]  # fmt: skip
    assert pcm[0] == pcm[1] != pcm[2]
    assert len(pcm[0]) > 4 * 24 * 2


def test_bad_requests_name_the_field(world: World) -> None:
    asked = {"messages": messages("Hi."), "modalities": ["text", "audio"]}
    wrong: dict[str, dict[str, Any]] = {
        "audio.voice": {"audio": {"voice": "alloy"}},
        "audio.format": {"audio": {"format": "midi"}},
        "audio": {"modalities": ["text"], "audio": {"voice": "ethan"}},
        "modalities": {"modalities": ["audio"]},
        "n": {"n": 2},
        "messages": {"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]},
    }
    with world.live.client() as client:
        for name, fields in wrong.items():
            error = error_of(client.post(PATH, json={**asked, **fields}))
            assert error["param"] == name, error
        streamed = {**asked, "stream": True, "audio": {"format": "wav"}}
        assert error_of(client.post(PATH, json=streamed))["param"] == "audio.format"
        script = {"texts": [1], "padding": 1, "codes": [1]}
        for extra in ({"speech_script": script}, {"speech_states": [[0, 4]]}):
            error = error_of(
                client.post(PATH, json={"messages": asked["messages"], "vllm_xargs": extra})
            )
            assert error["param"] in (*extra, "cache_salt", "speculative")


@pytest.mark.exhaustive
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_page_plays_answers(world: World, tmp_path: Path) -> None:
    """An answer has a player with its sound; texts are read with the server's voice."""
    browser = Browser(tmp_path / "browser")
    try:
        browser.screen(1200, 800)
        browser.open(world.live.url)
        folds = "[...document.querySelectorAll('#settings details')]"
        fold = f"{folds}.find((each) => each.firstChild.textContent === 'Audio')"
        browser.click("#toggle-settings")
        browser.wait(f"{fold} && !{fold}.hidden")
        browser.run(f"{fold}.open = true")
        browser.run(f"{fold}.querySelector('select').id = 'spoken'")
        browser.run(f"{fold}.querySelector('input').id = 'voice'")
        browser.type("#spoken", "audio")
        browser.type("#voice", "chelsie")
        browser.type("#text", "Hello.")
        browser.run("document.querySelector('#composer').requestSubmit()")
        player = "document.querySelector('article.assistant audio')"
        browser.wait(f"{player}?.src.startsWith('data:audio/wav') && {player}.readyState > 0")
        assert not browser.run(f"{player}.hidden")
        assert 0.001 < browser.run(f"{player}.duration") < 1
        assert browser.text("article.assistant .body").strip()
        browser.run(
            "window.read = []; Audio.prototype.play = function () {"
            " read.push(this.src); return Promise.resolve(); }; 0"
        )
        browser.click("article.assistant button[aria-label='Read aloud']")
        browser.wait("read.length === 1")
        assert browser.run("read[0]").startswith("data:audio/wav;base64,")
        browser.reload()
        browser.wait(f"{player}?.src.startsWith('data:audio/wav')")
        assert browser.run("faults") == []
        assert not browser.elsewhere(world.live.url)
    finally:
        browser.close()


# Qwen2.5-Omni, whose sound comes once all codes are known.

SAID_25 = ("Hello! How are you today?", "Chelsie", 7)
SEED = 11


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("omni25")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(make_tokenizer(folder))
    model = make_omni25(folder)
    config = keywords(
        model=str(folder), served_model_name="m", device="cpu", dtype="float32",
        max_model_len=96, block_size=16, max_num_batched_tokens=20, enable_audio_output=True,
        disable_frontend_multiprocessing=True,
    ).config  # fmt: skip
    engine = AsyncLLM.from_config(config)
    table = json.loads((folder / "config.json").read_text())
    try:
        wanted = [generated25(model, tokenizer, *SAID_25)]
        with (
            serve_in_thread(engine, config) as live,
            openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield World(live, client, Omni25Speaker(engine.tokenizer, folder, table), wanted)
    finally:
        engine.shutdown()


def with_mask(module: Any, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give the prompt its mask. `generate` drops masks of ones, and the talker then leaves
    out the codes of the last two positions, which it adds for prompts with padding.
    """
    if (embeds := named.get("inputs_embeds")) is not None:
        named["attention_mask"] = torch.ones(embeds.shape[:2], dtype=torch.int64)
    return given, named


def generated25(model: Any, tokenizer: Any, text: str, voice: str, tokens: int) -> Spoken:
    """transformers does not speak the last token of the text, which is the end of a turn."""
    prompt = tokenizer.apply_chat_template(messages(text), add_generation_prompt=True)["input_ids"]
    codes: list[torch.Tensor] = []
    model.token2wav.register_forward_pre_hook(lambda module, given: codes.append(given[0]))
    decode = model.token2wav.code2wav_dit_model.sample

    def sample(*given: Any, **more: Any) -> torch.Tensor:
        torch.manual_seed(SEED)
        return decode(*given, **more)

    model.token2wav.code2wav_dit_model.sample = sample
    model.talker.register_forward_pre_hook(with_mask, with_kwargs=True)
    with torch.inference_mode():
        sequence, samples = model.generate(
            input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=int),
            speaker=voice, thinker_max_new_tokens=tokens + 1, thinker_do_sample=False,
            thinker_eos_token_id=2, talker_max_new_tokens=FRAMES, talker_do_sample=False,
            talker_eos_token_id=[64, 66],
        )  # fmt: skip
    answer = sequence[0, len(prompt) :].tolist()
    return Spoken(prompt, answer, codes[0].T.numpy(), samples.numpy())


def test_codes_and_sound_of_the_older_model(older: World) -> None:
    (wanted,), (_, voice, _) = older.wanted, SAID_25
    work = converse(older, 0, wanted, voice, SEED)
    text, sound = asyncio.run_coroutine_threadsafe(work, older.live.loop).result()
    assert text.token_ids == wanted.tokens
    heard = sound.arrays["codes"]
    assert np.array_equal(heard[: len(wanted.codes)], wanted.codes)
    assert len(heard) <= len(wanted.codes) + 1
    assert sound.arrays["samples"] == pytest.approx(wanted.samples, abs=1e-4)
    assert 0.01 < np.abs(wanted.samples).max() < 1


def test_chats_of_the_older_model(older: World) -> None:
    text, voice, count = SAID_25
    answer = older.client.chat.completions.create(
        model="m", messages=messages(text), temperature=0, max_tokens=count, seed=SEED,
        modalities=["text", "audio"], audio={"voice": voice, "format": "wav"},
    )  # fmt: skip
    audio = answer.choices[0].message.audio
    wave, _ = soundfile.read(io.BytesIO(base64.b64decode(audio.data)), dtype="float32")
    assert len(wave) > 12
    with older.live.client() as client:
        error = error_of(client.post("/v1/audio/speech", json={"input": "Hello."}))
    assert error["param"] == "input"
