"""Pools of prefill and decode replicas behind Ray Serve."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient
from tests.ray_serve.test_arguments import built
from tests.ray_serve.test_front import Handle, Replica

from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import ConfigError
from modulm.testing.checkpoints import make_tokenizer
from modulm_ray_serve import AppArgs
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
