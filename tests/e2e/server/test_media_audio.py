"""A tiny model that hears, behind a server, asked by OpenAI's client."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tests.media.files import sound_file

from modulm import AsyncLLM
from modulm.config import EngineConfig
from modulm.plugins import manager
from modulm_media import Sound
from modulm_server.testing import Live, serve_in_thread
from modulm_towers.testing import SoundFamily, sounds, write_family

(NOISE, OTHER) = sounds((0.32, 0.2))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    import transformers as hf

    def processor(tokenizer: Any) -> Any:
        ears = hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
        return hf.Qwen2AudioProcessor(ears, tokenizer)

    driver = manager.current().load("models", "Qwen2AudioForConditionalGeneration")
    family = SoundFamily(driver, {"audio_token": "<|AUDIO|>"}, processor)
    folder = write_family(family, tmp_path_factory.mktemp("hears"))
    (folder / "noise.flac").write_bytes(sound_file(NOISE, form="FLAC", kind="PCM_24"))
    engine = AsyncLLM(
        str(folder), device="cpu", dtype="float32", attention_backend="sdpa", max_model_len=256,
        disable_frontend_multiprocessing=True, allowed_local_media_path=str(folder),
    )  # fmt: skip
    config = EngineConfig.from_keywords(
        model="M", disable_uvicorn_access_log=True, allowed_local_media_path=str(folder)
    )
    with serve_in_thread(engine, config) as server:
        yield server
    engine.shutdown()


def ask(live: Live, *parts: Any) -> tuple[tuple[float, ...], int]:
    """How likely the answer was, and how long the prompt."""
    content: Any = [*parts, {"type": "text", "text": "What is this?"}]
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="M", messages=[{"role": "user", "content": content}], temperature=0,
            max_tokens=4, logprobs=True,
        )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    return tuple(token.logprob for token in logprobs.content), answer.usage.prompt_tokens


def heard(samples: np.ndarray, form: str = "WAV", kind: str = "FLOAT", rate: int = 16000) -> Any:
    data = base64.b64encode(sound_file(samples, rate, form, kind)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": form.lower()}}


def test_sounds_from_everywhere_are_the_same_sound(live: Live) -> None:
    bare, wav = ask(live), ask(live, heard(NOISE))
    assert wav[1] > bare[1]
    data = heard(NOISE)["input_audio"]["data"]
    file = Path(live.engine.info.path) / "noise.flac"
    for url in (f"data:audio/wav;base64,{data}", file.as_uri()):
        answer = ask(live, {"type": "audio_url", "audio_url": {"url": url}})
        assert answer[1] == wav[1]
        assert answer[0] == pytest.approx(wav[0], abs=1e-3)
    fast = heard(Sound(NOISE, 16000).at(48000).samples, rate=48000)
    assert ask(live, fast)[0] == pytest.approx(wav[0], abs=5e-2)
    stereo = ask(live, heard(np.stack([NOISE, NOISE], axis=1)))
    assert stereo[0] == pytest.approx(wav[0], abs=1e-4)
    assert ask(live, heard(OTHER))[0] != pytest.approx(wav[0], abs=1e-3)
    assert ask(live, heard(NOISE), heard(OTHER))[1] > wav[1]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (heard(np.array([0, np.nan, 0], np.float32)), "not all finite"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}, "decoded"),
        ({"type": "input_audio", "input_audio": {"format": "mp3"}}, "base64"),
        (
            {"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}},
            "does not support image",
        ),
    ],
)
def test_errors_name_the_part(live: Live, part: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ask(live, part)
    assert f"messages[0].content[0].{part['type']}: " in caught.value.message
