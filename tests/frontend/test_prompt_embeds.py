"""Prompts of embeddings: what a caller may give, and what becomes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from modulm.config import EngineConfig
from modulm.contracts.engine_info import EngineInfo
from modulm.contracts.media import DIGEST, EMBEDS
from modulm.contracts.sampling import PoolingParams, SamplingParams
from modulm.errors import RequestError
from modulm.plugins import manager
from modulm_frontend.input_processor import InputProcessor


def processor(**flags: Any) -> InputProcessor:
    info = EngineInfo(
        config=EngineConfig.from_keywords(**{"enable_prompt_embeds": True, **flags}),
        models=("M",), path="", architecture="", max_model_len=32, vocabulary=100, hidden=8,
        dtype="float32", eos=(), tasks=("generate", "embed"),
    )  # fmt: skip
    return InputProcessor(info, None, manager.current())


def process(prompt: Any, **params: Any) -> Any:
    return processor().process(prompt, SamplingParams(max_tokens=4, **params), "r").requests[0]


def numbers(tokens: int = 6, hidden: int = 8) -> torch.Tensor:
    return torch.arange(tokens * hidden, dtype=torch.float32).view(tokens, hidden) / 7


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_is_a_prompt(kind: torch.dtype) -> None:
    tensor = numbers().to(kind)
    for embeds in (tensor, tensor[None], tensor.clone().requires_grad_()):
        request = process({"prompt_embeds": embeds, "cache_salt": "s"})
        assert request.prompt.tolist() == [0] * 6
        assert request.salt == "s"
        (item,) = request.media
        assert (item.kind, item.start, item.length, item.encoded) == (EMBEDS, 0, 6, False)
        assert item.tensors["embeds"].dtype == np.float32
        np.testing.assert_array_equal(item.tensors["embeds"], tensor.float().numpy())
        assert len(item.hash) == 6 * DIGEST
    array = process({"prompt_embeds": tensor.float().numpy()})
    assert array.media[0].hash == item.hash, "content alone names it"
    strided = process({"prompt_embeds": tensor.float().t().contiguous().t()})
    assert strided.media[0].hash == item.hash


def test_tokens_and_embeddings_together() -> None:
    prompt = {
        "prompt_token_ids": [5, 9, 9, 6, 9, 9],
        "prompt_is_token_ids": [True, False, False, True, False, False],
        "prompt_embeds": numbers(),
    }
    request = process(prompt)
    assert request.prompt.tolist() == [5, 0, 0, 6, 0, 0]
    assert [(item.start, item.length) for item in request.media] == [(1, 2), (4, 2)]
    np.testing.assert_array_equal(request.media[1].tensors["embeds"], numbers()[4:].numpy())


def test_every_sequence_has_them_and_beams_too() -> None:
    prompt = {"prompt_embeds": numbers()}
    pending = processor().process(prompt, SamplingParams(n=3, max_tokens=4), "r")
    assert [len(request.media) for request in pending.requests] == [1, 1, 1]


SPARSE = torch.sparse_coo_tensor(
    torch.tensor([[0], [0]]), torch.tensor([1.0]), (6, 8), check_invariants=True
)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ({"prompt_embeds": numbers(hidden=7)}, "prompt_embeds"),
        ({"prompt_embeds": numbers(tokens=33)}, "prompt_embeds"),
        ({"prompt_embeds": numbers()[:0]}, "prompt_embeds"),
        ({"prompt_embeds": numbers()[0]}, "prompt_embeds"),
        ({"prompt_embeds": numbers().long()}, "prompt_embeds"),
        ({"prompt_embeds": numbers().double()}, "prompt_embeds"),
        ({"prompt_embeds": numbers() * torch.nan}, "prompt_embeds"),
        ({"prompt_embeds": numbers() / 0}, "prompt_embeds"),
        ({"prompt_embeds": SPARSE}, "prompt_embeds"),
        ({"prompt_embeds": [[1.0] * 8]}, "prompt_embeds"),
        ({"prompt_embeds": None}, "prompt_embeds"),
        ({"prompt_embeds": ([1.0],), "prompt_token_ids": [0]}, "prompt_embeds"),
        ({"prompt_embeds": numbers(), "prompt": "text"}, "prompt_embeds"),
        ({"prompt_embeds": numbers(), "prompt_token_ids": [1] * 6}, "prompt_embeds"),
        (
            {
                "prompt_embeds": numbers(),
                "prompt_token_ids": [1] * 6,
                "prompt_is_token_ids": [1] * 6,
            },
            "prompt_embeds",
        ),
    ],
)
def test_what_is_no_prompt(prompt: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        process(prompt)
    assert caught.value.param == param


def test_what_cannot_be_asked_of_embeddings() -> None:
    prompt = {"prompt_embeds": numbers()}
    for params, param in (
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"n": 2**21}, "n"),
    ):
        with pytest.raises(RequestError) as caught:
            process(prompt, **params)
        assert caught.value.param == param
    pooled = PoolingParams(task="embed")
    with pytest.raises(RequestError, match="pooled"):
        processor().process(prompt, pooled, "r")
    with pytest.raises(RequestError, match="pooled"):
        processor().pooling_job(prompt, pooled)
    with pytest.raises(RequestError, match="--enable-prompt-embeds"):
        processor(enable_prompt_embeds=False).process(prompt, SamplingParams(), "r")
