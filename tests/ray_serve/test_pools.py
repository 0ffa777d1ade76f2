"""Pools of prefill and decode replicas behind Ray Serve."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient
from tests.ray_serve.test_arguments import built
from tests.ray_serve.test_cluster import FAST, begin_ray, free_port, processes, until
from tests.ray_serve.test_front import Handle, Replica

from modulm import LLM, SamplingParams
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import ConfigError
from modulm.testing.checkpoints import make_tiny, make_tokenizer
from modulm_ray_serve import AppArgs, app
from modulm_ray_serve.ingress import Front, Served
from modulm_ray_serve.pools import prefill_body
from modulm_tokenizers.tokenizer import load_tokenizer

LONG = "a long beginning of a prompt " * 20
PARAMS = {"do_remote_prefill": True, "remote_host": "10.0.0.5", "remote_port": 9}


def test_two_deployments() -> None:
    found = built(**{"model": "demo", "prefill-replicas": "2", "decode_replicas": 1})
    assert set(found) == {"front", "demo", "demo-prefill"}
    assert (found["demo"].num_replicas, found["demo-prefill"].num_replicas) == (1, 2)
    first, second = (found[name].init_args[2] for name in ("demo-prefill", "demo"))
    assert (first.role, second.role) == ("kv_producer", "kv_consumer")
    assert first.secret == second.secret != ""
    assert found["front"].init_args[0][0].prefill_from == 128
    named = built(
        model="demo", prefill_replicas=1, decode_replicas=1, block_size=16,
        kv_transfer_config={"kv_connector": "peer",
                            "kv_connector_extra_config": {"secret_file": "/s"}},
    )  # fmt: skip
    assert named["demo"].init_args[2].secret == ""
    assert named["front"].init_args[0][0].prefill_from == 32
    assert built(model="demo")["front"].init_args[0][0].prefill_from == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"prefill_replicas": 1}, "decode_replicas: set it as well"),
        ({"decode_replicas": 1}, "prefill_replicas: set it as well"),
        ({"prefill_replicas": 1, "decode_replicas": 1, "max_replicas": 3}, "fixed sizes"),
        (
            {"prefill_replicas": 1, "decode_replicas": 1,
             "kv_transfer_config": {"kv_connector": "peer", "kv_port": 3}},
            "kv_port: remove it",
        ),
    ],
)  # fmt: skip
def test_bad_pools_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(model="demo", **args)
    with pytest.raises(ValidationError, match="prefill_replicas"):
        AppArgs.model_validate({"prefill_replicas": -1})


class Prefill:
    """The handle of prefill replicas. answers: status and body of each request."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answers: list[tuple[int, Any]] = []
        self.ask = self

    def options(self, stream: bool = True) -> Prefill:
        return self

    def remote(self, call: Any = None, route: Any = None) -> Any:
        self.asked.append((call, route))
        return self

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> Any:
        status, body = self.answers.pop(0)
        if status == 0:
            raise RuntimeError("it was killed")
        yield [{"type": "http.response.start", "status": status}]
        yield [{"type": "http.response.body", "body": json.dumps(body).encode()}]


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Replica:
    tokenizer: Tokenizer = load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("t"), vocab=512))
    return Replica("ann", tokenizer)


def ask(replica: Replica, prefill: Prefill, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a request; returns the body that the decode replica got."""
    replica.asked.clear()
    handles: Any = [Handle(replica), prefill]
    front = Front([Served(("ann",), {"poet": "/p"}, 1, False, 10_000, 32)], *handles)
    client = TestClient(front.__serve_build_asgi_app__(), raise_server_exceptions=False)
    with client:
        client.post(path, json={"model": "ann", **body})
    ((call, _, _),) = replica.asked
    lengths = [value for name, value in call.scope["headers"] if name == b"content-length"]
    assert lengths == [str(len(call.body)).encode()]
    decoded: dict[str, Any] = json.loads(call.body)
    return decoded


def test_a_prompt_is_computed_first(replica: Replica) -> None:
    prefill = Prefill()
    prefill.answers = [(200, {"kv_transfer_params": PARAMS})] * 2
    chat = {"messages": [{"role": "user", "content": LONG}], "max_completion_tokens": 9}
    body = ask(replica, prefill, "/v1/chat/completions", {**chat, "stream": True, "n": 2})
    assert body == {"model": "ann", **chat, "stream": True, "n": 2, "kv_transfer_params": PARAMS}
    call, route = prefill.asked[0]
    assert json.loads(call.body) == {
        "model": "ann", **chat, "max_completion_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }  # fmt: skip
    assert route.tokens > 100
    text = {"prompt": LONG, "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "x"}}
    assert ask(replica, prefill, "/v1/completions", text)["kv_transfer_params"] == PARAMS
    assert json.loads(prefill.asked[1][0].body)["max_tokens"] == 1


@pytest.mark.parametrize("answer", [(0, None), (503, {}), (200, {}), (200, [])])
def test_a_decode_replica_computes_what_was_not(answer: tuple[int, Any], replica: Replica) -> None:
    prefill = Prefill()
    prefill.answers = [answer]
    assert ask(replica, prefill, "/v1/completions", {"prompt": LONG}) == {
        "model": "ann",
        "prompt": LONG,
    }
    assert len(prefill.asked) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "short"}),
        ("/v1/completions", {"prompt": [LONG, LONG]}),
        ("/v1/completions", {"prompt": LONG, "echo": True}),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": LONG}], "prompt_logprobs": 1}),
        ("/v1/completions", {"model": "poet", "prompt": LONG}),
        ("/tokenize", {"prompt": LONG}),
    ],
)  # fmt: skip
def test_other_requests_go_to_decode_replicas(
    path: str, body: dict[str, Any], replica: Replica
) -> None:
    prefill = Prefill()
    assert ask(replica, prefill, path, body) == {"model": "ann", **body}
    assert prefill.asked == []


def test_clients_do_not_say_where_blocks_are(replica: Replica) -> None:
    params = {"kv_transfer_params": PARAMS}
    for more in (params, {"vllm_xargs": params}, {"vllm_xargs": {**params, "a": 1}}):
        body = ask(replica, Prefill(), "/v1/completions", {"prompt": "x", **more})
        assert "kv_transfer_params" not in json.dumps(body)
    assert prefill_body("/v1/completions", {"prompt": [1, 2]}) is not None


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Where an application with a replica in each pool answers, and the model's folder."""
    import ray
    from ray import serve
    from ray.serve._private import api, client

    before = set(processes(""))
    folder = str(make_tiny(tmp_path_factory.mktemp("tiny")))
    args = {
        "model": folder, "served_model_name": "tiny", "prefill_replicas": 1, "decode_replicas": 1,
        "block_size": 16, "num_gpu_blocks_override": 200, "num_cpus": 0.1, "dtype": "float32",
        "kv_transfer_config": {"kv_connector": "peer",
                               "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 22}},
        "deployment": {"health_check_period_s": 0.3, "health_check_timeout_s": 300,
                       "graceful_shutdown_wait_loop_s": 0.1},
        "ingress": {"ray_actor_options": {"num_cpus": 0.1}},
    }  # fmt: skip
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FAST.items():
            patch.setenv(name, value)
        for module in (api, client):
            patch.setattr(module, "HTTP_PROXY_TIMEOUT", 600)
        with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as logs:
            begin_ray(logs)
            try:
                serve.start(http_options={"host": "127.0.0.1", "port": port})
                serve.run(app(AppArgs.model_validate(args)), name="app", route_prefix="/")
                yield f"http://127.0.0.1:{port}", folder
            finally:
                serve.shutdown()
                ray.shutdown()
    until(lambda: not set(processes("")) - before)


@pytest.mark.exhaustive
def test_a_real_application(url: tuple[str, str]) -> None:
    address, folder = url
    prompts = [f"{number} and {LONG}" for number in range(3)]
    flags: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 200}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(folder, **flags) as llm:
        expected = [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)]

    def answer(prompt: str) -> tuple[str, int]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0,
                "ignore_eos": True}  # fmt: skip
        found = httpx.post(f"{address}/v1/completions", json=body, timeout=600)
        assert found.status_code == 200, found.text
        details = found.json()["usage"]["prompt_tokens_details"] or {}
        return found.json()["choices"][0]["text"], details.get("cached_tokens", 0)

    for prompt, text in zip(prompts[:2], expected[:2], strict=True):
        found, cached = answer(prompt)
        assert found == text
        assert cached >= 64
    states = httpx.get(f"{address}/health", timeout=60).json()["models"]
    assert states == {"tiny": "ok", "tiny-prefill": "ok"}
    for process in processes("ServeReplica:app:tiny-prefill"):
        process.send_signal(signal.SIGKILL)
    assert answer(prompts[2])[0] == expected[2]
