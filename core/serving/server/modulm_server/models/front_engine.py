"""The engine client of a front end of several models, for what concerns no single one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from modulm.contracts.engine_info import EngineInfo
from modulm.errors import UnsupportedError
from modulm_server.engine.client import EngineClient
from modulm_server.memory_metrics import memory_metrics
from modulm_server.metrics import joined, of_model

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.requests import StepStats
    from modulm_server.models.hosted_model import HostedModel
    from modulm_server.models.pool import ModelPool

__all__ = ["FrontEngine"]

#: The kinds of models that a server may have.
_TASKS = ("generate", "embed", "classify", "score")


class FrontEngine(EngineClient):
    """Adds up the engines of all models. Requests go to those directly."""

    tokenizer = None

    def __init__(self, pool: ModelPool, config: EngineConfig, models: tuple[str, ...]) -> None:
        self._pool = pool
        self.metrics = _Metrics(pool)
        self.info = EngineInfo(
            config=config, models=models, path="", architecture="", max_model_len=0, vocabulary=0,
            hidden=0, dtype="", eos=(), tasks=_TASKS,
        )  # fmt: skip

    def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        raise _without_model()

    def beam_search(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        raise _without_model()

    def encode(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        raise _without_model()

    async def run_weights(self, operation: str, **arguments: Any) -> NoReturn:
        raise _without_model()

    async def abort(self, request_id: str) -> None:
        """Requests are aborted at their model's engine."""

    async def drain(self, timeout: float | None = None) -> bool:
        self._pool.closing = True
        return await self._pool.drain(timeout)

    @property
    def active(self) -> int:
        engines = [model.engine for model in self._pool.models]
        return sum(engine.active for engine in engines if engine is not None and not engine.dead)

    @property
    def stats(self) -> StepStats | None:
        return None

    async def reset_prefix_cache(self) -> bool:
        engines = [model.engine for model in self._pool.models if model.ready]
        await asyncio.gather(*(one.reset_prefix_cache() for one in engines if one is not None))
        return True

    async def sleep(self, level: int = 1) -> NoReturn:
        raise _without_model()

    async def wake_up(self, tags: Sequence[str] | None = None) -> NoReturn:
        raise _without_model()

    async def is_sleeping(self) -> bool:
        return False

    def report_by(self, report: Callable[[], str]) -> None:
        """There is one front end."""

    async def reports(self) -> list[str]:
        return []

    def shutdown(self) -> None:
        self._pool.shutdown()


def _without_model() -> UnsupportedError:
    return UnsupportedError("this server has several models: name one")


def _of(model: HostedModel) -> Iterator[Metric]:
    """The metrics of a model's engine and routes, all with the label of its name."""
    if model.engine is not None:
        yield from of_model(model.name, model.engine.metrics.collect())
    if model.routes is not None:
        yield from of_model(model.name, model.routes.registry.collect())


class _Metrics(Collector):
    """The metrics of all engines, whose labels name their model, and of the pool."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield from joined(metric for model in self._pool.models for metric in _of(model))
        memory, beyond = memory_metrics()
        loads = GaugeMetricFamily(
            "modulm:model_loads", "How often a model was loaded.", labels=("model_name",)
        )
        for model in self._pool.models:
            memory.add_metric((model.name,), model.memory)
            beyond.add_metric((model.name,), model.beyond_estimate)
            loads.add_metric((model.name,), model.loads)
        yield memory
        yield beyond
        yield loads
