"""A model's arguments as options of a Ray Serve deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.serve.config import RequestRouterConfig

from modulm.errors import ConfigError

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm_ray_serve.args import ModelArgs

__all__ = ["front_options", "model_options"]

#: Sequences that a replica is taken to run at once where --max-num-seqs is not given.
_ROWS = 64
#: Part of a replica's rows that is to be busy: more, and another replica is started.
_BUSY = 0.75
#: Requests that a replica may have, by its rows: those that run, and as many that wait.
_HELD = 2
#: Seconds that a stream may go on after its replica was told to end.
_PATIENCE = 600.0
#: Requests that a front may have open at once: each is little more than a connection.
_OPEN = 4096


def model_options(args: ModelArgs, config: EngineConfig, fronts: int) -> dict[str, Any]:
    """Options for the replicas of a model. fronts: how many send requests to them."""
    rows = config.scheduler.max_num_seqs or _ROWS
    most = args.max_replicas or args.min_replicas
    options: dict[str, Any] = {
        "max_ongoing_requests": max(_HELD, _HELD * rows),
        "graceful_shutdown_timeout_s": _PATIENCE,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        "request_router_config": RequestRouterConfig(
            request_router_class="modulm_ray_serve.router.PrefixRouter",
            request_router_kwargs={"slots": 2 * most + 8, "shared": fronts != 1},
        ),
        **_resources(args, config),
    }
    if most > args.min_replicas or args.autoscaling:
        options["autoscaling_config"] = {
            "min_replicas": args.min_replicas,
            "max_replicas": most,
            "target_ongoing_requests": args.target_ongoing_requests or max(1.0, _BUSY * rows),
            "upscale_delay_s": 10.0,
            "downscale_delay_s": 300.0,
            **args.autoscaling,
        }
    else:
        options["num_replicas"] = args.min_replicas
    return {**options, **args.deployment}


def _resources(args: ModelArgs, config: EngineConfig) -> dict[str, Any]:
    """What a replica takes of the cluster, with its workers beside it. Those of the ray executor
    are actors, for which it reserves a placement group of its own.

    Raises ConfigError for devices that the replica would take without having a use for them.
    """
    parallel = config.parallel
    if parallel.distributed_executor_backend == "ray":
        if args.num_gpus:
            raise ConfigError("num_gpus", "the ray executor's workers take theirs by themselves")
        return {"ray_actor_options": {"num_cpus": args.num_cpus or 1.0}}
    workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    wanted: dict[str, Any] = {"num_cpus": args.num_cpus or float(workers)}
    if args.num_gpus:
        wanted["num_gpus"] = args.num_gpus
    return {"ray_actor_options": wanted}


def front_options(given: dict[str, Any]) -> dict[str, Any]:
    """Options for what takes the requests and hands them on."""
    return {
        "max_ongoing_requests": _OPEN,
        "graceful_shutdown_timeout_s": _PATIENCE,
        "graceful_shutdown_wait_loop_s": 0.5,
        **given,
    }
