"""CSM says what transformers' does, through the engine and over HTTP."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
from attrs import frozen
from safetensors.torch import save_file
from samples import parametrize_sample
from speaking import make_csm

from modulm import LLM
from modulm.config.sources import keywords
from modulm.contracts.sampling import OutputKind, SamplingParams
from modulm.errors import ConfigError, RequestError
from modulm_csm.csm_speaker import CsmSpeaker
from modulm_media.limits import Limits
from modulm_media.sound_files import decode_sound
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import Live, error_of, serve_in_thread

PATH = "/v1/audio/speech"
#: (text, voice, frames): the first ends after 13 frames, the others at their limits.
SAID = (("The river.", "2", 16), ("Yes.", "1", 12), ("Hello.", "0", 12))
#: The code that the tiny model gives twice in the 13th frame of the first.
END = 52
#: How far a sample of 16 bits may be from its value.
STEP = 1 / 32767


@frozen(eq=False)
class Spoken:
    """What transformers generates for a prompt."""

    tokens: list[int]
    codes: np.ndarray
    samples: np.ndarray


@frozen(eq=False)
class World:
    live: Live
    client: openai.OpenAI
    wanted: list[Spoken]
    adapted: Spoken

    def pcm(self, text: str, voice: str, model: str = "m", **more: Any) -> np.ndarray:
        """The samples of a text, in 16 bits."""
        answer = self.client.audio.speech.create(
            model=model, input=text, voice=voice, response_format="pcm", extra_body=more
        )
        return np.frombuffer(answer.content, "<i2")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server whose cache has three blocks: two texts that grow do not fit."""
    folder = tmp_path_factory.mktemp("csm")
    model = make_csm(folder, codebook_eos_token_id=END)
    adapted = write_adapter(model, folder / "reader")
    config = keywords(
        model=str(folder), served_model_name="m", device="cpu", dtype="float32",
        max_model_len=48, block_size=16, num_gpu_blocks_override=4,
        disable_frontend_multiprocessing=True, enable_lora=True, speculative="auto",
        lora_modules=(f"reader={folder / 'reader'}",),
    ).config  # fmt: skip
    engine = AsyncLLM.from_config(config)
    try:
        speaker = CsmSpeaker(engine.tokenizer, folder, {})
        wanted = [generated(model, speaker, *said) for said in SAID]
        other = generated(adapted, speaker, *SAID[2])
        with (
            serve_in_thread(engine, config) as live,
            openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield World(live, client, wanted, other)
    finally:
        engine.shutdown()


def write_adapter(model: Any, folder: Path) -> Any:
    """Write an adapter of the backbone; returns the model with it in its weights."""
    folder.mkdir()
    adapted, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    tensors, name = {}, "backbone_model.layers.1.self_attn.q_proj"
    for part, shape in (("A", (4, 64)), ("B", (64, 4))):
        key = f"base_model.model.{name}.lora_{part}.weight"
        tensors[key] = torch.randn(shape, generator=generator) / 2
    down, up = tensors.values()
    adapted.get_submodule(name).weight.data += 2 * up @ down
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return adapted


def generated(model: Any, speaker: CsmSpeaker, text: str, voice: str, frames: int) -> Spoken:
    tokens = list(speaker.ask(text, voice).tokens)
    with torch.inference_mode():
        answer = model.generate(
            input_ids=torch.tensor([tokens]), max_new_tokens=frames, do_sample=False,
            depth_decoder_do_sample=False, output_audio=True, return_dict_in_generate=True,
        )  # fmt: skip
    return Spoken(tokens, answer.sequences[0].numpy(), answer.audio[0].numpy())


async def generate(
    engine: Any, name: str, tokens: list[int], frames: int, *, ignore_eos: bool = True
) -> Any:
    params = SamplingParams(temperature=0, max_tokens=frames, detokenize=False,
                            ignore_eos=ignore_eos, output_kind=OutputKind.FINAL_ONLY)  # fmt: skip
    source = engine.generate({"prompt_token_ids": tokens}, params, name)
    return [output async for output in source][-1].outputs[0]


async def together(engine: Any, asked: list[tuple[list[int], int]]) -> list[Any]:
    runs = (generate(engine, f"r{index}", *each) for index, each in enumerate(asked))
    return await asyncio.gather(*runs)


def test_frames_and_sound_are_those_of_transformers(world: World) -> None:
    asked = [(wanted.tokens, said[2]) for wanted, said in zip(world.wanted, SAID, strict=True)]
    work = together(world.live.engine, asked)
    answers = asyncio.run_coroutine_threadsafe(work, world.live.loop).result()
    for answer, wanted in zip(answers, world.wanted, strict=True):
        assert np.array_equal(answer.arrays["codes"], wanted.codes)
        assert answer.arrays["samples"] == pytest.approx(wanted.samples, abs=1e-5)
        assert 0.05 < np.abs(wanted.samples).max() < 1
    assert [answer.finish_reason for answer in answers] == ["stop", "length", "length"]


def test_nothing_is_drafted(world: World) -> None:
    """Requests need not turn drafts off: there are none, and a named drafter is refused."""
    assert not world.live.engine.info.limit("drafts", "drafts")
    config = world.live.engine.info.config
    drafter = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="no tokens are drafted.*codes of sound"):
        LLM.from_config(config.with_(speculative_config=drafter, enable_lora=False))


def test_no_code_is_an_end_of_texts(world: World) -> None:
    """The tokenizer's end of a turn, 2, is a code, too."""
    work = generate(world.live.engine, "r", [1, 400, 2], 9, ignore_eos=False)
    with pytest.raises(RequestError, match="ignore_eos must be true"):
        asyncio.run_coroutine_threadsafe(work, world.live.loop).result()
    work = generate(world.live.engine, "s", [1, 400, 2], 9)
    answer = asyncio.run_coroutine_threadsafe(work, world.live.loop).result()
    assert answer.token_ids[4] == 2
    assert len(answer.token_ids) == len(answer.arrays["codes"]) == 9


def test_rows_that_made_room_for_others_say_the_same(world: World) -> None:
    engine = world.live.engine
    asked = [(wanted.tokens, 34) for wanted in world.wanted[1:]]

    async def both() -> Any:
        alone = [(await together(engine, [each]))[0] for each in asked]
        return alone, await together(engine, asked)

    alone, answers = asyncio.run_coroutine_threadsafe(both(), world.live.loop).result()
    for answer, before in zip(answers, alone, strict=True):
        assert np.array_equal(answer.arrays["codes"], before.arrays["codes"])
        assert answer.arrays["samples"] == pytest.approx(before.arrays["samples"], abs=1e-5)
    with world.live.client() as client:
        metrics = client.get("/metrics").text
    (preempted,) = [line for line in metrics.splitlines() if "preemptions_total{" in line]
    assert float(preempted.split()[-1]) > 0


def test_the_openai_client_gets_sound_while_it_is_spoken(world: World) -> None:
    (text, voice, frames), samples = SAID[0], world.wanted[0].samples
    asked: Any = {"model": "m", "input": text, "voice": voice}
    more = {"temperature": 0, "max_new_tokens": frames}
    create = partial(world.client.audio.speech.create, **asked, extra_body=more)
    wave, rate = soundfile.read(io.BytesIO(create(response_format="wav").content), dtype="float32")
    assert rate == 24000
    assert wave == pytest.approx(samples, abs=STEP)
    streamed = world.client.audio.speech.with_streaming_response
    with streamed.create(**asked, response_format="pcm", extra_body=more) as response:
        assert response.headers["content-type"] == "audio/pcm"
        pieces = list(response.iter_bytes())
    assert np.array_equal(np.frombuffer(b"".join(pieces), "<i2"), np.round(wave * 32768))
    with world.live.client() as client:
        body = {**asked, **more, "response_format": "pcm", "stream_format": "sse"}
        lines = client.post(PATH, json=body).text.split("\n\n")
    *deltas, done = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert b"".join(base64.b64decode(event["audio"]) for event in deltas) == b"".join(pieces)
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert (done["type"], done["usage"]["output_tokens"]) == ("speech.audio.done", 13)
    assert done["usage"]["input_tokens"] == len(world.wanted[0].tokens)


@parametrize_sample("form", ["flac", "opus", "mp3", "aac"], every=2)
def test_compressed_sound_is_as_long_as_what_was_spoken(world: World, form: str) -> None:
    (text, voice, frames), samples = SAID[0], world.wanted[0].samples
    answer = world.client.audio.speech.create(
        model="m", input=text, voice=voice, response_format=form,  # type: ignore[arg-type]
        extra_body={"temperature": 0, "max_new_tokens": frames},
    )  # fmt: skip
    sound = decode_sound(answer.content, {"rate": 24000}, Limits(seconds=9))
    assert len(sound.samples) >= len(samples)
    if form == "flac":
        assert sound.samples == pytest.approx(samples, abs=STEP)


def test_adapters_of_the_backbone(world: World) -> None:
    text, voice, frames = SAID[2]
    said = world.pcm(text, voice, "reader", temperature=0, max_new_tokens=frames)
    assert np.array_equal(said, np.round(world.adapted.samples * 32767))
    assert not np.array_equal(world.adapted.codes, world.wanted[2].codes)


def test_seeds_give_the_same_sound(world: World) -> None:
    asked = {"text": "Yes.", "voice": "3", "max_new_tokens": 4}
    first, again, other = (world.pcm(**asked, seed=seed) for seed in (7, 7, 8))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_client_that_leaves_ends_the_speech(world: World) -> None:
    world.live.abandon(PATH, json={"input": "The rivers.", "voice": "4", "response_format": "pcm"})
    while world.live.engine.active:
        time.sleep(0.01)
    assert len(world.pcm(*SAID[2][:2], temperature=0, max_new_tokens=3)) == 3 * 24


def test_bad_requests_name_the_field(world: World) -> None:
    wrong: dict[str, Any] = {
        "input": " ",
        "voice": "alloy",
        "response_format": "midi",
        "speed": 2,
        "stream_format": "rtp",
        "instructions": "Whisper.",
        "max_new_tokens": 0,
    }
    asked = {"input": "Yes.", "voice": "1"}
    with world.live.client() as client:
        for name, value in wrong.items():
            error = error_of(client.post(PATH, json={**asked, name: value}))
            assert error["param"] == name, error
        long = error_of(client.post(PATH, json={**asked, "input": "Yes. " * 99}))
        chat = {"messages": [{"role": "user", "content": "Hello!"}]}
        texts = error_of(client.post("/v1/chat/completions", json=chat))
    assert long["param"] == "input"
    assert PATH in texts["message"]
