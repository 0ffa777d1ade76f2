"""Prompts of embeddings from the official client to an engine in another process."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from modulm.config import EngineConfig
from modulm.testing.checkpoints import make_tiny
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import Live, serve_in_thread


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("embeds") / "tiny")


@pytest.fixture(scope="module")
def live(checkpoint: Path) -> Iterator[Live]:
    config = EngineConfig.from_keywords(
        model=str(checkpoint), served_model_name=("M",), dtype="float32", device="cpu",
        enable_prompt_embeds=True, enable_prompt_tokens_details=True, max_model_len=256,
        disable_frontend_multiprocessing=False,
    )  # fmt: skip
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, config) as live:
            yield live
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def table(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def coded(table: Any, ids: list[int]) -> str:
    file = io.BytesIO()
    torch.save(table.get_input_embeddings()(torch.tensor(ids)).detach(), file)
    return base64.b64encode(file.getvalue()).decode()


def test_embeddings_give_what_tokens_give(live: Live, table: Any) -> None:
    ids = [(5 * index + 7) % 500 for index in range(100)]
    options: Any = {"model": "M", "max_tokens": 8, "temperature": 0}
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as client:
        plain = client.completions.create(**options, prompt=ids)
        body = {"prompt_embeds": coded(table, ids)}
        for cached in (False, True):
            answer = client.completions.create(**options, prompt="", extra_body=body)
            assert answer.choices[0].text == plain.choices[0].text
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == 100
            assert answer.usage.prompt_tokens_details is not None
            assert bool(answer.usage.prompt_tokens_details.cached_tokens) is cached


def test_parts_of_messages_give_what_their_tokens_give(live: Live, table: Any) -> None:
    options: Any = {"model": "M", "max_tokens": 8, "temperature": 0}
    extra = {"return_token_ids": True}
    ids = live.engine.tokenizer.encode("The capital of France", add_special_tokens=False)
    content: Any = [{"type": "prompt_embeds", "data": coded(table, ids)}]
    content.append({"type": "text", "text": "is"})
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as client:
        answer: Any = client.chat.completions.create(
            **options, messages=[{"role": "user", "content": content}], extra_body=extra
        )
        prompt = answer.prompt_token_ids
        first = prompt.index(0)
        assert prompt.count(0) == len(ids)
        prompt[first : first + len(ids)] = ids
        plain: Any = client.completions.create(**options, prompt=prompt, extra_body=extra)
    assert answer.choices[0].token_ids == plain.choices[0].token_ids
