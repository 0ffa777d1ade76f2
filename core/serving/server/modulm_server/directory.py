"""The models of a server that has several, as route families see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from modulm.contracts.engine_info import EngineInfo

__all__ = ["ModelChanges", "ModelDirectory", "ModelStatus"]


@frozen(kw_only=True)
class ModelStatus:
    """One model of the server.

    state: "unloaded", "loading", "loaded", "sleeping", "stopping" or "failed". error: why its last
    load failed. memory: bytes of its processes if it has any, else the estimate for loading it, 0
    if unknown. last_used, expires_at: Unix seconds; None: never. active, waiting: its requests that
    run, and that wait for it to load. info: facts of its engine, once it was loaded. adapters: name
    -> source.
    """

    name: str
    model: str
    state: str
    aliases: tuple[str, ...] = ()
    error: str | None = None
    memory: int = 0
    last_used: float | None = None
    expires_at: float | None = None
    active: int = 0
    waiting: int = 0
    pinned: bool = False
    info: EngineInfo | None = None
    adapters: Mapping[str, str] = field(factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, then its aliases."""
        return (self.name, *self.aliases)


@frozen
class ModelChanges:
    """The names of models that a reload added, changed and removed."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class ModelDirectory(ABC):
    """The models of a server. owner: of the request, as in `modulm_server.auth.owner_of`; models
    that its key may not use do not exist for it.

    budget: bytes that all models together may have; None: no limit.
    """

    budget: int | None = None

    @abstractmethod
    def statuses(self, owner: str = "") -> Sequence[ModelStatus]:
        """All models, in the order of the configuration."""

    @abstractmethod
    def status(self, name: str, owner: str = "") -> ModelStatus:
        """A model by name or alias. Raises ApiError(404), which lists the names."""

    @abstractmethod
    async def load(self, name: str, owner: str = "") -> ModelStatus:
        """Load a model and wait for it. Raises ApiError(404), ApiError(503) with the reason."""

    @abstractmethod
    async def unload(self, name: str, owner: str = "") -> ModelStatus:
        """Stop a model when its running requests have ended. Raises ApiError(404)."""

    @abstractmethod
    async def reload(self) -> ModelChanges:
        """Read the settings of all models again; running requests continue.

        Raises ConfigError for invalid settings, which change nothing.
        """

    @abstractmethod
    async def start(self) -> None:
        """Load the models that are to be loaded at start, and begin to watch all of them."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop watching, and end loads in progress."""
