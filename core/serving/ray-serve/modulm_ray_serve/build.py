"""The application builder. Ray Serve reads the type of its argument."""

import re
from typing import Any

from attrs import evolve
from ray import serve
from ray.serve import Application

from modulm.config import EngineConfig
from modulm.errors import ConfigError
from modulm_ray_serve.args import AppArgs, ModelArgs
from modulm_ray_serve.ingress import Front, Served
from modulm_ray_serve.options import front_options, model_options
from modulm_ray_serve.pools import least_prompt, pools_of
from modulm_ray_serve.replica import ModelReplica
from modulm_server.api_keys import read_keys
from modulm_server.app import served_names
from modulm_server.flags import ServerConfig

__all__ = ["app"]


def app(args: AppArgs) -> Application:
    """An application of one or several models, each a deployment, behind OpenAI's routes.

    Raises ConfigError for wrong flags, and if two models have the same name.
    """
    fronts: Any = args.ingress.get("num_replicas", 1)
    if args.ingress.get("autoscaling_config") is not None:
        fronts = None
    handles, prefills, served, names = [], [], [], set[str]()
    for each in args.each():
        config = each.draft().config
        listed = _served(each, config)
        twice = names & {*listed.names, *listed.adapters}
        if twice:
            raise ConfigError("served_model_name", f"two models have the name {min(twice)!r}")
        names |= {*listed.names, *listed.adapters}
        name = _deployment_name(listed.names[0])
        pools = pools_of(each, config)
        if pools is None:
            options = model_options(each, config, fronts)
            deployment = serve.deployment(name=name, **options)(ModelReplica)
            handles.append(deployment.bind(each.flags(), each.adapters))
        else:
            prefill, decode = pools
            listed = evolve(listed, prefill_from=least_prompt(config))
            options = model_options(each, config, fronts, each.prefill_replicas)
            deployment = serve.deployment(name=f"{name}-prefill", **options)(ModelReplica)
            prefills.append(deployment.bind(each.flags(), each.adapters, prefill))
            options = model_options(each, config, fronts, each.decode_replicas)
            deployment = serve.deployment(name=name, **options)(ModelReplica)
            handles.append(deployment.bind(each.flags(), each.adapters, decode))
        served.append(listed)
    front = serve.deployment(name="front", **front_options(args.ingress))
    bound: Application = front(serve.ingress()(Front)).bind(served, *handles, *prefills)
    return bound


def _served(args: ModelArgs, config: EngineConfig) -> Served:
    server = config.group(ServerConfig)
    keys = read_keys(server)
    names = served_names(config)
    if set(args.adapters) & set(names):
        raise ConfigError("adapters", f"{names[0]!r} is the name of the model itself")
    return Served(
        names=names,
        adapters=dict(args.adapters),
        keys=len(keys),
        apart=keys.many and not server.share_prefix_cache_between_keys,
        limit=server.max_request_bytes,
    )


def _deployment_name(name: str) -> str:
    """A deployment name that Ray Serve accepts; "front" is the ingress."""
    cleaned = re.sub(r"[^\w.-]", "-", name).strip("-")
    return f"{cleaned}-model" if cleaned in ("", "front") else cleaned
