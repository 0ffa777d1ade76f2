"""Weight updates and pauses of a serving engine, with vLLM's method names."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modulm_frontend.weight_updates import joined_checksums, table_of
from modulm_weight_transfer import functions
from modulm_weight_transfer.engine import WeightState

__all__ = ["Training", "keeps_back"]

#: Seconds between two checks whether requests have ended, or an update has been checked.
_LOOK = 0.02


def keeps_back(while_asleep: bool, state: WeightState) -> bool:
    """Whether new requests wait: while paused, asleep at level 0, or `while_asleep` at any."""
    if state.paused is not None:
        return True
    return state.asleep is not None and (while_asleep or state.asleep == 0)


class Training(ABC):
    """Methods of `AsyncLLM` for trainers. Updates run between two steps while requests continue;
    pause first if no request may mix tokens of two weight versions.
    """

    @abstractmethod
    async def run_weights(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run an operation of `EngineWeights` in each engine; returns the resulting state."""

    @abstractmethod
    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function in every worker; see `EngineClient.collective_rpc`."""

    @property
    def weight_version(self) -> int:
        """The number of updates so far, or the value set by `update_weight_version`."""
        return 0

    async def init_weight_transfer_engine(self, init_request: Any = None) -> None:
        """Connect the workers to the trainer with the backend of `weight_transfer_config`.

        init_request: the backend's `init_info`, or a table with that key. Raises UnsupportedError
        without a backend.
        """
        await self.run_weights("init", init_info=dict(table_of(init_request or {}, "init_info")))

    async def start_weight_update(
        self, is_checkpoint_format: bool = True, partial: bool = False
    ) -> None:
        """Begin an update; discards an unfinished one.

        partial: tensors that are not sent keep their values. Otherwise all tensors must be sent.
        """
        await self.run_weights("start", is_checkpoint_format=is_checkpoint_format, partial=partial)

    async def update_weights(self, request: Any) -> None:
        """Receive tensors. request: the backend's `update_info`, or a table with that key.

        Raises RequestError naming tensors that are unknown or have a wrong shape or non-finite
        values; the weights are unchanged then.
        """
        info = dict(table_of(request, "update_info"))
        state = await self.run_weights("update", update_info=info, wait=False)
        while state["checking"]:  # in threads, while steps go on
            await asyncio.sleep(_LOOK)
            state = await self.run_weights("verify", wait=False)

    async def finish_weight_update(self) -> None:
        """Switch to the new weights, increment the weight version and clear the prefix cache.

        Raises RequestError naming missing tensors; the old weights stay in use then.
        """
        await self.run_weights("finish")

    async def shutdown_weight_transfer_engine(self) -> None:
        """Disconnect from the trainer."""
        await self.run_weights("shutdown")

    async def get_weight_version(self) -> int:
        """Ask the engine for its `weight_version`."""
        version: int = (await self.run_weights("info"))["weight_version"]
        return version

    async def update_weight_version(self, weight_version: int) -> None:
        """Set the weight version, for example to the trainer's step."""
        await self.run_weights("set_version", weight_version=weight_version)

    async def compute_weight_checksums(self) -> dict[str, str]:
        """Compute the SHA-256 of each weight of each worker, as the worker holds it."""
        return joined_checksums(await self.collective_rpc(functions.compute_checksums))

    async def reset_weights(self) -> None:
        """Set all weights to zero and clear the prefix cache, to test updates."""
        for answer in await self.collective_rpc(functions.reset_weights):
            functions.value_of(answer)
        await self.reset_prefix_cache()

    async def release_kv_cache_memory(self) -> None:
        """Free the memory of the KV cache of an engine that sleeps at level 0, until `wake_up`.

        Raises RequestError while requests run, UnsupportedError without --enable-sleep-mode.
        """
        await self.run_weights("release_caches")

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Hold new requests until `resume_generation`; returns when none is running.

        mode: "abort" aborts running requests, "wait" lets them finish, "keep" suspends them.
        clear_cache: clear the prefix cache, unless requests are kept.
        """
        state = await self.run_weights("pause", mode=mode)
        while mode != "keep" and state["busy"] and state["paused"] == mode:
            await asyncio.sleep(_LOOK)
            state = await self.run_weights("info")
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Resume requests."""
        await self.run_weights("resume")

    @abstractmethod
    async def is_paused(self) -> bool:
        """Whether generation is paused."""

    @abstractmethod
    async def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; running requests continue."""
