"""Paths through a matrix and words of tokens, as transformers has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.speech.whisper import whisper_words
from transformers.models.whisper import generation_whisper, tokenization_whisper

from modulm.contracts.tokenizer import Tokenizer
from modulm_tokenizers.tokenizer import load_tokenizer
from modulm_transcriber_whisper.words import UNSPACED, end_frames, group_words
from modulm_whisper.alignment_rows import median


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (3, 3), (5, 40), (20, 60), (12, 7)])
def test_the_path_is_that_of_transformers(shape: tuple[int, int]) -> None:
    # Few values, so that many ways cost the same.
    for seed, values in ((0, 3), (1, 1000)):
        weights = np.random.default_rng(seed).integers(0, values, shape).astype(np.float32)
        texts, times = generation_whisper._dynamic_time_warping(-weights.astype(np.float64))
        jumps = np.pad(np.diff(texts), (1, 0), constant_values=1).astype(bool)
        assert end_frames(weights).tolist() == times[jumps].tolist()


@pytest.mark.parametrize(("frames", "width"), [(40, 7), (4, 7), (3, 7), (9, 3), (5, 1)])
def test_the_median_is_that_of_transformers(frames: int, width: int) -> None:
    x = torch.rand((2, 3, frames), generator=torch.Generator().manual_seed(0))
    assert torch.equal(median(x, width), generation_whisper._median_filter(x, width))


class HFTokenizer:
    """The tokenizer as transformers' functions call one."""

    eos_token_id = 1 << 30

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def decode(self, tokens: list[int], **how: Any) -> str:
        return self.tokenizer.decode(list(tokens))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("words")
    whisper_words(folder)
    return load_tokenizer(folder)


TEXTS = [
    " Ask not what your country can do for you.",
    ' "Quoted" (in brackets), then: 3.5 percent! ¿Qué?',
    " l'été naïve -- dash - ... end",
    "不要问，你的国家。能为你做什么？",
    " \ufffd odd \U0001f600 faces\U0001f600.",
    " ",
    "word",
]


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_words_are_those_of_transformers(tokenizer: Tokenizer, language: str) -> None:
    assert {tokenization_whisper.LANGUAGES[code] for code in UNSPACED} == {
        "chinese", "japanese", "thai", "lao", "myanmar", "cantonese"
    }  # fmt: skip
    rng = np.random.default_rng(0)
    token_lists = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    # Tokens of single bytes put together at random: characters that are broken in all ways.
    token_lists += [rng.integers(8, 512, 12).tolist() for _ in range(60)]
    token_lists += [tokenizer.encode(TEXTS[3], add_special_tokens=False)[:-1], []]
    for tokens in token_lists:
        texts, _, expected = tokenization_whisper._combine_tokens_into_words(
            HFTokenizer(tokenizer), tokens, language
        )
        grouped = group_words(tokens, tokenizer.decode, spaced=language == "english")
        assert [text for text, _, _ in grouped] == texts
        assert [list(range(first, end)) for _, first, end in grouped] == expected
