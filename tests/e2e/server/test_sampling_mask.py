"""The tokens that each token was drawn from, for training that replays how it was sampled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modulm import LLM, EngineConfig
from modulm.errors import ConfigError
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import Live, serve_in_thread

FLAGS = {"device": "cpu", "max_model_len": 64, "return_sampling_mask": True}


@pytest.fixture(scope="module")
def live(tiny_folder: Path) -> Iterator[Live]:
    more = {"logprobs_mode": "processed_logprobs", "max_logprobs": -1}
    config = EngineConfig.from_keywords(
        model=str(tiny_folder), disable_frontend_multiprocessing=True, **FLAGS, **more
    )
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, config) as server:
            yield server
    finally:
        engine.shutdown()


def ask(live: Live, sampling: dict[str, Any], **more: Any) -> Any:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"seed": 3, "ignore_eos": True, **sampling}}
    with live.client() as http:
        return http.post("/inference/v1/generate", json={**body, **more})


def test_masks_are_what_top_k_top_p_and_min_p_leave(live: Live) -> None:
    whole = ask(live, {"max_tokens": 1, "top_k": 512, "logprobs": -1}).json()["choices"][0]
    assert len(whole["sampling_mask"][0]) == 512
    best = whole["logprobs"]["content"][0]["top_logprobs"]
    by_id = {entry["token_id"]: entry["logprob"] for entry in best}
    order = sorted(by_id, key=lambda token: -by_id[token])
    kept = [token for token in order if by_id[token] >= by_id[order[0]] + np.log(0.3)][:60]
    shares = np.exp([by_id[token] for token in kept])
    shares /= shares.sum()
    kept = kept[: int((np.cumsum(shares) - shares < 0.8).sum())]
    assert 1 < len(kept) < 60
    filters = {"max_tokens": 4, "top_k": 60, "top_p": 0.8, "min_p": 0.3, "logprobs": 1}
    choice = ask(live, filters).json()["choices"][0]
    assert choice["sampling_mask"][0] == kept
    assert len(choice["sampling_mask"]) == 4
    for token, mask, entry in zip(
        choice["token_ids"], choice["sampling_mask"], choice["logprobs"]["content"], strict=True
    ):
        assert token in mask
        assert len(entry["top_logprobs"]) <= 2
    streamed = ask(live, filters, stream=True).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in streamed if line.startswith("data: {")]
    masks = [
        mask for chunk in chunks for each in chunk["choices"] for mask in each["sampling_mask"]
    ]
    assert masks == choice["sampling_mask"]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": 0, "top_k": 5}, "temperature"),
        ({}, "top_k"),
        ({"top_k": 5, "logprob_token_ids": [1], "logprobs": 0}, "logprob_token_ids"),
    ],
)
def test_masks_are_bounded(live: Live, sampling: dict[str, Any], field: str) -> None:
    answer = ask(live, sampling)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_masks_need_processed_logprobs(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="needs --logprobs-mode processed_logprobs"):
        LLM(str(tiny_folder), **FLAGS)
