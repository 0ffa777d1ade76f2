"""The way of requests through prefill and decode replicas."""

from __future__ import annotations

from typing import Any

import pytest

from modulm.config import EngineConfig
from modulm.contracts.requests import Finish, Request, StepEvents
from modulm.contracts.sampling import PoolingParams, SamplingParams
from modulm.errors import ConfigError, EngineStalled
from modulm_fleet.pools import PoolRouter, pool_flags

BLOCK = 16
SOURCE = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1}


def request(name: str, tokens: int = 64, params: Any = None, **fields: Any) -> Request:
    prompt = [sum(map(ord, name))] * tokens
    return Request(id=name, prompt=prompt, params=params or SamplingParams(), **fields)


def pools(prefill: int = 2, decode: int = 2) -> PoolRouter:
    router = PoolRouter(prefill, prefill + decode, BLOCK, 10_000)
    for replica in range(prefill + decode):
        router.enable(replica)
    return router


def send_prefill(router: PoolRouter, *requests: Request) -> tuple[str, int]:
    """Send what precedes the requests; returns its name and replica."""
    (prefill,) = router.first(requests)
    assert prefill.id not in {each.id for each in requests}
    return prefill.id, router.send([prefill])


def test_a_prompt_runs_before_its_request() -> None:
    router = pools()
    both = [request("a"), request("b")]
    (prefill,) = router.first(both)
    assert prefill.params.max_tokens == 1
    assert prefill.params.extra_args == {"kv_transfer_params": {"do_remote_decode": True}}
    replica = router.send([prefill])
    assert replica < 2
    assert router.replica("a") == replica
    assert router.following(StepEvents()) == []
    (following,) = router.following(StepEvents(transfer_params={prefill.id: SOURCE}))
    assert [each.id for each in following] == ["a", "b"]
    table = following[0].params.extra_args["kv_transfer_params"]
    assert table == {**SOURCE, "remote_computing": True}
    assert router.send(following) >= 2
    assert router.following(StepEvents(finished=[Finish(prefill.id, "length")])) == []
    router.record_end(prefill.id)
    for name in ("a", "b"):
        router.record_end(name)
    # The decode replica has the prompt now: it is not computed elsewhere again.
    again = [request("a")]
    assert router.first(again) == again
    assert len(router) == 0
    assert not any(router.loads)


def test_a_prefill_without_an_address_is_computed_by_decode_replicas() -> None:
    router = pools()
    name, _ = send_prefill(router, request("a"))
    ended = StepEvents(finished=[Finish(name, "error")])
    (following,) = router.following(ended)
    assert following[0].params.extra_args is None
    assert router.send(following) >= 2


@pytest.mark.parametrize(
    "one",
    [
        request("short", BLOCK),
        request("adapter", adapter="poet"),
        request("pooling", params=PoolingParams()),
        request("scores", params=SamplingParams(prompt_logprobs=1)),
        request("own", params=SamplingParams(extra_args={"kv_transfer_params": SOURCE})),
    ],
)
def test_requests_that_go_to_decode_replicas_at_once(one: Request) -> None:
    router = pools()
    assert router.first([one]) == [one]
    assert router.send([one]) >= 2


def test_an_aborted_request_takes_its_prefill_along() -> None:
    router = pools()
    name, replica = send_prefill(router, request("a"), request("b"))
    assert router.withdraw("a") == []
    assert router.withdraw("b") == [(replica, name)]
    assert router.following(StepEvents(transfer_params={name: SOURCE})) == []
    assert len(router) == 0


def test_a_lost_prefill_is_not_repeated() -> None:
    router = pools()
    one = request("a")
    _, replica = send_prefill(router, one)
    assert router.remove(replica) == ["a"]
    assert router.first([one]) == [one]
    assert router.send([one]) >= 2


def test_one_pool_does_everything_if_the_other_is_gone() -> None:
    router = pools(1, 1)
    one = request("a")
    router.disable(0)
    assert router.first([one]) == [one]
    assert router.send([one]) == 1
    router.record_end("a")
    router.enable(0)
    router.disable(1)
    assert router.first([one]) == [one]
    assert router.send([one]) == 0
    router.disable(0)
    with pytest.raises(EngineStalled):
        router.send([request("b")])


def test_each_pool_has_its_role() -> None:
    config = EngineConfig().with_parts({"prefill_replicas": 1, "decode_replicas": 1})
    assert pool_flags(EngineConfig(), 0) == {}
    roles = [pool_flags(config, index)["kv_transfer_config"] for index in range(2)]
    assert roles == [
        {"kv_connector": "peer", "kv_role": "kv_both"},
        {"kv_connector": "peer", "kv_role": "kv_consumer"},
    ]
    table = {"kv_connector": "peer", "kv_role": "kv_both"}
    with pytest.raises(ConfigError, match="kv_role"):
        pool_flags(config.with_parts({"kv_transfer_config": table}), 0)
