"""A server whose engine hears: what it says depends on how loud a sound is."""

from __future__ import annotations

import io
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from attrs import evolve
from starlette.types import ASGIApp
from tests.speech.whisper import whisper_words

from modulm.config import EngineConfig
from modulm.contracts.media import MediaItem
from modulm.contracts.outputs import Logprob
from modulm_media import MediaPrompt
from modulm_server.app import Served
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_server.testing import Live, serve_in_thread
from modulm_tokenizers.tokenizer import load_tokenizer

__all__ = ["LEVELS", "Hears", "serve_ears", "sound", "wav"]

#: What is said where a sound is so loud, in tenths of full scale.
LEVELS: dict[int, Any] = {1: " Ask not what.", 2: " Your country.", 3: " Can do."}


def sound(*parts: tuple[int, float], rate: int = 16000) -> np.ndarray:
    """[n] float32 of (level in tenths, seconds) one after the other: square waves of 200 Hz."""
    half = np.ones(rate // 400)
    wave = np.concatenate([half, -half])
    waves = [np.resize(level / 10 * wave, int(s * rate)) for level, s in parts]
    return np.concatenate(waves).astype(np.float32)


def wav(samples: np.ndarray, rate: int = 16000, form: str = "WAV", kind=None) -> bytes:
    """A file of sound."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=kind)
    return file.getvalue()


class Hears(ScriptedEngine):
    """said: what is said of a sound of which level, as text, as times and texts, or as a reply.

    nobody: how probable it is that nobody speaks, which makes what is said improbable. tries: what
    is said at a temperature instead. code: the language that is found. lengths: of the
    sounds, in samples; most: how many requests there were at once.
    """

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        self.ids = whisper_words(folder)
        tokenizer = load_tokenizer(folder)
        facts = {"config": config, "path": str(folder), "max_model_len": 448,
                 "architecture": "WhisperForConditionalGeneration"}  # fmt: skip
        super().__init__(tokenizer, self._said, scripted_info(tokenizer, **facts))
        self.said = dict(LEVELS)
        self.tries: dict[float, str] = {}
        self.code, self.most, self.nobody = "en", 0, 0.0
        self.lengths: list[int] = []

    def words(self, text: str) -> list[int]:
        """The tokens of a text."""
        assert self.tokenizer is not None
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def generate(self, prompt: Any, params: Any, request_id: str, **more: Any) -> Any:
        item = prompt["multi_modal_data"].items[0]
        samples = item.tensors["samples"]
        self.lengths.append(len(samples))
        level = round(10 * float(np.median(np.abs(samples))))
        levelled_prompt = {**prompt, "prompt": str(level)}
        outputs: AsyncGenerator[Any, None] = super().generate(
            levelled_prompt, params, request_id, **more
        )
        try:
            async for output in outputs:
                self.most = max(self.most, self.active)
                yield self._doubted(output)
        finally:
            await outputs.aclose()

    def _doubted(self, output: Any) -> Any:
        """The output, less likely where nobody is said to speak."""
        if self.nobody and output.prompt_logprobs:
            no_speech = Logprob(logprob=math.log(self.nobody), rank=1, decoded_token=None)
            output.prompt_logprobs[1] = {self.ids["nospeech"]: no_speech}
            for choice in output.outputs:
                choice.logprobs = [
                    {token: evolve(entry, logprob=-1.5) for token, entry in position.items()}
                    for position in choice.logprobs
                ]
        return output

    def until_idle(self) -> None:
        """Wait until no request runs."""
        end = time.monotonic() + 300
        while self.active:
            assert time.monotonic() < end
            time.sleep(0.005)

    def _said(self, level: str, params: Any) -> Reply:
        if params.allowed_token_ids:
            return Reply(tokens=[self.ids[self.code]])
        script: Any = self.tries.get(params.temperature, self.said[int(level)])
        if isinstance(script, Reply):
            return script
        tokens: list[int] = []
        for part in script if isinstance(script, list) else [script]:
            if isinstance(part, str):
                tokens += self.words(part)
            else:
                tokens.append(self.ids["notimestamps"] + 1 + round(part / 0.02))
        return Reply(tokens=tokens)


class Reader:
    """Puts a sound into a prompt as it is, where a media family would make features of it."""

    family = SimpleNamespace(rate=16000)
    kinds = ("audio",)

    def read(self, tokens: Any, media: Any, options: Any = None) -> MediaPrompt:
        """The prompt, and the samples behind it."""
        assert all(one.value.rate == 16000 for one in media)
        ids = np.asarray(tokens, np.int64)
        items = [
            MediaItem("audio", one.hash, 0, 1, {"samples": one.value.samples}) for one in media
        ]
        return MediaPrompt(ids, tuple(items))


@contextmanager
def serve_ears(folder: Path, watched: Callable[..., Any] | None, **flags: Any) -> Iterator[Live]:
    """A server of such an engine, whose files are in a folder."""
    keywords = {"model": "M", "disable_uvicorn_access_log": True, "max_audio_clip_filesize_mb": 3,
             "max_transcription_seconds": 120.0, **flags}  # fmt: skip
    config = EngineConfig.from_keywords(**keywords)

    def listen(served: Served) -> ASGIApp:
        """Before the server starts, which opens the model's own reader in a thread."""
        served.generation.media.reader = Reader()
        return served.app if watched is None else watched(served)

    with serve_in_thread(Hears(folder, config), config, listen) as live:
        yield live
