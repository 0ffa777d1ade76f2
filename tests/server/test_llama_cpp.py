"""llama.cpp's API: with a client of that world, with the requests of its documentation, and on a
real model where grammars, probabilities and penalties have to be right."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from llamacpp_client import LlamaCppClient, LlamaCppServerAddress
from tokenizers import Tokenizer as Core

import modulm
from modulm.config.sources import keywords
from modulm.contracts.sampling import RowView, SamplingParams
from modulm.errors import RequestError
from modulm.testing.checkpoints import make_tokenizer
from modulm_logits_recent_penalties import RecentPenalties
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.scripted import ScriptedEngine
from modulm_server.testing import Live, serve_in_thread
from modulm_tokenizers.tokenizer import load_tokenizer


def client_of(live: Live) -> LlamaCppClient:
    where = urlsplit(live.url)
    return LlamaCppClient([LlamaCppServerAddress(where.hostname, where.port)])


@pytest.fixture(scope="module")
def real() -> Iterator[Live]:
    """The embedded model behind a real server."""
    config = keywords(model="demo", max_model_len=256, max_num_seqs=4,
                      disable_frontend_multiprocessing=True).config  # fmt: skip
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, config) as live:
            yield live
    finally:
        engine.shutdown()


@pytest.fixture
def post(live: Live):
    """POST to the scripted server: status and body."""
    with live.client() as http:

        def ask(path: str, **body: Any) -> Any:
            answer = http.post(path, json=body)
            return (
                answer.json() if answer.status_code == 200 else (answer.status_code, answer.json())
            )

        yield ask


# A client of that world.


def test_the_client_gets_whole_answers(live: Live) -> None:
    client = client_of(live)
    completion = client.new_completion("Hello", n_predict=20)
    assert completion.content == "Hello there."
    assert (completion.stop_type, completion.truncated) == ("eos", False)
    assert completion.tokens_evaluated > 0
    assert completion.tokens_predicted > 0
    assert client.completion("stop at END", stop=["END"])["stop_type"] == "word"


def test_the_client_gets_streams(live: Live) -> None:
    chunks = list(client_of(live).new_stream_completion("Hello"))
    assert "".join(chunk.content for chunk in chunks) == "Hello there."
    assert [chunk.stop for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].stop_type == "eos"
    assert chunks[-1].tokens_cached is not None


def test_the_client_gets_streams_on_an_event_loop(live: Live) -> None:
    async def read() -> bytes:
        result = client_of(live).async_completion("Hello", stream=True)
        return b"".join([piece async for piece in result])

    lines = asyncio.run(read()).decode().split("\n\n")
    rows = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(part["content"] for part in rows) == "Hello there."
    assert rows[-1]["timings"]["predicted_n"] == rows[-1]["tokens_predicted"] > 0


# The requests of its documentation.


def test_a_completion(post) -> None:
    body = post("/completion", prompt="Building a website can be done in 10 simple steps:",
                n_predict=128, return_tokens=True)  # fmt: skip
    assert body["content"] == "Hello there."
    assert len(body["tokens"]) == body["tokens_predicted"]
    assert body["model"] == "M"
    assert body["stop"] is True
    assert body["prompt"].startswith("Building")
    assert body["generation_settings"]["n_predict"] == 128
    assert body["generation_settings"]["temperature"] == 0.8
    assert set(body["timings"]) >= {"prompt_n", "predicted_per_second"}


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("hello", ["hello"]),
        ([12, 34, 56], None),
        ([12, "hello", 56], None),
        (["hello", "world"], ["hello", "world"]),
        ([[12, 34], "hello", [12, "mixed", 3]], None),
        ({"prompt_string": "hello"}, ["hello"]),
    ],
)
def test_prompts_of_each_form(post, live: Live, prompt: Any, texts: list[str] | None) -> None:
    before = len(live.engine.seen)
    body = post("/completion", prompt=prompt)
    many = body if isinstance(body, list) else [body]
    seen = [prompt_table for prompt_table, _ in live.engine.seen[before:]]
    assert len(seen) == len(many)
    assert [one["index"] for one in many] == list(range(len(many)))
    if texts is not None:
        assert [prompt_table["prompt"] for prompt_table in seen] == texts
    else:
        assert seen[0]["prompt_token_ids"][0] == 12


def test_several_completions_of_one_prompt(post) -> None:
    body = post("/completion", prompt="hello", n_cmpl=2)
    assert [one["index"] for one in body] == [0, 1]


def test_fields_of_the_answer(post) -> None:
    names = ["content", "generation_settings/n_predict", "nonsense"]
    body = post("/completion", prompt="hello", n_predict=4, response_fields=names)
    assert set(body) == {"content", "n_predict"}
    assert post("/completion", prompt="hello", n_predict=0)["content"] == ""


def test_settings_reach_the_engine(post, live: Live) -> None:
    post("/completion", prompt="hello", temperature=0.3, top_k=7, top_p=0.5, min_p=0.2, seed=4,
         stop=["x"], ignore_eos=True, logit_bias=[[15, 1.5], [16, False], ["Hello", -1]],
         n_probs=3, repeat_penalty=1.2, repeat_last_n=8, presence_penalty=0.5,
         cache_prompt=False)  # fmt: skip
    params = live.engine.seen[-1][1]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.3, 7, 0.5, 0.2)
    assert (params.seed, params.stop, params.ignore_eos, params.logprobs) == (4, ("x",), True, 3)
    assert params.logit_bias[15] == 1.5
    assert params.logit_bias[16] == -100
    assert -1 in params.logit_bias.values()
    assert params.extra_args["recent_penalties"] == {
        "last_n": 8, "repeat": 1.2, "presence": 0.5, "frequency": 0.0,
    }  # fmt: skip
    assert live.engine.salts[-1] is not None
    post("/completion", prompt="hello", samplers=["top_k"], temperature=0.1, top_k=3)
    params = live.engine.seen[-1][1]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1, 3, 1, 0)
    assert params.max_tokens is not None
    assert live.engine.salts[-1] is None


def test_samplers_of_packages_get_their_settings(post, live: Live) -> None:
    post("/completion", prompt="hello", dry_multiplier=0.8, dry_base=2, xtc_probability=0.5,
         typical_p=1.0, dynatemp_range=0.3)  # fmt: skip
    assert live.engine.seen[-1][1].extra_args == {
        "dry_multiplier": 0.8, "dry_base": 2, "xtc_probability": 0.5, "dynatemp_range": 0.3,
    }  # fmt: skip
    post("/completion", prompt="hello", dry_multiplier=0.8, typical_p=0.5, samplers=["typical_p"])
    assert live.engine.seen[-1][1].extra_args == {"typical_p": 0.5}
    post("/completion", prompt="hello", mirostat=2, mirostat_tau=3, typical_p=0.5, top_k=5)
    params = live.engine.seen[-1][1]
    assert params.extra_args == {"mirostat": 2, "mirostat_tau": 3}
    assert (params.top_k, params.top_p, params.min_p) == (0, 1, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_keep", 3), ("n_indent", 4),
        ("t_max_predict_ms", 100), ("post_sampling_probs", True), ("samplers", ["tfs_z"]),
        ("logit_bias", "a"), ("id_slot", 9999), ("lora", [{"id": 0, "scale": 0.5}]),
        ("n_probs", 1000), ("json_schema", "text"), ("n_predict", "many"), ("prompt", [1, {}]),
        ("prompt", []), ("prompt", [1.5]),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_by_its_name(post, field: str, value: Any) -> None:
    status, body = post("/completion", **{"prompt": "hello", field: value})
    assert status == 400
    assert body["error"]["code"] == 400
    assert body["error"]["type"] == "invalid_request_error"
    assert field in body["error"]["message"]


def test_neutral_settings_of_other_samplers_are_taken(post) -> None:
    names = ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
    body = post("/completion", prompt="hello", mirostat=0, typical_p=1.0, dynatemp_range=0,
                dry_multiplier=0, xtc_probability=0, n_keep=5, mirostat_tau=5.0, id_slot=-1,
                samplers=names)  # fmt: skip
    assert body["content"] == "Hello there."


def test_a_prompt_that_is_too_long(post) -> None:
    status, body = post("/completion", prompt=list(range(5)) * 100)
    assert status == 400
    assert body["error"]["type"] == "exceed_context_size_error"


def test_a_stream_that_fails_says_so(live: Live) -> None:
    with live.client() as http:
        answer = http.post("/completion", json={"prompt": "fail late", "stream": True})
    last = json.loads(answer.text.rstrip().rpartition("\n")[2].removeprefix("data: "))
    assert last["error"]["code"] == 500


def test_streams_of_several_prompts_and_progress(live: Live) -> None:
    body = {"prompt": ["hello", "world"], "stream": True, "return_progress": True,
            "timings_per_token": True}  # fmt: skip
    with live.client() as http:
        text = http.post("/completion", json=body).text
    parts = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    for index in (0, 1):
        own_parts = [part for part in parts if part["index"] == index]
        assert "".join(part["content"] for part in own_parts) == "Hello there."
        assert (
            own_parts[0]["prompt_progress"]["processed"]
            == own_parts[0]["prompt_progress"]["total"]
            > 0
        )
        assert own_parts[-1]["stop"] is True
        assert all("timings" in part for part in own_parts)


def test_tokens_in_both_dialects(post) -> None:
    ids = post("/tokenize", content="Hello été 你好")["tokens"]
    assert ids == post("/tokenize", prompt="Hello été 你好", add_special_tokens=False)["tokens"]
    assert post("/detokenize", tokens=ids)["content"] == "Hello été 你好"
    pieces = post("/tokenize", content="Hello été 你好", with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    texts = [piece["piece"] for piece in pieces]
    raw = b"".join(bytes(one) if isinstance(one, list) else one.encode() for one in texts)
    assert raw.decode() == "Hello été 你好"
    assert any(isinstance(one, list) for one in texts)
    status, _ = post("/tokenize", content="a", prompt="b")
    assert status == 400


def test_what_the_server_tells(live: Live) -> None:
    with live.client() as http:
        props = http.get("/props").json()
        slots = http.get("/slots?fail_on_no_slot=1").json()
        assert http.get("/lora-adapters").json() == []
        assert http.get("/health").json() == {"status": "ok"}
        for path in ("/props", "/slots/0?action=save", "/lora-adapters"):
            refused = http.post(path, json={})
            assert refused.status_code == 501
            assert refused.json()["error"]["type"] == "not_supported_error"
    assert props["total_slots"] == len(slots) > 0
    assert props["default_generation_settings"]["n_ctx"] == 256
    assert props["default_generation_settings"]["params"]["top_k"] == 40
    assert props["build_info"] == f"modulm {modulm.__version__}"
    assert "<|im_start|>" in props["chat_template"]
    assert slots[0] == {"id": 0, "id_task": -1, "n_ctx": 256, "speculative": False,
                        "is_processing": False}  # fmt: skip


def test_a_conversation_as_text(post) -> None:
    body = post("/apply-template", messages=[{"role": "user", "content": "Hi"}])
    assert "Hi" in body["prompt"]
    assert body["prompt"].rstrip().endswith("assistant")


def test_a_model_without_tokens_for_a_gap(post) -> None:
    status, body = post("/infill", input_prefix="def f(", input_suffix="):")
    assert status == 501
    assert body["error"]["type"] == "not_supported_error"
    assert "/completion" in body["error"]["message"]


def with_tokens(folder: Path, *names: str) -> ScriptedEngine:
    """A scripted engine whose vocabulary has some more tokens."""
    core = Core.from_file(str(make_tokenizer(folder, vocab=512) / "tokenizer.json"))
    core.add_special_tokens(list(names))
    core.save(str(folder / "tokenizer.json"))
    return ScriptedEngine(load_tokenizer(folder))


@pytest.mark.parametrize("repository", [True, False])
def test_a_gap_is_filled(tmp_path: Path, repository: bool) -> None:
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    engine = with_tokens(
        tmp_path, *names, *(("<|repo_name|>", "<|file_sep|>") if repository else ())
    )
    body = {"input_prefix": "def f(", "input_suffix": "):\n", "prompt": "a",
            "input_extra": [{"filename": "a.py", "text": "A = 1"}]}  # fmt: skip
    with serve_in_thread(engine, engine.info.config) as live, live.client() as http:
        assert http.post("/infill", json=body).json()["content"] == "Hello there."
        wrong = http.post("/infill", json={"input_extra": [{"text": 5}]})
    assert wrong.json()["error"]["param"] == "input_extra"
    text = engine.tokenizer.decode(list(engine.seen[0][0]["prompt_token_ids"]), False)
    gap = "<|fim_prefix|>def f(<|fim_suffix|>):\n<|fim_middle|>a"
    files = "<|repo_name|>myproject\n<|file_sep|>a.py\nA = 1\n<|file_sep|>filename\n"
    assert text == (files if repository else "A = 1") + gap


# On a real model.


def test_grammars_hold(real: Live) -> None:
    with real.client(timeout=300) as http:
        answer = http.post("/completion", json={"prompt": "Is it fine?", "n_predict": 8,
                                                "grammar": 'root ::= "yes" | "no"'})  # fmt: skip
        assert answer.json()["content"] in ("yes", "no")
        schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"],
                  "additionalProperties": False}  # fmt: skip
        answer = http.post("/completion", json={"prompt": "One", "json_schema": schema})
        assert json.loads(answer.json()["content"])["a"] in ("x", "y")
        wrong = http.post("/completion", json={"prompt": "One", "grammar": "root ::= ("})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "grammar"


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities_are_the_models(real: Live, stream: bool) -> None:
    body = {"prompt": "The capital of France is", "n_predict": 3, "n_probs": 4, "temperature": 0,
            "stream": stream, "ignore_eos": True}  # fmt: skip
    with real.client(timeout=300) as http:
        answer = http.post("/completion", json=body)
        if stream:
            lines = [json.loads(x.removeprefix("data: ")) for x in answer.text.split("\n\n") if x]
            probabilities = [
                one for part in lines for one in part.get("completion_probabilities", ())
            ]
        else:
            probabilities = answer.json()["completion_probabilities"]
        params = {"model": "demo", "prompt": body["prompt"], "max_tokens": 3, "logprobs": 4,
                  "temperature": 0, "ignore_eos": True}  # fmt: skip
        reference = http.post("/v1/completions", json=params).json()["choices"][0]["logprobs"]
    assert [one["token"] for one in probabilities] == reference["tokens"]
    for one, logprob in zip(probabilities, reference["token_logprobs"], strict=True):
        assert math.isclose(one["logprob"], logprob, abs_tol=1e-4)
        assert len(one["top_logprobs"]) == 4
        assert one["top_logprobs"][0]["id"] == one["id"]
        assert bytes(one["bytes"]).decode() == one["token"]


def test_penalties_change_what_is_said(real: Live) -> None:
    body = {"prompt": "ha ha ha ha ha ha ha ha ha", "n_predict": 24, "temperature": 0,
            "return_tokens": True, "ignore_eos": True}  # fmt: skip
    with real.client(timeout=300) as http:
        plain = http.post("/completion", json=body).json()["tokens"]
        penalized = http.post("/completion", json={**body, "repeat_penalty": 5.0,
                                              "repeat_last_n": 4}).json()["tokens"]  # fmt: skip
        off = http.post("/completion", json={**body, "repeat_penalty": 5.0,
                                             "repeat_last_n": 0}).json()["tokens"]  # fmt: skip
    assert off == plain
    assert penalized != plain


def test_figures_of_the_prompt_cache(real: Live) -> None:
    body = {"prompt": "One two three four five six seven eight nine ten " * 8, "n_predict": 2}
    with real.client(timeout=300) as http:
        http.post("/completion", json=body)
        again = http.post("/completion", json=body).json()["timings"]
        apart = http.post("/completion", json={**body, "cache_prompt": False}).json()["timings"]
    assert again["cache_n"] > 0
    assert apart["cache_n"] == 0
    assert again["cache_n"] + again["prompt_n"] == apart["prompt_n"]


# The processor.


def test_penalties_count_the_last_tokens() -> None:
    """Against llama.cpp's definition, written out."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, generator=generator)
    prompt, output = np.array([1, 2, 3, 3, 5]), [3, 7]
    for last_n in (-1, 1, 3, 5, 50):
        table = {"last_n": last_n, "repeat": 1.3, "presence": 0.2, "frequency": 0.1}
        params = SamplingParams(extra_args={"recent_penalties": table})
        processor = RecentPenalties(20, torch.device("cpu"))
        view = RowView(0, params, prompt, output)
        assert processor.admit(view)
        known = [*prompt.tolist(), *output]
        expected = logits.clone()
        for token, count in Counter(known if last_n < 0 else known[-last_n:]).items():
            value = expected[token]
            value = value / 1.3 if value > 0 else value * 1.3
            expected[token] = value - 0.2 - 0.1 * count
        assert torch.allclose(processor.apply_row(view, logits.clone()), expected)
        processor.release(0)


@pytest.mark.parametrize("table", [5, {"repeat": 0}, {"last_n": -2}, {"repeat": "x"}, {"many": 1}])
def test_wrong_penalties_are_refused(table: Any) -> None:
    with pytest.raises(RequestError, match="recent_penalties"):
        RecentPenalties.validate(SamplingParams(extra_args={"recent_penalties": table}))


def test_rows_without_them_are_not_looked_at() -> None:
    processor = RecentPenalties(20, torch.device("cpu"))
    assert not processor.admit(RowView(0, SamplingParams(extra_args={"x": 1}), [1], []))
