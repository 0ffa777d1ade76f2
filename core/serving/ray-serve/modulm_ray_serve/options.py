"""A model's arguments as options of a Ray Serve deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.serve.config import RequestRouterConfig

from modulm.errors import ConfigError

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm_ray_serve.args import ModelArgs

__all__ = ["front_options", "model_options"]

#: Assumed number of concurrent sequences of a replica without --max-num-seqs.
_ROWS = 64
#: Share of busy rows above which another replica is started.
_BUSY = 0.75
#: Requests of a replica per row: one that runs and one that waits.
_REQUESTS_PER_ROW = 2
#: Seconds that a stream may continue after its replica was told to stop.
_SHUTDOWN_TIMEOUT = 600.0
#: Concurrent requests of an ingress replica; each is little more than a connection.
_OPEN = 4096


def model_options(
    args: ModelArgs, config: EngineConfig, fronts: int, pool: int = 0
) -> dict[str, Any]:
    """Options for the replicas of a model. fronts: number of ingress replicas. pool: fixed number
    of replicas, of a pool.
    """
    rows = config.scheduler.max_num_seqs or _ROWS
    least = pool or args.min_replicas
    most = args.max_replicas or least
    options: dict[str, Any] = {
        "max_ongoing_requests": max(_REQUESTS_PER_ROW, _REQUESTS_PER_ROW * rows),
        "graceful_shutdown_timeout_s": _SHUTDOWN_TIMEOUT,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        "request_router_config": RequestRouterConfig(
            request_router_class="modulm_ray_serve.router.PrefixRouter",
            request_router_kwargs={"slots": 2 * most + 8, "shared": fronts != 1},
        ),
        **_resources(args, config),
    }
    if most > least or args.autoscaling:
        options["autoscaling_config"] = {
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": args.target_ongoing_requests or max(1.0, _BUSY * rows),
            "upscale_delay_s": 10.0,
            "downscale_delay_s": 300.0,
            **args.autoscaling,
        }
    else:
        options["num_replicas"] = least
    return {**options, **args.deployment}


def _resources(args: ModelArgs, config: EngineConfig) -> dict[str, Any]:
    """The cluster resources of a replica with its workers. The ray executor's workers are actors
    with a placement group of their own.

    Raises ConfigError for devices that the replica would not use.
    """
    parallel = config.parallel
    if parallel.distributed_executor_backend == "ray":
        if args.num_gpus:
            raise ConfigError("num_gpus", "the ray executor's workers reserve theirs themselves")
        return {"ray_actor_options": {"num_cpus": args.num_cpus or 1.0}}
    workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    resources: dict[str, Any] = {"num_cpus": args.num_cpus or float(workers)}
    if args.num_gpus:
        resources["num_gpus"] = args.num_gpus
    return {"ray_actor_options": resources}


def front_options(overrides: dict[str, Any]) -> dict[str, Any]:
    """Options for the ingress."""
    return {
        "max_ongoing_requests": _OPEN,
        "graceful_shutdown_timeout_s": _SHUTDOWN_TIMEOUT,
        "graceful_shutdown_wait_loop_s": 0.5,
        **overrides,
    }
