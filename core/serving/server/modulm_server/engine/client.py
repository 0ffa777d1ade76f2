"""The engine's interface for front ends: servers, route families and batch runners."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm.errors import EngineDead, EngineStalled, NotFound, UnsupportedError
from modulm_frontend.worker_calls import run_on_model
from modulm_server.engine.training import Training

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from modulm.contracts.engine_info import EngineInfo
    from modulm.contracts.outputs import PoolingRequestOutput, RequestOutput
    from modulm.contracts.requests import PromptLike, StepStats
    from modulm.contracts.sampling import PoolingParams, SamplingParams
    from modulm.contracts.tokenizer import Tokenizer
    from modulm_frontend.beam_search import BeamSearchParams
    from modulm_server.engine.adapters import Adapter

__all__ = ["API", "EngineClient", "EngineRestarting", "ReplicaHealth", "Tenant"]

API = 1


class EngineRestarting(EngineStalled):
    """The engine has died and is being restarted; calls raise this until it is there again."""


@frozen
class ReplicaHealth:
    """The state of a replica. status: "ok", "stalled", "draining" (before a rolling restart),
    "starting" or "dead". reason: why it is not "ok". restarts: how often it was restarted.
    """

    rank: int
    status: str
    reason: str | None = None
    restarts: int = 0


@frozen
class Tenant:
    """Whose request it is. weight: of its share of the engine, for `--scheduling-policy fair`."""

    name: str
    weight: float = 1.0


class EngineClient(Training, ABC):
    """One engine that many callers on an event loop share.

    info: facts about the engine. tokenizer: None on an engine without one. metrics: for a registry
    of prometheus_client. dead: the error that ended the engine, None while it runs. stalled: why it
    counts as stalled, or None. address: where further front ends of the same engine connect; None
    if they cannot.
    """

    info: EngineInfo
    tokenizer: Tokenizer | None
    metrics: Collector
    dead: EngineDead | None = None
    stalled: EngineStalled | None = None
    address: str | None = None

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """Name -> adapter that requests may use, in loading order."""
        return MappingProxyType({})

    @property
    def replicas(self) -> Sequence[ReplicaHealth]:
        """The state of each replica, if dead engines are restarted."""
        return ()

    def rolling_restart(self) -> None:
        """Restart the replicas one after another, without interrupting requests; returns at once.

        Raises UnsupportedError if there are no replicas.
        """
        raise UnsupportedError("this engine has no replicas to restart")

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The ids of the processes on this machine that this front end started for the engine."""
        return ()

    @abstractmethod
    def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: Tenant | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate; yields outputs according to `params.output_kind`. The last has `finished` set.

        Leaving early aborts the request. Raises RequestError for an invalid request, QueueFull if
        the queue has no room, EngineDead. Failures while it runs are reported in `finish_reason`.
        """

    @abstractmethod
    def beam_search(
        self,
        prompt: PromptLike,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: Tenant | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a beam search; yields one output with the `params.beam_width` best answers, best
        first.

        Leaving early ends the search. Raises the errors of `generate`.
        """

    @abstractmethod
    def encode(
        self,
        prompt: PromptLike,
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: Tenant | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pool a prompt; yields one output. Raises the errors of `generate`."""

    async def refresh_adapters(self) -> None:
        """Update `adapters` with those that other front ends have loaded."""

    def load_adapter(self, adapter: Adapter, *, replace: bool = False) -> Future[None]:
        """Load an adapter for new requests; running requests continue meanwhile.

        replace: reload it if the name is loaded; requests that use the old version keep it. The
        future may be awaited on any thread. It raises RequestError for a name in use or files that
        do not fit.
        """
        raise UnsupportedError("this engine does not support adapters")

    def unload_adapter(self, name: str) -> Future[None]:
        """Unload an adapter; its running requests finish normally. The future raises NotFound."""
        raise UnsupportedError("this engine does not support adapters")

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Abort a request; its reader gets a last output. Unknown ids are ignored."""

    @abstractmethod
    async def drain(self, timeout: float | None = None) -> bool:
        """Wait until no request is left, at most `timeout` seconds, then abort the remaining ones.

        Returns whether none was left.
        """

    @property
    @abstractmethod
    def active(self) -> int:
        """The number of unfinished requests."""

    @property
    @abstractmethod
    def stats(self) -> StepStats | None:
        """Statistics of the last step; None before the first."""

    @abstractmethod
    async def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; running requests continue."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Free memory: level 1 the caches, and weights of devices go to host memory; level 2
        discards both; level 0 frees nothing and pauses requests.

        Requests are refused until `wake_up`. Raises UnsupportedError without --enable-sleep-mode,
        RequestError while requests run.
        """

    @abstractmethod
    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again, and reload weights that were freed.

        tags: "weights" alone brings the weights back while the engine sleeps, to update them;
        "kv_cache" and None wake it up. Raises RequestError.
        """

    @abstractmethod
    async def is_sleeping(self) -> bool:
        """Whether the engine is asleep."""

    async def start_profile(self) -> None:
        """Start recording the engine's steps.

        Raises UnsupportedError without --profiler-config, RequestError if already recording.
        """
        raise UnsupportedError("this engine does not support profiling")

    async def stop_profile(self) -> None:
        """Stop recording and write the trace. Raises RequestError if not recording."""
        raise UnsupportedError("this engine does not support profiling")

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function in every worker between two steps; returns the results by rank, replica
        after replica.

        method: the name of a worker function (entry-point group `modulm.worker_functions`) or of a
        method that `worker_cls` adds, or a function whose first argument is the worker. Other
        processes import functions by name, and only if this process started them. Arguments and
        results are then plain values: numbers, strings, bytes, lists, dicts and numpy arrays.
        timeout: seconds to wait.

        Raises NotFound for an unknown name, EngineError naming the rank whose function raised, and
        EngineTimeout. Requests continue in each case.
        """
        raise UnsupportedError("this engine has no workers to call")

    async def run_weights(self, operation: str, **arguments: Any) -> dict[str, Any]:
        raise UnsupportedError("the weights of this engine cannot be updated")

    async def is_paused(self) -> bool:
        return False

    async def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the model of every worker; returns the results by rank.

        Restrictions on functions and results are those of `collective_rpc`.
        """
        return await self.collective_rpc(run_on_model, args=(function,))

    @abstractmethod
    def report_by(self, report: Callable[[], str]) -> None:
        """Set the function that returns this front end's report (its metrics), on any thread."""

    @abstractmethod
    async def reports(self) -> list[str]:
        """The reports (metrics) of the engine's other front ends."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the engine; unfinished requests end with EngineDead. May be called twice."""

    async def check_health(self) -> None:
        """Raise EngineDead if the engine has died, EngineStalled if it does not respond."""
        if self.dead is not None:
            raise EngineDead(str(self.dead)) from self.dead
        if self.stalled is not None:
            raise EngineStalled(str(self.stalled))

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises NotFound if there is none."""
        if self.tokenizer is None:
            raise NotFound("no tokenizer is loaded: skip_tokenizer_init is set")
        return self.tokenizer
