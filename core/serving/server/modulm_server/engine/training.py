"""What trainers ask of an engine that serves: weight updates and pauses, by vLLM's names."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from modulm_frontend.weight_updates import table_of
from modulm_weight_transfer.engine import WeightState

__all__ = ["Training", "keeps_back"]

#: Seconds between two looks whether requests have ended.
_LOOK = 0.02


def keeps_back(while_asleep: bool, state: WeightState) -> bool:
    """Whether new requests wait: in a pause, while asleep at level 0, or `while_asleep` at all."""
    if state.paused is not None:
        return True
    return state.asleep is not None and (while_asleep or state.asleep == 0)


class Training(ABC):
    """The methods of `AsyncLLM` for trainers. Updates run between two steps, beside requests:
    pause first if no request may have tokens of two versions.
    """

    @abstractmethod
    async def run_weights(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run an operation of `EngineWeights` in each engine; the state afterwards."""

    @property
    def weight_version(self) -> int:
        """How often the weights were updated, or what `update_weight_version` has set."""
        return 0

    async def init_weight_transfer_engine(self, init_request: Any = None) -> None:
        """Have the workers meet the trainer, with the backend of `weight_transfer_config`.

        init_request: the backend's `init_info`, alone or under that name. Raises UnsupportedError
        without a backend.
        """
        await self.run_weights("init", init_info=dict(table_of(init_request or {}, "init_info")))

    async def start_weight_update(
        self, is_checkpoint_format: bool = True, partial: bool = False
    ) -> None:
        """Begin an update; one that was not finished is dropped.

        partial: tensors that do not come stay as they are. Without it, all have to come.
        """
        await self.run_weights("start", is_checkpoint_format=is_checkpoint_format, partial=partial)

    async def update_weights(self, request: Any) -> None:
        """Take tensors. request: the backend's `update_info`, alone or under that name.

        Raises RequestError naming tensors that are unknown, have another shape or values that are
        not finite; the weights are unchanged then.
        """
        await self.run_weights("update", update_info=dict(table_of(request, "update_info")))

    async def finish_weight_update(self) -> None:
        """Use the new weights. The weight version rises and cached prefixes are forgotten.

        Raises RequestError naming tensors that are missing; the old weights are used then.
        """
        await self.run_weights("finish")

    async def shutdown_weight_transfer_engine(self) -> None:
        """Leave the trainer."""
        await self.run_weights("shutdown")

    async def get_weight_version(self) -> int:
        """See `weight_version`; asks the engine."""
        version: int = (await self.run_weights("info"))["weight_version"]
        return version

    async def update_weight_version(self, weight_version: int) -> None:
        """Give the weights another number, such as the trainer's step."""
        await self.run_weights("set_version", weight_version=weight_version)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Keep new requests back until `resume_generation`, and return when none runs.

        mode: "abort" ends those that run, "wait" lets them finish, "keep" stops them where they
        are, to go on later. clear_cache: forget cached prefixes, unless requests are kept.
        """
        state = await self.run_weights("pause", mode=mode)
        while mode != "keep" and state["busy"] and state["paused"] == mode:
            await asyncio.sleep(_LOOK)
            state = await self.run_weights("info")
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Run requests again."""
        await self.run_weights("resume")

    @abstractmethod
    async def is_paused(self) -> bool:
        """Whether requests are kept back."""

    @abstractmethod
    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; running requests go on."""
