"""What an application is built of, and what Ray Serve is told; nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from modulm.errors import ConfigError
from modulm_ray_serve import AppArgs, app
from modulm_ray_serve.options import model_options


def built(**args: Any) -> dict[str, Any]:
    """Deployments by name."""
    front = app(AppArgs.model_validate(args))._bound_deployment
    below = [bound._bound_deployment for bound in front.init_args[1:]]
    return {each.name: each for each in (front, *below)}


def options(**args: Any) -> dict[str, Any]:
    made = AppArgs.model_validate(args)
    return model_options(made, made.draft().config, 1)


def test_words_of_the_command_line() -> None:
    found = built(model="demo", max_model_len="256", max_replicas="3", max_num_seqs="8")
    assert set(found) == {"front", "demo"}
    scales = found["demo"]._deployment_config.autoscaling_config
    assert (scales.min_replicas, scales.max_replicas) == (1, 3)
    assert scales.target_ongoing_requests == 6
    assert found["demo"].max_ongoing_requests == 16
    flags, adapters = found["demo"].init_args
    assert flags == {"model": "demo", "max_model_len": "256", "max_num_seqs": "8"}
    assert adapters == {}
    router = found["demo"]._deployment_config.request_router_config
    assert router.request_router_class == "modulm_ray_serve.router.PrefixRouter"
    assert router.request_router_kwargs == {"slots": 14, "shared": False}


def test_several_models(tmp_path: Path) -> None:
    found = built(
        models=[
            {"model": "org/front", "served-model-name": "front", "adapters": {"poet": "/p"}},
            {"model": "org/b", "min_replicas": 2},
        ],
        ingress={"num_replicas": 2},
    )  # fmt: skip
    assert set(found) == {"front", "front-model", "org-b"}
    assert found["front"].num_replicas == 2
    assert found["org-b"].num_replicas == 2
    assert found["front-model"].init_args[0]["enable_lora"] is True
    router = found["org-b"]._deployment_config.request_router_config
    assert router.request_router_kwargs["shared"] is True


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ({"port": 80}, "is set by Ray Serve"),
        ({"data-parallel-size": 2}, "is set by Ray Serve"),
        ({"ssl_keyfile": "k"}, "is set by Ray Serve"),
        ({"max_modell_len": 3}, "max_model_len"),
        ({"max_model_len": "many"}, "max_model_len"),
        ({"adapters": {"a": "/a"}, "enable_lora": False}, "enable_lora"),
        ({"adapters": {"demo": "/a"}}, "model itself"),
        ({"models": [{"model": "a"}, {"model": "a"}]}, "two models"),
        (
            {"models": [{"model": "a", "adapters": {"x": "/x"}}, {"model": "x"}]},
            "two models have the name 'x'",
        ),
    ],
)
def test_what_is_refused(args: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        built(**args)


def test_either_one_model_or_several() -> None:
    with pytest.raises(ValidationError, match="not both"):
        AppArgs.model_validate({"model": "a", "models": [{"model": "b"}]})
    with pytest.raises(ValidationError, match="min_replicas"):
        AppArgs.model_validate({"min_replicas": 0})


def test_what_a_replica_takes_of_the_cluster() -> None:
    assert options(model="demo")["ray_actor_options"] == {"num_cpus": 1.0}
    ranks = options(model="demo", tensor_parallel_size=2)
    assert ranks["ray_actor_options"] == {"num_cpus": 2.0}
    devices = options(model="demo", tensor_parallel_size=2, num_gpus=2, num_cpus=4)
    assert devices["ray_actor_options"] == {"num_cpus": 4.0, "num_gpus": 2.0}
    assert "placement_group_bundles" not in devices


def test_ranks_of_the_ray_executor_take_their_places_by_themselves() -> None:
    args = {"model": "demo", "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    found = options(**args)
    assert found["ray_actor_options"] == {"num_cpus": 1.0}
    assert "placement_group_bundles" not in found
    with pytest.raises(ConfigError, match="num_gpus"):
        options(**args, num_gpus=2)


def test_ray_serves_own_options_come_last() -> None:
    found = options(
        model="demo", autoscaling={"upscale_delay_s": 3}, deployment={"health_check_period_s": 9}
    )
    assert found["autoscaling_config"]["upscale_delay_s"] == 3
    assert found["health_check_period_s"] == 9
    assert found["graceful_shutdown_timeout_s"] == 600
