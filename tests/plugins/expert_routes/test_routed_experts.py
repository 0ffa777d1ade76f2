"""Routed experts: those of transformers, however a sequence was computed, and replayed.

One engine serves most tests: with chunks, prefix hits and preemption, offline and over HTTP.
"""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from attrs import frozen
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from modulm import LLM, AsyncLLM, SamplingParams
from modulm.contracts.outputs import CompletionOutput, RequestOutput
from modulm.contracts.sampling import OutputKind
from modulm.errors import ConfigError, RequestError
from modulm.testing.checkpoints import make_tiny
from modulm_expert_routes import chosen_experts
from modulm_expert_routes.requests import routes_of
from modulm_server.app import create_app
from modulm_weights_shared_memory import SharedWeights

LAYERS, EXPERTS, TOP_K = 3, 16, 3
FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 64,
    "cpu_threads": 1, "enable_return_routed_experts": True,
}  # fmt: skip
#: Prompts in chunks; 14 blocks of 16 tokens for four sequences of 68.
SERVED: dict[str, Any] = {
    **FLAGS, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 15,
    "disable_frontend_multiprocessing": True, "served_model_name": ("M",),
    "weight_transfer_config": {"backend": "shared_memory"},
}  # fmt: skip
PROMPT = list(range(5, 49))
PARAMS = SamplingParams(
    temperature=0, max_tokens=24, ignore_eos=True, logprobs=0, output_kind=OutputKind.FINAL_ONLY
)


class Oracle:
    """The model in transformers, whose routers may be told which experts to choose."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.chosen: list[torch.Tensor] = []
        self.given: torch.Tensor | None = None
        for layer, block in enumerate(self.model.model.layers):
            block.mlp.gate.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Any:
        def hook(gate: Any, arguments: Any, result: Any) -> Any:
            logits, weights, ids = result
            if self.given is not None:
                ids = self.given[:, layer]
                weights = F.softmax(logits, dtype=torch.float, dim=-1).gather(-1, ids)
                weights = weights / weights.sum(-1, keepdim=True)
            self.chosen.append(ids)
            return logits, weights, ids

        return hook

    @torch.no_grad()
    def run(
        self, tokens: Sequence[int], given: np.ndarray | None = None
    ) -> tuple[np.ndarray, torch.Tensor]:
        """Return the experts [tokens, layers, top_k], and log probabilities of each next token."""
        self.given = None if given is None else torch.from_numpy(given.astype(np.int64))
        self.chosen = []
        row = torch.tensor(tokens)
        logits = self.model(row[None]).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0]
        return torch.stack(self.chosen, dim=1).numpy(), logprobs


def sets(routes: np.ndarray) -> np.ndarray:
    """Routes without the order of a token's experts."""
    return np.sort(routes.astype(np.int64), axis=-1)


def sampled(output: CompletionOutput) -> torch.Tensor:
    """Log probabilities of the generated tokens."""
    entries = zip(output.token_ids, output.logprobs or (), strict=True)
    return torch.tensor([position[token].logprob for token, position in entries])


def scored(output: RequestOutput) -> torch.Tensor:
    """Log probabilities of the prompt's tokens but the first."""
    tokens = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
    return torch.tensor([position[token].logprob for token, position in tokens if position])


@frozen
class Engine:
    llm: AsyncLLM
    runner: asyncio.Runner

    def generate(self, *requests: tuple[Sequence[int], SamplingParams]) -> list[RequestOutput]:
        async def one(number: int, tokens: Sequence[int], params: SamplingParams) -> RequestOutput:
            prompt = {"prompt_token_ids": list(tokens)}
            outputs = self.llm.generate(prompt, params, f"{id(requests)}-{number}")
            return [output async for output in outputs][-1]

        async def all_of_them() -> list[RequestOutput]:
            return await asyncio.gather(*(one(i, *each) for i, each in enumerate(requests)))

        return self.runner.run(all_of_them())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        tmp_path_factory.mktemp("models") / "old", "Qwen3MoeForCausalLM", seed=1,
        num_hidden_layers=LAYERS, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        decoder_sparse_step=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with asyncio.Runner() as runner:
        made = Engine(AsyncLLM(str(folder), **SERVED), runner)
        yield made
        made.llm.shutdown()


@pytest.fixture(scope="module")
def first(engine: Engine) -> CompletionOutput:
    (output,) = engine.generate((PROMPT, PARAMS))
    return output.outputs[0]


def replay(routes: np.ndarray | str, start: int = 0, **changes: Any) -> SamplingParams:
    arguments = {"routed_experts": routes, "routed_experts_prompt_start": start}
    return PARAMS.with_(extra_args=arguments, **changes)


def test_experts_are_those_of_transformers(first: CompletionOutput, oracle: Oracle) -> None:
    routes, logprobs = oracle.run([*PROMPT, *first.token_ids])
    assert chosen_experts(first).dtype == np.uint8
    assert np.array_equal(sets(chosen_experts(first)), sets(routes[:-1]))
    assert (sampled(first) - logprobs[len(PROMPT) - 1 :]).abs().max() < 1e-4
    assert len(np.unique(routes)) > EXPERTS // 2


def test_cached_and_preempted_sequences_have_them_too(
    engine: Engine, first: CompletionOutput
) -> None:
    choices = PARAMS.with_(n=2)
    again, beside, others = engine.generate(
        (PROMPT, PARAMS),
        (PROMPT, PARAMS.with_(extra_args={"routed_experts_prompt_start": len(PROMPT) - 4})),
        ([7, *PROMPT[1:]], choices),
    )
    assert again.num_cached_tokens
    assert np.array_equal(chosen_experts(again.outputs[0]), chosen_experts(first))
    rest = chosen_experts(beside.outputs[0])
    assert np.array_equal(rest, chosen_experts(first)[len(PROMPT) - 4 :])
    (alone,) = engine.generate(([7, *PROMPT[1:]], PARAMS))
    for choice in others.outputs:
        assert chosen_experts(choice).shape == (len(PROMPT) + 23, LAYERS, TOP_K)
        assert np.array_equal(chosen_experts(choice), chosen_experts(alone.outputs[0]))


def test_replayed_experts_give_the_same_log_probabilities(
    engine: Engine, first: CompletionOutput, folder: Path, tmp_path: Path
) -> None:
    """As generated, and, after an update that changes the routing, as a trainer computes them."""
    tokens, routes = [*PROMPT, *first.token_ids], chosen_experts(first)
    again, score = replay(routes), replay(routes, max_tokens=1, prompt_logprobs=0)
    same, whole = engine.generate((PROMPT, again), (tokens, score))
    assert same.outputs[0].token_ids == first.token_ids
    assert torch.equal(sampled(same.outputs[0]), sampled(first))
    assert (scored(whole)[len(PROMPT) - 1 :] - sampled(first)).abs().max() < 1e-5

    old = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    new = {
        name: value + 0.02 * value.std() * torch.randn(value.shape, generator=generator)
        for name, value in old.items()
    }

    async def update(tensors: dict[str, torch.Tensor]) -> None:
        with SharedWeights(tensors) as shared:
            await engine.llm.start_weight_update()
            await engine.llm.update_weights({"update_info": shared.info})
            await engine.llm.finish_weight_update()

    engine.runner.run(engine.llm.init_weight_transfer_engine())
    engine.runner.run(update(new))
    shutil.copytree(folder, tmp_path / "new")
    save_file(new, tmp_path / "new" / "model.safetensors")
    oracle = Oracle(tmp_path / "new")
    free, replayed = engine.generate((tokens, score.with_(extra_args=None)), (tokens, score))
    chosen, own = oracle.run(tokens)
    changed = (sets(chosen[:-1]) != sets(routes)).any(-1)
    assert changed.any(), "the update was to change the routing"
    assert np.array_equal(sets(chosen_experts(free.outputs[0])), sets(chosen))
    assert (scored(free) - own).abs().max() < 1e-4
    _, forced = oracle.run(tokens, np.concatenate([routes, routes[-1:]]))
    assert (scored(replayed) - forced).abs().max() < 1e-4
    assert (forced - own).abs().max() > 1e-3
    assert np.array_equal(chosen_experts(replayed.outputs[0])[:-1], routes)
    engine.runner.run(update(old))
    (back,) = engine.generate((PROMPT, PARAMS))
    assert np.array_equal(chosen_experts(back.outputs[0]), routes)


def test_over_http(engine: Engine, first: CompletionOutput) -> None:
    """In vLLM's form: a .npy file in base64, at the end of a stream of /inference/v1/generate."""
    served = create_app(engine.llm, engine.llm.info.config)
    transport = httpx.ASGITransport(app=served.app)
    common = {"model": "M", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    sampling = {name: value for name, value in common.items() if name != "model"}

    def read(choice: Mapping[str, Any]) -> np.ndarray:
        return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))

    async def call() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:

            async def post(path: str, **body: Any) -> Any:
                answer = await http.post(path, json=body)
                return answer.status_code, answer.json()

            _, whole = await post("/v1/completions", prompt=PROMPT, **common)
            encoded = whole["choices"][0]["routed_experts"]
            assert np.array_equal(read(whole["choices"][0]), chosen_experts(first))
            _, given = await post(
                "/v1/completions", prompt=PROMPT, routed_experts=encoded, n=2,
                routed_experts_prompt_start=0, **common,
            )  # fmt: skip
            assert [choice["routed_experts"] for choice in given["choices"]] == [encoded] * 2
            _, chat = await post(
                "/v1/chat/completions", messages=[{"role": "user", "content": "a"}],
                routed_experts_prompt_start=2, **common,
            )  # fmt: skip
            rows = chat["usage"]["total_tokens"] - 3
            assert read(chat["choices"][0]).shape == (rows, LAYERS, TOP_K)
            body = {"token_ids": PROMPT, "sampling_params": {**sampling, "routed_experts": encoded}}
            _, tokens = await post("/inference/v1/generate", **body)
            assert tokens["choices"][0]["routed_experts"] == encoded
            answer = await http.post("/inference/v1/generate", json={**body, "stream": True})
            frames = answer.text.split("data: ")[1:-1]
            assert [index for index, frame in enumerate(frames) if "routed_experts" in frame] == [
                index for index, frame in enumerate(frames) if '"length"' in frame
            ]
            assert encoded in answer.text
            for field, value, part in (
                ("routed_experts_prompt_start", 45, "the prompt's 44 tokens"),
                ("routed_experts", "AAAA", "no .npy file"),
                ("routed_experts", encoded[:-40], "no .npy file"),
            ):
                status, refused = await post(
                    "/v1/completions", prompt=PROMPT, **{field: value}, **common
                )
                assert (status, refused["error"]["param"]) == (400, field)
                assert part in refused["error"]["message"]

    engine.runner.run(call())


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (np.zeros((1, LAYERS, 2), np.int64), r"\[tokens, 3, 3\]"),
        (np.zeros((1, LAYERS, TOP_K), np.int64), "the same expert twice"),
        (np.full((1, LAYERS, TOP_K), [0, 1, 16]), "0 to 15"),
        (np.tile(np.arange(TOP_K), (90, LAYERS, 1)), "at most 68 follow"),
        (np.zeros((1, LAYERS, TOP_K)), "must be integers"),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    engine: Engine, routes: np.ndarray, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate((PROMPT, replay(routes)))


@pytest.mark.parametrize(
    "shape", ["(9" + "9" * 12 + ",9,9)", "(1" + "0" * 30 + ",1,1)", "(-1,1,1)"]
)
def test_arrays_that_claim_any_shape_are_refused(shape: str) -> None:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    file = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + b"\0"
    params = SamplingParams(extra_args={"routed_experts": base64.b64encode(file).decode()})
    with pytest.raises(RequestError, match=r"no \.npy file"):
        routes_of(params)


#: How else a sequence is computed.
WAYS: dict[str, dict[str, Any]] = {
    "no prefix cache": {"enable_prefix_caching": False},
    "alone": {"batch_invariant": True, "kernels": "none"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "tensor parallel": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "expert parallel": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "replicas that share experts": {"data_parallel_size": 2, "enable_expert_parallel": True},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_computing(folder: Path, oracle: Oracle, way: str) -> None:
    """Choices, repeated and replayed, with ranks in processes of their own."""
    prompts = [PROMPT, [9, 8, 7] * 8]
    with asyncio.Runner() as runner:
        llm = AsyncLLM(str(folder), **FLAGS, **WAYS[way], max_num_batched_tokens=24)
        engine = Engine(llm, runner)
        for params in (PARAMS.with_(n=2), PARAMS):
            for output in engine.generate(*((prompt, params) for prompt in prompts)):
                for choice in output.outputs:
                    routes, _ = oracle.run([*output.prompt_token_ids, *choice.token_ids])
                    assert np.array_equal(sets(chosen_experts(choice)), sets(routes[:-1]))
        given = np.tile(np.array([4, 1, 15]), (len(PROMPT) + 10, LAYERS, 1))
        (output,) = engine.generate((PROMPT, replay(given)))
        answer = output.outputs[0]
        assert np.array_equal(chosen_experts(answer)[: len(given)], given)
        whole = np.concatenate([chosen_experts(answer), chosen_experts(answer)[-1:]])
        _, logprobs = oracle.run([*PROMPT, *answer.token_ids], whole)
        assert (sampled(answer) - logprobs[len(PROMPT) - 1 :]).abs().max() < 1e-4
        llm.shutdown()


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["mp", "uni"])
def test_a_stop_string_ends_them(folder: Path, backend: str) -> None:
    """Drafts behind it are dropped with their experts."""
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    prompt = {"prompt_token_ids": [9, 8, 7] * 8}
    with LLM(str(folder), **FLAGS, **drafts, distributed_executor_backend=backend) as llm:
        (whole,) = llm.generate([prompt], PARAMS, use_tqdm=False)
        text = whole.outputs[0].text
        for place in range(4, len(text) - 2, 3):
            params = PARAMS.with_(stop=[text[place : place + 2]])
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            (choice,) = output.outputs
            assert len(chosen_experts(choice)) == 24 + len(choice.token_ids) - 1


def test_what_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    dense = make_tiny(tmp_path / "dense", "Qwen3ForCausalLM")
    with pytest.raises(ConfigError, match="no routers"):
        LLM(str(dense), **FLAGS)
    with pytest.raises(ConfigError, match="KV connectors keep no routed experts"):
        LLM(str(folder), **FLAGS, kv_offloading_size=0.1)


def test_without_the_flag_requests_are_refused(folder: Path) -> None:
    flags = {**FLAGS, "enable_return_routed_experts": False}
    with LLM(str(folder), **flags) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False)
        assert chosen_experts(output.outputs[0]) is None
        start = PARAMS.with_(extra_args={"routed_experts_prompt_start": 3})
        for params in (replay(np.zeros((1, 3, 3), np.int64)), start):
            (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
            assert output.outputs[0].finish_reason == "error"
            assert "--enable-return-routed-experts" in output.outputs[0].stop_reason
