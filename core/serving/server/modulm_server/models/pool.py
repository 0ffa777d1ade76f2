"""All models of a server: finds them by name, loads and unloads them within the memory budget."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from modulm.errors import EngineDead, ModulmError, QueueFull
from modulm_server.api_keys import allows
from modulm_server.directory import ModelChanges, ModelDirectory, ModelStatus
from modulm_server.errors import ApiError, shutting_down
from modulm_server.key_limits import current_key
from modulm_server.loopback import LoopbackClient
from modulm_server.models.flags import ModelsConfig
from modulm_server.models.hosted_model import HostedModel
from modulm_server.models.library import hub_id

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm_server.models.settings import ModelSettings

__all__ = ["ModelPool"]

log = logging.getLogger("modulm_server")

#: Names that an error lists.
_LISTED = 20
#: Seconds between two measurements of memory, with a budget, and two looks into `--models-dir`.
_MEASURE = 5.0
#: Seconds between two looks for a model that is unknown.
_LOOK_AGAIN = 1.0


class ModelPool(ModelDirectory):
    """The models of a server.

    read: returns the settings of all models; called again by `reload`, and to find new ones. All
    methods run on the server's event loop.
    """

    def __init__(self, config: EngineConfig, read: Callable[[], Sequence[ModelSettings]]) -> None:
        self._flags = config.group(ModelsConfig)
        self._read = read
        self._models = [HostedModel(settings) for settings in read()]
        self._names: dict[str, HostedModel] = {}
        self._index()
        self._removed: list[HostedModel] = []
        self._one_load = asyncio.Lock()
        self._expiring = asyncio.Event()
        self._patrol: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._looked = time.monotonic()
        self._unreadable = ""
        self.closing = False
        self.budget = self._flags.memory_budget
        self.stores: dict[str, Any] = {}
        self.loopback = LoopbackClient()

    @property
    def models(self) -> Sequence[HostedModel]:
        """All models, also removed ones that still have requests."""
        return [*self._models, *self._removed]

    @property
    def names(self) -> tuple[str, ...]:
        """All names and aliases, in order."""
        return tuple(name for model in self._models for name in model.settings.names)

    @property
    def comment_interval(self) -> float:
        """Seconds between two comments on a stream that waits."""
        return self._flags.load_comment_interval

    def _index(self) -> None:
        names = {name: model for model in self._models for name in model.settings.adapters}
        names |= {name: model for model in self._models for name in model.settings.names}
        self._names = names

    # Finding models.

    def find(self, name: Any, owner: str) -> HostedModel:
        """The model of a request. name: a model, an alias or an adapter; not a text: the first one.

        Raises ApiError(404) for an unknown name, and for a model that the key may not use.
        """
        if not isinstance(name, str):
            model = next((one for one in self._models if _permits(one, owner)), None)
        else:
            model = self._names.get(name) or self._search(name)
        if model is None or not _permits(model, owner):
            raise self._unknown(name if isinstance(name, str) else "", owner)
        return model

    def _search(self, name: str) -> HostedModel | None:
        """Find a model by an adapter of its engine, by Ollama's tag of the newest version, or by a
        short name of its hub id.
        """
        for model in self._models:
            if model.engine is not None and name in model.engine.adapters:
                return model
        name = name.removesuffix(":latest")
        return self._names.get(name) or self._names.get(hub_id(name) or "")

    def _unknown(self, name: str, owner: str) -> ApiError:
        names = [model.name for model in self._models if _permits(model, owner)]
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        nothing = "no model for this key" if self._models else "there is no model yet"
        listed = "only " + ", ".join(names[:_LISTED]) if names else nothing
        return ApiError(
            404,
            f"model {name[:256]!r} is not served here, {listed}{more}",
            param="model",
            code="model_not_found",
        )

    def statuses(self, owner: str = "") -> Sequence[ModelStatus]:
        return [model.status() for model in self._models if _permits(model, owner)]

    def all_statuses(self) -> Sequence[ModelStatus]:
        """All models, whoever may use them."""
        return [model.status() for model in self._models]

    def status(self, name: str, owner: str = "") -> ModelStatus:
        return self.find(name, owner).status()

    # Loading models.

    async def until_ready(
        self, model: HostedModel, comment: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Wait until requests may use a model, loading it if need be; requests share one load.

        comment: called from time to time meanwhile. Raises QueueFull if too many requests wait,
        ApiError(503) with the reason if the model cannot be loaded.
        """
        if model.ready:
            return
        if len(model.waiters) >= self._flags.max_load_queue:
            raise QueueFull(
                f"{len(model.waiters)} requests wait for {model.name} to load (--max-load-queue); "
                "try again later"
            )
        waiter = object()
        model.waiters.add(waiter)
        try:
            while not model.ready and waiter not in model.admitted:
                self._check_open()
                await self._finish(self._load_task(model), comment)
        finally:
            model.waiters.discard(waiter)
            model.admitted.discard(waiter)

    def _check_open(self) -> None:
        if self.closing:
            raise shutting_down()

    async def _finish(
        self, task: asyncio.Task[None], comment: Callable[[], Awaitable[None]] | None
    ) -> None:
        """Wait for a task, which goes on if the request that waits is cancelled."""
        timeout = None if comment is None else self.comment_interval
        while not task.done():
            done, _ = await asyncio.wait({task}, timeout=timeout)
            if not done and comment is not None:
                await comment()
        task.result()

    def _load_task(self, model: HostedModel) -> asyncio.Task[None]:
        if model.loading is None:
            model.loading = self._spawn(self._load(model))
            model.loading.add_done_callback(lambda task: self._loaded(model, task))
        return model.loading

    def _loaded(self, model: HostedModel, task: asyncio.Task[None]) -> None:
        model.loading = None
        if not task.cancelled():
            task.exception()  # retrieved, in case nobody waits any more
        self._expiring.set()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, model: HostedModel) -> None:
        """Make a model ready. Raises ApiError(503) with the reason if that fails."""
        began = time.monotonic()
        try:
            await self._wait_to_leave(model)
            if model.engine is not None and model.engine.dead is not None:
                log.error("Model %s: its engine has died: %s", model.name, model.engine.dead)
                await model.close()
            config = None if model.state == "sleeping" else await model.prepare()
            turn: AbstractAsyncContextManager[Any] = (
                nullcontext() if self.budget is None else self._one_load
            )
            async with turn:
                await self._wait_to_leave(model)
                await self._make_room(model, model.needed - model.reserved)
                if model.state == "sleeping":
                    await model.wake()
                else:
                    await model.open(config or await model.prepare(), self.stores, self.loopback)
                await self._check_budget(model)
                model.admitted = set(model.waiters)
        except Exception as error:
            raise await self._failure(model, error) from error
        log.info(
            "Model %s is loaded: %d MiB, %.1f s",
            *(model.name, model.memory >> 20, time.monotonic() - began),
        )

    async def _failure(self, model: HostedModel, error: Exception) -> ApiError:
        """Clean up after a load that failed, and describe why."""
        known = isinstance(error, ModulmError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        log.error("Model %s cannot be loaded: %s", model.name, reason, exc_info=not known)
        if model.engine is not None and model.state == "loading":
            await model.close()
        if model.engine is None:
            model.state, model.error = "failed", reason
        return ApiError(
            503,
            f"model {model.name!r} cannot be loaded: {reason}",
            code="model_load_failed",
            headers={"Retry-After": "10"},
        )

    async def _wait_to_leave(self, model: HostedModel) -> None:
        while model.leaving is not None:
            await asyncio.wait({model.leaving})

    # The memory budget.

    def _in_use(self) -> int:
        return sum(model.reserved for model in self.models)

    async def _make_room(self, model: HostedModel, more: int) -> None:
        """Unload others until `more` bytes fit into the budget. If they cannot, raises ModulmError
        and unloads none.

        Those that nobody uses go first, the longest unused first of all; then running requests of
        the others end, and new ones wait.
        """
        if self.budget is None:
            return
        if model.reserved + more > self.budget - self._pinned_beside(model):
            raise await self._too_large(model, model.reserved + more, self.budget)
        while self._in_use() + more > self.budget:
            victims = [one for one in self.models if one is not model and _is_evictable(one)]
            if not victims:
                raise await self._too_large(model, model.reserved + more, self.budget)
            await self._leave(min(victims, key=_last_resort), evicted=True)

    def _pinned_beside(self, model: HostedModel) -> int:
        """Bytes of other models that stay."""
        others = (one for one in self.models if one is not model)
        return sum(one.reserved for one in others if one.settings.pinned)

    async def _too_large(self, model: HostedModel, size: int, budget: int) -> ModulmError:
        """The error about a model that does not fit, with what to change."""
        pinned = self._pinned_beside(model)
        beside = f" beside {pinned >> 20} MiB of pinned models" if pinned else ""
        larger = f"--memory-budget {-(-(size + pinned) >> 20)}MiB"
        changes = [*await model.changes_within(budget - pinned), larger]
        return ModulmError(
            f"it needs {size >> 20} MiB, and --memory-budget has {budget - pinned >> 20} of "
            f"{budget >> 20} MiB for it{beside}. Set {', or '.join(changes)}"
        )

    async def _check_budget(self, model: HostedModel) -> None:
        """Keep to the budget if a model is larger than estimated. Raises ModulmError if it does
        not fit even alone.
        """
        try:
            await self._make_room(model, 0)
        except ModulmError:
            await model.close()
            raise

    async def _leave(self, model: HostedModel, *, evicted: bool = False) -> None:
        """Let running requests of a model end, then stop it or put it to sleep."""
        if model.leaving is None:
            model.leaving = self._spawn(self._unload(model, evicted))
        await asyncio.wait({model.leaving})

    async def _unload(self, model: HostedModel, evicted: bool) -> None:
        try:
            await model.until_idle()
            level = model.settings.sleep if evicted and model.state == "loaded" else 0
            if level and model.engine is not None and model.engine.dead is None:
                before = model.memory
                await model.sleep(level)
                log.info("Model %s sleeps: %d MiB", model.name, model.memory >> 20)
                if model.memory < before:
                    return
            await model.close()
            log.info("Model %s is unloaded", model.name)
        except Exception:
            log.exception("Model %s did not end properly", model.name)
            with suppress(Exception):
                await model.close()
        finally:
            model.leaving = None
            if model in self._removed and model.engine is None:
                self._removed.remove(model)

    # Watching them.

    async def start(self) -> None:
        self._patrol = self._spawn(self._watch())
        for model in list(self._models):
            if model.settings.preload:
                with suppress(ApiError):  # logged; the next request tries again
                    await self.until_ready(model)

    async def stop(self) -> None:
        self.closing = True
        for model in self.models:
            model.abandon()
        loads = [model.loading for model in self.models if model.loading is not None]
        if self._patrol is not None:
            self._patrol.cancel()
        try:
            await _ended(loads)
            await _ended([model.leaving for model in self.models if model.leaving is not None])
        finally:
            await _ended([self._spawn(model.stop_routes()) for model in self.models])

    def shutdown(self) -> None:
        """End all engines; called when the event loop has ended."""
        for model in self.models:
            if model.engine is not None:
                model.engine.shutdown()

    def touched(self) -> None:
        """Notice that a model may expire earlier than before."""
        self._expiring.set()

    async def _watch(self) -> None:
        """Unload models whose time is over, and keep measured memory within the budget."""
        while True:
            self._expiring.clear()
            now = time.monotonic()
            for model in self.models:
                if _is_expired(model, now):
                    self._spawn(self._leave(model, evicted=True))
            pause = self._pause()
            try:
                if self.budget is not None:
                    await self._keep_budget()
                await self.discover()
            except Exception:
                log.exception("Models cannot be watched now")
                pause = _MEASURE
            with suppress(OSError):  # a TimeoutError is one; nobody else watches them
                await asyncio.wait_for(self._expiring.wait(), pause)

    def _pause(self) -> float | None:
        """Seconds until a model expires or memory is measured; None: neither will happen."""
        now = time.monotonic()
        pauses = [
            max(0.1, model.expires - now)
            for model in self.models
            if model.state == "loaded" and model.expires is not None
            and not model.settings.pinned
        ]  # fmt: skip
        if self.budget is not None and any(model.engine is not None for model in self.models):
            pauses.append(_MEASURE)
        if self._flags.models_dir is not None:
            pauses.append(_MEASURE)
        return min(pauses, default=None)

    async def _keep_budget(self) -> None:
        for model in self.models:
            if model.state in ("loaded", "sleeping") and model.leaving is None:
                await model.measure()
        over = self.budget is not None and self._in_use() > self.budget
        idle = [one for one in self.models if _is_evictable(one) and not one.busy]
        if over and idle and not self._one_load.locked():
            await self._leave(min(idle, key=_last_resort), evicted=True)
            self._expiring.set()

    # What people ask for.

    async def load(self, name: str, owner: str = "") -> ModelStatus:
        model = self.find(name, owner)
        await self.until_ready(model)
        return model.status()

    async def unload(self, name: str, owner: str = "") -> ModelStatus:
        model = self.find(name, owner)
        if model.loading is not None:
            await asyncio.wait({model.loading})
        if model.engine is not None:
            await self._leave(model)
        return model.status()

    async def discover(self) -> bool:
        """Look for models that were added to `--models-dir`; returns whether there are any."""
        now = time.monotonic()
        if self._flags.models_dir is None or now < self._looked + _LOOK_AGAIN:
            return False
        self._looked = now
        try:
            settings = await asyncio.to_thread(self._read)
        except (ModulmError, OSError) as error:
            if str(error) != self._unreadable:
                self._unreadable = str(error)
                log.warning("No new models are found: %s", error)
            return False
        self._unreadable = ""
        known = set(self._names)
        new = [one for one in settings if known.isdisjoint(one.names)]
        if new:
            log.info("New models: %s", ", ".join(one.name for one in new))
            self._models += map(HostedModel, new)
            self._index()
        return bool(new)

    async def reload(self) -> ModelChanges:
        settings = {one.name: one for one in await asyncio.to_thread(self._read)}
        old = {model.name: model for model in self._models}
        added = [name for name in settings if name not in old]
        removed = [name for name in old if name not in settings]
        changed = []
        for name in settings.keys() & old.keys():
            model = old[name]
            if model.settings != settings[name]:
                changed.append(name)
                other_engine = model.settings.config != settings[name].config
                model.settings = settings[name]
                if other_engine:
                    model.estimate = None
                    model.needed = 0 if model.engine is None else model.needed
                    self._retire(model)
        self._removed += [old[name] for name in removed if old[name].in_memory]
        for name in removed:
            self._retire(old[name])
        self._models = [old.get(name) or HostedModel(one) for name, one in settings.items()]
        self._index()
        self._expiring.set()
        return ModelChanges(tuple(added), tuple(sorted(changed)), tuple(removed))

    def _retire(self, model: HostedModel) -> None:
        """Unload a model whose settings have changed, once its requests have ended."""
        if model.in_memory:
            self._spawn(self._retired(model))

    async def _retired(self, model: HostedModel) -> None:
        if model.loading is not None:
            await asyncio.wait({model.loading})
        if model.engine is not None:
            await self._leave(model)

    async def drain(self, timeout: float | None) -> bool:
        """Wait until no request uses a model, then abort the others; returns whether none was
        left.
        """
        engines = [model.engine for model in self.models if model.engine is not None]
        drained = await asyncio.gather(
            *(engine.drain(timeout) for engine in engines if engine.dead is None),
            return_exceptions=True,
        )
        return all(result is True or isinstance(result, EngineDead) for result in drained)


def _permits(model: HostedModel, owner: str) -> bool:
    owners, key = model.settings.owners, current_key()
    return (owners is None or owner in owners) and any(
        allows(key, name) for name in model.settings.names
    )


def _is_evictable(model: HostedModel) -> bool:
    return (
        model.engine is not None
        and model.memory > 0
        and model.state in ("loaded", "sleeping", "stopping")
        and not model.settings.pinned
    )


def _last_resort(model: HostedModel) -> tuple[bool, float]:
    """The order in which models are unloaded."""
    return model.busy or bool(model.waiters), model.last_used or 0.0


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until tasks have ended. They go on if the caller is cancelled."""
    if tasks:
        await asyncio.wait(tasks)


def _is_expired(model: HostedModel, now: float) -> bool:
    return (
        model.state == "loaded"
        and model.leaving is None
        and model.expires is not None
        and model.expires <= now
        and not model.settings.pinned
        and not model.busy
        and not model.waiters
    )
