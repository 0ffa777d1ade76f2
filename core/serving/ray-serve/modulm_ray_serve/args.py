"""The arguments of an application: models with flags of `modulm serve` and scaling options."""

from __future__ import annotations

from typing import Any

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from modulm.config.schema.catalog import catalog
from modulm.config.sources import Draft, Source, draft, environment
from modulm.errors import ConfigError
from modulm_adapters.flags import LoRAConfig

__all__ = ["AppArgs", "ModelArgs"]

#: Flags of sockets, processes and replicas, which Ray Serve manages here.
_ELSEWHERE = (
    "host", "port", "uds", "ssl_", "enable_ssl_refresh", "api_server_count", "headless", "nnodes",
    "node_rank", "master_addr", "root_path", "shutdown_timeout", "max_connections",
    "data_parallel_",
)  # fmt: skip


class ModelArgs(BaseModel):
    """One model. Other keys are flags of `modulm serve`, with dashes or underscores.

    adapters: name -> folder, loaded when a request first names one. num_cpus, num_gpus: of one
    replica. prefill_replicas, decode_replicas: sizes of two pools, instead of min_replicas.
    autoscaling, router, deployment: further options of Ray Serve, which take precedence.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str = "demo"
    adapters: dict[str, str] = Field(default_factory=dict)
    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt | None = None
    prefill_replicas: NonNegativeInt = Field(
        default=0, validation_alias=AliasChoices("prefill_replicas", "prefill-replicas")
    )
    decode_replicas: NonNegativeInt = Field(
        default=0, validation_alias=AliasChoices("decode_replicas", "decode-replicas")
    )
    target_ongoing_requests: PositiveFloat | None = None
    num_cpus: PositiveFloat | None = None
    num_gpus: PositiveFloat | None = None
    autoscaling: dict[str, Any] = Field(default_factory=dict)
    deployment: dict[str, Any] = Field(default_factory=dict)

    def flags(self) -> dict[str, Any]:
        """The flags by name with underscores, including `model`.

        Raises ConfigError for flags that have no meaning behind Ray Serve.
        """
        known = catalog()
        values: dict[str, Any] = {"model": self.model}
        for key, value in (self.model_extra or {}).items():
            name = key.replace("-", "_")
            name = known.canonical(name) or name
            if name.startswith(_ELSEWHERE):
                raise ConfigError(name, "is set by Ray Serve: see its http_options and replicas")
            values[name] = value
        if self.adapters:
            values.setdefault("enable_lora", True)
        return values

    def draft(self) -> Draft:
        """The configuration of a replica. Raises ConfigError for wrong flags."""
        resolved = draft(Source("application's arguments", self.flags()), environment())
        if self.adapters and not resolved.config.group(LoRAConfig).enable_lora:
            raise ConfigError("enable_lora", "must be true or omitted: requests name adapters")
        return resolved


class AppArgs(ModelArgs):
    """An application: one model, or `models`; ingress: options of Ray Serve for its front."""

    models: list[ModelArgs] = Field(default_factory=list)
    ingress: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_exclusive(self) -> AppArgs:
        model_fields = (
            self.model_fields_set - {"models", "ingress"} | (self.model_extra or {}).keys()
        )
        if self.models and model_fields:
            raise ValueError(
                f"give models, or one model with {', '.join(sorted(model_fields))}; not both"
            )
        return self

    def each(self) -> list[ModelArgs]:
        """The models of the application."""
        return self.models or [self]
