"""Parakeet says what transformers' does, with the same times; its transcripts over HTTP."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from samples import parametrize_sample

import modulm
from modulm.config.sources import keywords
from modulm.errors import ModulmError
from modulm.testing.checkpoints import make_tiny
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import serve_in_thread

ARCHITECTURES = ("ParakeetForCTC", "ParakeetForRNNT", "ParakeetForTDT")
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
BLANK = 64
LEANING = 1.6


def sounds() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(n).astype(np.float32) / 9 for n in (9000, 16000)]


def write(folder: Path, architecture: str) -> Path:
    make_tiny(folder, architecture)
    weights = load_file(folder / "model.safetensors")
    if "joint.head.bias" in weights:  # so that it says nothing at some frames, and goes on
        weights["joint.head.bias"][BLANK] += LEANING
        weights["joint.head.bias"][BLANK + 1 : BLANK + 2] -= 9
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    hf.ParakeetFeatureExtractor(16).save_pretrained(folder)
    return folder


def expected(folder: Path, architecture: str, sound: np.ndarray) -> list[tuple[int, int]]:
    """Tokens and the frames where they begin."""
    model = getattr(hf, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    heard = hf.ParakeetFeatureExtractor(16)([sound], sampling_rate=16000, return_tensors="pt")
    with torch.inference_mode():
        said = model.generate(**heard)
    if architecture == "ParakeetForCTC":
        runs = itertools.groupby(enumerate(said[0].tolist()), key=lambda pair: pair[1])
        firsts = [next(run)[::-1] for _, run in runs]
    else:
        starts = (said.durations[0].cumsum(0) - said.durations[0]).tolist()
        firsts = list(zip(said.sequences[0].tolist(), starts, strict=True))[1:]
    return [(token, frame) for token, frame in firsts if token != BLANK]


def read(rows: Any) -> list[tuple[int, int]]:
    table = np.asarray(rows)
    return [
        (int(row[1 + 2 * slot]), frame)
        for frame, row in enumerate(table)
        for slot in range(int(row[0]) - 1)
    ]


@parametrize_sample("architecture", ARCHITECTURES, every=3)
def test_frames_say_what_transformers_generates(architecture: str, tmp_path: Path) -> None:
    folder = write(tmp_path, architecture)
    prompts: list[Any] = [
        {"prompt_token_ids": [0], "multi_modal_data": {"audio": (sound, 16000)}}
        for sound in sounds()
    ]
    wanted = [expected(folder, architecture, sound) for sound in sounds()]
    assert all(wanted)
    for flags in ({}, {"dtype": "bfloat16"}):
        with modulm.LLM(str(folder), **{**SETTINGS, **flags}) as llm:
            answers = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
            said = [read(answer.outputs.data) for answer in answers]
            assert all(said) if flags else said == wanted
            with pytest.raises(ModulmError, match="only token_embed"):
                llm.generate(prompts[:1], modulm.SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.exhaustive
def test_transcripts_with_words_and_streams(tmp_path: Path) -> None:
    folder = write(tmp_path, "ParakeetForTDT")
    config = keywords(model=str(folder), served_model_name="m",
                      disable_frontend_multiprocessing=True, **SETTINGS).config  # fmt: skip
    file = io.BytesIO()
    soundfile.write(file, sounds()[1], 16000, format="WAV")
    data = ("a.wav", file.getvalue())
    tokens = [token for token, _ in expected(folder, "ParakeetForTDT", sounds()[1])]
    text = hf.AutoTokenizer.from_pretrained(folder).decode(tokens)
    engine = AsyncLLM.from_config(config)
    try:
        with (
            serve_in_thread(engine, config) as live,
            openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
        ):
            create: Any = client.audio.transcriptions.create
            whole = create(model="m", file=data, response_format="verbose_json",
                           timestamp_granularities=["word", "segment"])  # fmt: skip
            assert whole.text == text.strip()
            assert "".join(word.word for word in whole.words) == "".join(text.split())
            assert all(0 <= word.start <= word.end <= 1.0 for word in whole.words)
            events = list(create(model="m", file=data, stream=True))
            assert events[-1].text == text.strip()
            with pytest.raises(openai.BadRequestError, match="without sampling"):
                create(model="m", file=data, temperature=0.5)
    finally:
        engine.shutdown()
