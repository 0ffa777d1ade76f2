"""The engine as front ends see it: servers, route families and batch runners know this only."""

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

__all__ = ["API", "EngineClient", "ReplicaHealth"]

API = 1


@frozen
class ReplicaHealth:
    """The state of a replica. status: "ok", "stalled", "starting" or "dead". reason: why it is not
    "ok". restarts: how often it was restarted.
    """

    rank: int
    status: str
    reason: str | None = None
    restarts: int = 0


class EngineClient(Training, ABC):
    """Many callers on one event loop, one engine behind them.

    info: what the engine is. tokenizer: None on an engine without one. metrics: for a registry of
    prometheus_client. dead: why the engine cannot go on, None while it lives. stalled: why it is
    taken not to work just now. address: where further front ends of the same engine connect, None
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
        """What requests may name as `adapter`, by name, in the order in which they came."""
        return MappingProxyType({})

    @property
    def replicas(self) -> Sequence[ReplicaHealth]:
        """The engines behind this one, where there are several."""
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
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come, by `params.output_kind`; the last one has `finished`.

        Leaving early aborts the request. Raises RequestError if the request is wrong, QueueFull if
        it cannot wait, EngineDead. What goes wrong while it runs is in `finish_reason`.
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
    ) -> AsyncGenerator[RequestOutput, None]:
        """One output with the `params.beam_width` best answers, best first.

        Leaving early ends the search. Raises as `generate` does.
        """

    @abstractmethod
    def encode(
        self,
        prompt: PromptLike,
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        adapter: str | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """One output, when it is there. Raises as `generate` does."""

    async def refresh_adapters(self) -> None:
        """Have in `adapters` what other front ends have loaded until now."""

    def load_adapter(self, adapter: Adapter, *, replace: bool = False) -> Future[None]:
        """Read an adapter, which requests may name from then on; running ones go on beside it.

        replace: also one that is there; requests that use it keep what they have. The answer may be
        waited for on any thread. It raises RequestError for a name that is taken and for files that
        do not fit.
        """
        raise UnsupportedError("this engine takes no adapters")

    def unload_adapter(self, name: str) -> Future[None]:
        """Forget an adapter; requests that use it end as they would. The answer raises NotFound."""
        raise UnsupportedError("this engine takes no adapters")

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request now; whoever reads it gets its last output. Unknown ones are ignored."""

    @abstractmethod
    async def drain(self, timeout: float | None = None) -> bool:
        """Wait until no request is left, at most `timeout` seconds; what is left is aborted.

        Whether none was left.
        """

    @property
    @abstractmethod
    def active(self) -> int:
        """Requests that have not ended."""

    @property
    @abstractmethod
    def stats(self) -> StepStats | None:
        """The last step in numbers; None before the first."""

    @abstractmethod
    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; running requests go on."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Give back the memory of the caches, with level 2 that of the weights as well; with level
        0 nothing: requests stand still.

        Requests are refused until it is woken. Raises UnsupportedError without
        --enable-sleep-mode, RequestError while requests run.
        """

    @abstractmethod
    async def wake_up(self) -> None:
        """Take the memory again; weights that were given back are loaded anew."""

    @abstractmethod
    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps."""

    async def start_profile(self) -> None:
        """Record the engine's steps from now on. Raises UnsupportedError without
        --profiler-config, RequestError if that is done already.
        """
        raise UnsupportedError("this engine takes no profiles")

    async def stop_profile(self) -> None:
        """Write what was recorded. Raises RequestError if nothing is."""
        raise UnsupportedError("this engine takes no profiles")

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function in every worker between two steps, and return the answers by rank, those
        of one replica after those of another.

        method: the name of a worker function (entry-point group `modulm.worker_functions`), of a
        method that `worker_cls` adds to the worker, or a function that takes the worker first. A
        function is imported by its name in other processes, if this process has started them.
        Between processes arguments and answers are plain values: numbers, strings, bytes, lists,
        dicts and numpy arrays. timeout: seconds to wait.

        Raises NotFound for an unknown name, EngineError that names the rank on which the function
        raised, and EngineTimeout. Requests run on in each case.
        """
        raise UnsupportedError("this engine has no workers to call")

    async def run_weights(self, operation: str, **arguments: Any) -> dict[str, Any]:
        raise UnsupportedError("the weights of this engine cannot be updated")

    async def is_paused(self) -> bool:
        return False

    async def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the model of every worker, its rank's part, and return the answers
        by rank. Functions and answers are as in `collective_rpc`.
        """
        return await self.collective_rpc(run_on_model, args=(function,))

    @abstractmethod
    def report_by(self, report: Callable[[], str]) -> None:
        """How this front end tells of itself, on any thread, when another one asks."""

    @abstractmethod
    async def reports(self) -> list[str]:
        """What the engine's other front ends tell of themselves."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the engine; requests that are left end with EngineDead. May be called twice."""

    async def check_health(self) -> None:
        """Raise EngineDead if the engine cannot go on, EngineStalled if it does not answer."""
        if self.dead is not None:
            raise EngineDead(str(self.dead)) from self.dead
        if self.stalled is not None:
            raise EngineStalled(str(self.stalled))

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises NotFound if there is none."""
        if self.tokenizer is None:
            raise NotFound("there is no tokenizer: skip_tokenizer_init was given")
        return self.tokenizer
