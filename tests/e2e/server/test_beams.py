"""Beam search over HTTP: transformers' beams, in OpenAI's form."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from samples import parametrize_sample

from modulm import AsyncLLM
from modulm.config import EngineConfig
from modulm.testing.engines import check_empty
from modulm_server.testing import Live, error_of, serve_in_thread

WIDTH, TOKENS = 3, 10
PROMPTS = [[5, 9, 77, 300, 12], [400, 3, 3, 60], [250] * 40]


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(
        model=str(tiny_folder),
        dtype="float32",
        cpu_threads=1,
        kv_cache_memory_bytes=1 << 24,
        disable_frontend_multiprocessing=True,
        max_model_len=256,
    )
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def live(engine: AsyncLLM) -> Iterator[Live]:
    config = EngineConfig.from_keywords(model="M", disable_uvicorn_access_log=True)
    with serve_in_thread(engine, config) as server:
        yield server


@pytest.fixture
def http(live: Live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


def expected(reference: Any, prompt: list[int], eos: Any = None, **options: Any) -> Any:
    """transformers' sequences without the prompt, and their scores."""
    generated = reference.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS, num_beams=WIDTH,
        num_return_sequences=WIDTH, eos_token_id=eos, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    sequences = [row[len(prompt) :].tolist() for row in generated.sequences]
    return sequences, generated.sequences_scores.tolist()


def ask(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "M", "use_beam_search": True, "n": WIDTH, "max_tokens": TOKENS, **fields}
    return http.post("/v1/chat/completions" if "messages" in fields else "/v1/completions",
                     json=body)  # fmt: skip


@parametrize_sample(("penalty", "stopping"), [(0.5, "never"), (1.0, False), (2.0, True)], every=3)
def test_completions_are_transformers_beams(
    http: httpx.Client, reference: Any, engine: AsyncLLM, penalty: float, stopping: bool | str
) -> None:
    options = {"length_penalty": penalty, "early_stopping": stopping}
    eos = list(engine._input_processor.eos)
    body = ask(http, prompt=PROMPTS, return_token_ids=True, logprobs=2, **options).json()
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(PROMPTS) * WIDTH))
    for index, prompt in enumerate(PROMPTS):
        beams = choices[index * WIDTH : (index + 1) * WIDTH]
        sequences, scores = expected(reference, prompt, eos, **options)
        for choice, sequence, score in zip(beams, sequences, scores, strict=True):
            ids = choice["token_ids"]
            assert ids == sequence[: len(ids)]
            chosen = choice["logprobs"]["token_logprobs"]
            assert sum(chosen) / len(ids) ** penalty == pytest.approx(score, abs=1e-3)
            assert len(choice["logprobs"]["top_logprobs"][0]) in (2, 3)
    assert body["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    assert body["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in choices)


def test_an_end_is_a_token_without_text_unless_it_is_asked_for(
    http: httpx.Client, reference: Any
) -> None:
    plain, _ = expected(reference, PROMPTS[0])
    stop = plain[0][4]
    sequences, _ = expected(reference, PROMPTS[0], eos=[stop])
    fields = {"prompt": PROMPTS[0], "ignore_eos": True, "stop_token_ids": [stop]}
    fields |= {"return_token_ids": True, "skip_special_tokens": False}
    bare = ask(http, **fields).json()["choices"]
    whole = ask(http, **fields, include_stop_str_in_output=True).json()["choices"]
    for choice, other, sequence in zip(bare, whole, sequences, strict=True):
        ids = choice["token_ids"]
        assert ids == other["token_ids"] == sequence[: len(ids)]
        ended = ids[-1] == stop
        assert choice["finish_reason"] == ("stop" if ended else "length")
        assert choice["stop_reason"] == (stop if ended else None)
        assert (
            len(other["text"]) > len(choice["text"]) if ended else other["text"] == choice["text"]
        )
    assert {"stop"} <= {choice["finish_reason"] for choice in bare}


def test_chat(http: httpx.Client, reference: Any, engine: AsyncLLM) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    body = ask(http, messages=messages, logprobs=True, top_logprobs=3, return_token_ids=True).json()
    eos = list(engine._input_processor.eos)
    sequences, scores = expected(reference, body["prompt_token_ids"], eos)
    token_ids = [choice["token_ids"] for choice in body["choices"]]
    assert token_ids == [s[: len(f)] for s, f in zip(sequences, token_ids, strict=True)]
    assert scores == sorted(scores, reverse=True)
    content = body["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(isinstance(entry["token"], str) for entry in content)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", True), ("n", 65), ("early_stopping", "often"), ("length_penalty", "long"),
        ("length_penalty", 1e300),
        ("top_p", 0.5), ("top_k", 3), ("min_p", 0.1), ("presence_penalty", 0.5),
        ("repetition_penalty", 1.1), ("stop", ["x"]), ("logit_bias", {"5": 1}), ("best_of", 5),
        ("min_tokens", 2), ("bad_words", ["x"]), ("stop_token_ids", [100_000]),
        ("logprobs", 21), ("echo", True),
    ],
)  # fmt: skip
def test_what_cannot_go_with_beams_is_named(http: httpx.Client, field: str, value: Any) -> None:
    more = {"logprobs": 1} if field == "echo" else {}
    answer = ask(http, prompt="Hello", **{field: value}, **more)
    assert (answer.status_code, error_of(answer)["param"]) == (400, field)


@pytest.mark.parametrize(("field", "value"), [("length_penalty", 2.0), ("early_stopping", True)])
def test_fields_of_beams_alone_are_refused(http: httpx.Client, field: str, value: Any) -> None:
    answer = ask(http, prompt="Hello", use_beam_search=False, **{field: value})
    assert (answer.status_code, error_of(answer)["param"]) == (400, field)


def test_neutral_values_and_seeds_are_welcome(http: httpx.Client) -> None:
    fields = {"top_p": 1, "top_k": -1, "min_p": 0, "stop": [], "seed": 3, "temperature": 0.7}
    one, other = ask(http, prompt="Hello", **fields), ask(http, prompt="Hello")
    assert one.json()["choices"] == other.json()["choices"]


def test_leaving_frees_everything(http: httpx.Client, live: Live, engine: AsyncLLM) -> None:
    body = {
        "model": "M", "prompt": "Hello", "use_beam_search": True, "n": 32, "max_tokens": 200,
        "ignore_eos": True,
    }  # fmt: skip
    live.abandon("/v1/completions", json=body)
    deadline = time.monotonic() + 300
    while engine.active and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engine.active == 0
    inside = engine._core.core.loop
    inside.call(lambda: check_empty(inside)).result(300)
    assert ask(http, prompt="Hello").status_code == 200
