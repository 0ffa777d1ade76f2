"""Resolves adapter owner/name to the hub repository of that name, if the operator allows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from modulm.loading.sources import download
from modulm_adapter_resolver_hub.flags import AdapterHubConfig
from modulm_adapters.resolver import AdapterResolver
from modulm_downloads import is_hub_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from modulm.contracts.config import EngineConfig

__all__ = ["HubResolver"]


class HubResolver(AdapterResolver):
    """Resolves names to allowed hub repositories, at their newest revision (`--revision` is the
    model's).
    """

    name: ClassVar[str] = "hub"
    api: ClassVar[int | tuple[int, int]] = 1

    def __init__(self, repositories: Sequence[str], config: EngineConfig) -> None:
        self._repositories = frozenset(repositories)
        self._config = config.with_(revision=None)

    @classmethod
    def of(cls, config: EngineConfig) -> Self | None:
        repositories = config.group(AdapterHubConfig).lora_resolver_repos
        return cls(repositories, config) if repositories else None

    def resolve(self, name: str) -> Path | None:
        if not is_hub_id(name) or not {name, f"{name.partition('/')[0]}/*"} & self._repositories:
            return None
        return download(name, self._config)
