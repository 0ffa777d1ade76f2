"""Prompts computed by one engine and continued by another: the answers are the same."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.samples import parametrize_sample

from modulm import LLM, AsyncLLM, SamplingParams
from modulm.contracts.requests import Request
from modulm.errors import ConfigError, RequestError
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import check_empty
from modulm_kv_peer.connector import PeerOptions, _Index
from modulm_kv_peer.wire import differing
from modulm_kv_transfer.copies import BlockCopier
from modulm_kv_transfer.runner import TransferRunner
from modulm_server.app import create_app

FLAGS: dict[str, Any] = {
    "dtype": "float32", "block_size": 32, "max_model_len": 128, "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 32, "cpu_threads": 1,
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [5 + i, 9, 40, 7] * 20} for i in range(3)]
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)
#: States after each 64 tokens, beside attention with blocks of 16.
STATES = {
    "mamba_cache_mode": "all",
    "mamba_block_size": 64,
    "max_num_batched_tokens": 128,
    "block_size": 16,
    "num_gpu_blocks_override": 64,
}
LONG = [{"prompt_token_ids": [5 + i, 9, 40, 7] * 36} for i in range(2)]
HYBRIDS = ["Qwen3NextForCausalLM", "MambaForCausalLM", "FalconH1ForCausalLM"]
ONE = PARAMS.with_(max_tokens=1)
#: Tokens of a prompt's full blocks.
STORED = 64
PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


def free_port() -> int:
    """A free port, with a free one behind it. Outgoing connections use ports above these."""
    for port in range(20_000 + os.getpid() * 10 % 10_000, 32_000, 2):
        with suppress(OSError), ExitStack() as probes:
            for number in (port, port + 1):
                probes.enter_context(socket.create_server(("127.0.0.1", number)))
            return port
    raise AssertionError("no port is free")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def model(architecture: str = "Qwen3ForCausalLM", **config: Any) -> str:
        if architecture not in made:
            folder = tmp_path_factory.mktemp("model")
            made[architecture] = str(make_tiny(folder, architecture, **config))
        return made[architecture]

    return model


def engine(model: str, role: str, port: int, options: Any = None, **flags: Any) -> LLM:
    table = {
        "kv_connector": "NixlConnector", "kv_role": role, "kv_port": port,
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 22, **(options or {})},
    }  # fmt: skip
    return LLM(model, **FLAGS | flags, kv_transfer_config=table)


def drain(llm: LLM) -> None:
    """Go on until everything beside the outputs has ended too."""
    while llm._core.loop.tick():
        pass
    check_empty(llm._core.loop)


def ask(
    llm: LLM, params: SamplingParams, transfers: list[Any], prompts: list[Any] = PROMPTS
) -> list[Any]:
    each = [params.with_(extra_args={"kv_transfer_params": table}) for table in transfers]
    outputs = llm.generate(prompts[: len(each)], each, use_tqdm=False)
    drain(llm)
    return outputs


def prefill(llm: LLM, count: int = len(PROMPTS)) -> list[Any]:
    """Send prompts as vLLM's proxies do; returns what they pass on."""
    outputs = ask(llm, PARAMS.with_(max_tokens=1), [PREFILL] * count)
    return [output.kv_transfer_params for output in outputs]


def results(outputs: list[Any]) -> list[Any]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.fixture(scope="module")
def expected(model: Callable[..., str]) -> list[Any]:
    with LLM(model(), **FLAGS) as llm:
        return results(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@contextmanager
def pair(model: str, options: Any = None, **flags: Any) -> Iterator[tuple[LLM, LLM]]:
    """A producer, and a consumer with `flags`."""
    before = set(threading.enumerate())
    with ExitStack() as stack:
        first = stack.enter_context(engine(model, "kv_producer", free_port()))
        yield first, stack.enter_context(engine(model, "kv_consumer", 1, options, **flags))
    names = {thread.name for thread in {*threading.enumerate()} - before}
    assert not [name for name in names if name.startswith("kv-")]


def test_the_proxys_way(model: Callable[..., str], expected: list[Any]) -> None:
    with pair(model()) as (first, second):
        params = prefill(first)
        for table in params:
            assert (table["do_remote_prefill"], table["do_remote_decode"]) == (True, False)
            assert (table["remote_host"], table["tp_size"]) == ("127.0.0.1", 1)
        outputs = ask(second, PARAMS, params)
        assert results(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [STORED] * 3
        assert [output.kv_transfer_params for output in outputs] == [None] * 3
        # The blocks are in the prefix cache now: nothing is fetched, whatever the address.
        again = ask(second, PARAMS, [{**params[0], "remote_port": 1}])
        assert results(again) == expected[:1]


def noted_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Tokens of steps, blocks that are saved after and while they are computed."""
    steps: list[tuple[int, int, int]] = []
    begin = TransferRunner.begin

    def noted(self: Any, plan: Any, value: Any) -> None:
        counts = [
            sum(len(save.names) for save in getattr(value, kind, ()))
            for kind in ("saves", "computing")
        ]
        steps.append((len(plan.tokens), *counts))
        begin(self, plan, value)

    monkeypatch.setattr(TransferRunner, "begin", noted)
    return steps


def test_the_rest_of_a_prompt_is_computed_in_small_steps(
    model: Callable[..., str], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another request generates."""
    with pair(model()) as (first, second):
        (table,) = prefill(first, 1)
        fetch = PARAMS.with_(extra_args={"kv_transfer_params": table})
        steps = noted_steps(monkeypatch)
        prompts = [{"prompt_token_ids": [3, 5, 8]}, PROMPTS[0]]
        outputs = second.generate(prompts, [PARAMS.with_(max_tokens=400), fetch], use_tqdm=False)
        assert results(outputs[1:]) == expected[:1]
        assert outputs[1].num_cached_tokens == STORED
    assert [tokens for tokens, *_ in steps if tokens > 2] == [3, 8, 8, 3]


def test_blocks_are_saved_in_the_step_that_fills_them(
    model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = noted_steps(monkeypatch)
    with engine(model(), "kv_producer", free_port(), max_model_len=256) as llm:
        (output,) = ask(llm, ONE, [PREFILL], [{"prompt_token_ids": [5, 9, 40] * 60}])
        assert [step for step in steps if any(step)] == [(64, 0, 2), (64, 0, 2), (52, 0, 1)]
        # The beginning of this one is in the prefix cache, but not stored.
        llm.generate([{"prompt_token_ids": [6, 9, 40] * 60}], ONE, use_tqdm=False)
        steps.clear()
        ask(llm, ONE, [PREFILL], [{"prompt_token_ids": [6, 9, 40] * 75}])
        assert [step for step in steps if any(step)] == [(64, 5, 2), (1, 0, 0)]
    assert output.kv_transfer_params["do_remote_prefill"]


def transfers(llm: LLM) -> Any:
    """The engine's runner of transfers."""
    return llm._core.loop.executor._worker._runner.parts["transfers"]


def last_attention(llm: LLM) -> Any:
    return transfers(llm)._layers[-1]


@contextmanager
def fetching(llm: LLM, port: int) -> Iterator[Any]:
    """A thread that continues the first prompt, which another engine has yet to compute."""
    table = {**self_params(port), "remote_computing": True, "tp_size": 1}
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(ask, llm, PARAMS, [table])


@pytest.mark.parametrize("shared", [True, False])
def test_layers_are_sent_while_later_ones_are_computed(
    shared: bool,
    model: Callable[..., str],
    expected: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last layer of a prompt's only step waits until the consumer has the first layer."""
    came, in_time = threading.Event(), []
    load = BlockCopier.load

    def noted(self: Any, blocks: Any, stored: Any, tensors: Any = None) -> None:
        load(self, blocks, stored, tensors)
        if tensors:
            came.set()

    monkeypatch.setattr(BlockCopier, "load", noted)
    with pair(model(), {"shared_memory": shared}) as (first, second):
        last = last_attention(first)
        last.register_forward_pre_hook(lambda *_: in_time.append(came.wait(300)))
        port = transfers(first)._mover._port
        with fetching(second, port) as future:
            prefill(first, 1)
        assert in_time == [True, True]  # steps of 64 and 16 tokens
        outputs = future.result()
        assert results(outputs) == expected[:1]
        assert outputs[0].num_cached_tokens == STORED


def test_a_step_that_fails_after_some_layers(
    model: Callable[..., str], expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for its blocks, and what other passes compute is not taken for them."""
    with pair(model()) as (first, second):
        last = last_attention(first)
        raised: list[int] = []

        def fail(*_: Any) -> None:
            if not raised:
                raised.append(1)
                raise RuntimeError("on purpose")

        last.register_forward_pre_hook(fail)
        store = transfers(first)._mover.store
        with fetching(second, transfers(first)._mover._port) as future:
            (failed,) = ask(first, ONE, [PREFILL])
            assert failed.outputs[0].finish_reason == "error"
            assert not store._filling
            outputs = future.result()
        assert results(outputs) == expected[:1]
        assert outputs[0].num_cached_tokens == 0
        assert not len(store)
        assert not store._held
        assert results(ask(second, PARAMS, prefill(first, 1))) == expected[:1]
    assert "blocks are not there" in caplog.text


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "DeepseekV3ForCausalLM"])
def test_windows_and_latent_caches(architecture: str, model: Callable[..., str]) -> None:
    with pair(model(architecture)) as (first, second):
        outputs = ask(second, PARAMS, prefill(first))
        assert [output.num_cached_tokens for output in outputs] == [STORED] * 3
        # A cached prefix has lost the blocks that left its window.
        complete = architecture != "Gemma3ForCausalLM"
        assert [table is not None for table in prefill(first)] == [complete] * 3
        first.reset_prefix_cache()
        assert results(outputs) == results(first.generate(PROMPTS, PARAMS, use_tqdm=False))


@parametrize_sample("architecture", HYBRIDS, 3)
def test_states_of_recurrent_layers(
    architecture: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = str(make_tiny(tmp_path / "model", architecture))
    flags = STATES | {"max_model_len": 256}
    with LLM(folder, **FLAGS | flags) as llm:
        expected = results(llm.generate(LONG, PARAMS, use_tqdm=False))
    port = free_port()
    with (
        engine(folder, "kv_producer", port, **flags) as first,
        engine(folder, "kv_consumer", 1, **flags) as second,
        engine(folder, "kv_consumer", 1, **flags | {"mamba_block_size": 128}) as other,
    ):
        steps = noted_steps(monkeypatch)
        params = [output.kv_transfer_params for output in ask(first, ONE, [PREFILL] * 2, LONG)]
        assert [sum(each) for each in zip(*steps, strict=True)][1:] == [0, 4]
        outputs = ask(second, PARAMS, params, LONG)
        assert results(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [128] * 2
        outputs = ask(other, PARAMS, params[:1], LONG)
        assert [output.num_cached_tokens for output in outputs] == [0]
    assert "refused: mamba_block_size is 64 where the blocks are, and 128 here" in caplog.text


@pytest.mark.exhaustive
@pytest.mark.parametrize(("here", "there"), [(2, 1), (1, 2)])
def test_other_numbers_of_ranks(here: int, there: int, model: Callable[..., str]) -> None:
    """See `test_peer_layout.py` for what every run tests."""
    port = free_port()
    with (
        engine(model(), "kv_producer", port, tensor_parallel_size=there) as first,
        engine(model(), "kv_consumer", port, tensor_parallel_size=here) as second,
    ):
        params = prefill(first)
        outputs = ask(second, PARAMS, params)
        assert [output.num_cached_tokens for output in outputs] == [STORED] * 3
        second.reset_prefix_cache()
        computed = second.generate(PROMPTS, PARAMS, use_tqdm=False)
        # The sums of two ranks are rounded in another order than those of one.
        assert [tokens for tokens, _ in results(outputs)] == [t for t, _ in results(computed)]


@pytest.mark.exhaustive
def test_two_ranks(model: Callable[..., str]) -> None:
    port = free_port()
    with engine(model(), "kv_both", port, tensor_parallel_size=2) as llm:
        params = prefill(llm)
        wanted = results(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        llm.reset_prefix_cache()
        outputs = ask(llm, PARAMS, params)
        assert results(outputs) == wanted
        assert [output.num_cached_tokens for output in outputs] == [STORED] * 3


def test_what_differs_is_refused_by_name(
    model: Callable[..., str], expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pair(model(), block_size=64) as (first, second):
        outputs = ask(second, PARAMS, prefill(first))
        assert [answer[0] for answer in results(outputs)] == [answer[0] for answer in expected]
        assert [output.num_cached_tokens for output in outputs] == [0] * 3
    assert "block_size is 32 where the blocks are, and 64 here" in caplog.text


def test_the_first_difference_has_its_name() -> None:
    here = {"model": "a", "dtype": "float32"}
    assert differing(here, dict(here)) is None
    assert str(differing(here, {**here, "dtype": "bfloat16"})).startswith("dtype is float32")
    assert str(differing(here, {})).startswith("model is a")


@contextmanager
def listener(answers: bool) -> Iterator[int]:
    """A peer that reads and says nothing, or hangs up at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    peer, _ = server.accept()
                    held.append(peer) if answers else peer.close()
            except OSError:
                return

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for peer in held:
                peer.close()


@pytest.mark.parametrize("fault", ["killed", "silent", "hangs up", "evicted"])
def test_a_bad_peer_costs_a_bounded_time(
    fault: str, model: Callable[..., str], expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        second = stack.enter_context(engine(model(), "kv_consumer", 1, {"timeout": 0.3}))
        port = free_port()
        if fault in ("silent", "hangs up"):
            port = stack.enter_context(listener(fault == "silent"))
        else:
            options = {"cpu_bytes_to_use": 1 << (22 if fault == "killed" else 17)}
            with engine(model(), "kv_producer", port, options) as first:
                prefill(first)
                if fault == "evicted":
                    outputs = ask(second, PARAMS, [self_params(port)])
        if fault != "evicted":
            outputs = ask(second, PARAMS, [self_params(port)])
        assert results(outputs) == expected[:1]
        assert outputs[0].num_cached_tokens == 0
    assert "could not be loaded and are computed" in caplog.text
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


def self_params(port: int) -> dict[str, Any]:
    return {
        **PREFILL, "do_remote_decode": False, "do_remote_prefill": True,
        "remote_host": "127.0.0.1", "remote_port": port,
    }  # fmt: skip


def test_an_aborted_load_gives_its_blocks_back(model: Callable[..., str]) -> None:
    with listener(True) as port, engine(model(), "kv_both", free_port(), {"timeout": 0.3}) as llm:
        params = PARAMS.with_(extra_args={"kv_transfer_params": self_params(port)})
        pending = llm._input_processor.process(PROMPTS[0], params, "a")
        loop = llm._core.loop
        for request in pending.requests:
            loop.submit(request)
        loop.tick()
        assert loop.scheduler.planners["transfers"]._loads
        for request in pending.requests:
            loop.abort(request.id)
        drain(llm)


@pytest.mark.parametrize(
    ("role", "table", "message"),
    [
        ("kv_consumer", PREFILL, "do_remote_decode: this engine is a kv_consumer"),
        ("kv_producer", self_params(9), "do_remote_prefill: this engine is a kv_producer"),
        ("kv_consumer", {**self_params(9), "remote_host": "10.0.0.1"}, "remote_host: 10.0.0.1"),
        ("kv_consumer", {**self_params(9), "remote_host": None}, "remote_host must be"),
        ("kv_consumer", {**self_params(9), "remote_port": True}, "remote_port must be"),
        ("kv_consumer", {"do_remote_prefill": 1}, "do_remote_prefill must be true or false"),
        ("kv_consumer", "yes", "must be an object"),
    ],
)
def test_bad_requests_name_the_field(role: str, table: Any, message: str) -> None:
    params = PARAMS.with_(extra_args={"kv_transfer_params": table})
    index = _Index(PeerOptions(kv_role=role), 1, 1)
    with pytest.raises(RequestError, match=message):
        index.check(Request(id="a", prompt=[1], params=params))


def test_engines_without_a_connector_refuse_the_field(model: Callable[..., str]) -> None:
    with LLM(model(), **FLAGS) as llm, pytest.raises(RequestError, match="kv-transfer-config"):
        ask(llm, PARAMS, [PREFILL])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_ip": "0.0.0.0"}, "reachable from other machines"),
        ({"cpu_bytes_to_use": 9}, "hold no block"),
        ({"timeout": 0}, "timeout"),
        ({"kv_port": 0}, "kv_port"),
    ],
)
def test_bad_configuration_is_refused(
    options: dict[str, Any], message: str, model: Callable[..., str]
) -> None:
    table = {"kv_connector": "peer", "kv_connector_extra_config": options}
    with pytest.raises(ConfigError, match=message):
        LLM(model(), **FLAGS, kv_transfer_config=table)


def sse(answer: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of each part of a stream."""
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_servers_behind_a_proxy(model: Callable[..., str], expected: list[Any]) -> None:
    """What vLLM's example proxy does: one answer's parameters go into the next request."""
    fields = {"temperature": 0, "ignore_eos": True, "prompt": PROMPTS[0]["prompt_token_ids"]}

    async def proxy(first: httpx.AsyncClient, second: httpx.AsyncClient) -> dict[str, Any]:
        request = {**fields, "max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL}
        answer = await first.post("/v1/completions", json=request)
        assert answer.status_code == 200, answer.text
        passed_on = answer.json()["kv_transfer_params"]
        for route, body in {
            "completions": fields,
            "chat/completions": {"messages": [{"role": "user", "content": "sky " * 15}]},
        }.items():
            streamed = {**body, "max_tokens": 1, "stream": True, "kv_transfer_params": PREFILL}
            parts = sse(await first.post(f"/v1/{route}", json=streamed))
            there = [part["kv_transfer_params"] for part in parts if "kv_transfer_params" in part]
            assert [table["remote_port"] for table in there] == [passed_on["remote_port"]]
            assert there == [parts[0]["kv_transfer_params"]]
        request = {**fields, "max_tokens": 10, "kv_transfer_params": passed_on}
        answer = await second.post("/v1/completions", json={**request, "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        refused = await second.post(
            "/v1/completions", json={**request, "kv_transfer_params": {"do_remote_decode": True}}
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (
            400,
            "kv_transfer_params",
        )
        completion: dict[str, Any] = answer.json()
        return completion

    async def run() -> dict[str, Any]:
        engines, clients = [], []
        for role in ("kv_producer", "kv_consumer"):
            table = {"kv_connector": "NixlConnector", "kv_role": role, "kv_port": free_port()}
            llm = AsyncLLM(
                model(), **FLAGS, kv_transfer_config=table, enable_prompt_tokens_details=True,
                disable_frontend_multiprocessing=True,
            )  # fmt: skip
            engines.append(llm)
            transport = httpx.ASGITransport(app=create_app(llm, llm.info.config).app)
            clients.append(httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1"))
        try:
            return await asyncio.wait_for(proxy(*clients), 300)
        finally:
            for llm, client in zip(engines, clients, strict=True):
                await client.aclose()
                llm.shutdown()

    completion = asyncio.run(run())
    assert completion["choices"][0]["token_ids"] == expected[0][0]
    assert completion["usage"]["prompt_tokens_details"]["cached_tokens"] == STORED
    assert "kv_transfer_params" not in completion
