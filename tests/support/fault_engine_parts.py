"""What reaches the awaits of an engine in this process: one short use of all that it is asked for.

Its executor is arithmetic. Each call raises what its callers handle, or gives the right result.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from fault_parts import PARTS, Part

import modulm
from modulm import AsyncLLM, BeamSearchParams, SamplingParams
from modulm.contracts.sampling import OutputKind, PoolingParams
from modulm.errors import ModulmError
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import check_empty
from modulm.testing.fakes import FakeExecutor, Group

SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
LONG = SHORT.with_(max_tokens=120, output_kind=OutputKind.DELTA)


def _part(run: Part) -> Part:
    PARTS[run.__name__.replace("_", " ")] = run
    return run


@cache
def _checkpoint() -> tuple[tempfile.TemporaryDirectory[str], str]:
    folder = tempfile.TemporaryDirectory()
    return folder, str(make_tiny(Path(folder.name) / "tiny", "LlamaForCausalLM"))


class Arithmetic(FakeExecutor):
    """Two rows in a cache of a thousand tokens."""

    def __init__(self) -> None:
        super().__init__((Group(16, 64),))


async def _collect(source: Any) -> list[Any]:
    return [output async for output in source]


async def _ask(call: Awaitable[Any]) -> Any:
    """What a call gives; None if it is refused."""
    try:
        return await call
    except (ModulmError, OSError):
        return None


async def _use(llm: AsyncLLM) -> None:
    await _ask(_collect(llm.generate("Hello " * 4000, SHORT, "too long")))
    outputs = await _collect(llm.generate("Hello", SHORT, "a"))
    assert len(outputs[-1].outputs[0].token_ids) == 3
    await _ask(_collect(llm.beam_search("Hello", BeamSearchParams(2, 2), "beams")))
    await _ask(_collect(llm.encode("Hello", PoolingParams(), "vector")))
    for call in (
        llm.check_health, llm.refresh_adapters, llm.reset_prefix_cache, llm.is_sleeping,
        llm.start_profile, llm.stop_profile, llm.reports, llm.sleep, llm.wake_up,
        llm.get_weight_version, llm.finish_weight_update, llm.init_weight_transfer_engine,
        llm.start_weight_update, llm.shutdown_weight_transfer_engine,
    ):  # fmt: skip
        await _ask(call())
    await _ask(llm.sleep(0))
    await _ask(llm.wake_up(["weights"]))
    await _ask(llm.update_weights({"update_info": {}}))
    await _ask(llm.update_weight_version(3))
    await _ask(llm.collective_rpc("no_function", 10.0))
    await _ask(llm.apply_model(len))
    reading = asyncio.ensure_future(_collect(llm.generate("Hello", LONG, "long")))
    try:
        while not llm.active and not reading.done():
            await asyncio.sleep(0.001)
        await _ask(llm.pause_generation(mode="wait"))
        waiting = asyncio.ensure_future(_collect(llm.generate("Hello", SHORT, "later")))
        await asyncio.sleep(0.01)
        await llm.resume_generation()
        await _ask(waiting)
        await _search_in_a_full_queue(llm)
        last = asyncio.ensure_future(_collect(llm.generate("Hello", LONG, "last")))
        while not llm.active and not last.done():
            await asyncio.sleep(0)
        try:
            await llm.drain(0.001)
        finally:
            last.cancel()
            await asyncio.gather(last, return_exceptions=True)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _search_in_a_full_queue(llm: AsyncLLM) -> None:
    """One that has begun waits for room."""
    params = BeamSearchParams(2, 12, ignore_eos=True)
    searching = asyncio.ensure_future(_ask(_collect(llm.beam_search("Hello", params, "search"))))
    while not llm.active and not searching.done():
        await asyncio.sleep(0)
    others = [_ask(_collect(llm.generate("Hello", LONG, f"o{index}"))) for index in range(10)]
    await asyncio.gather(searching, *others, return_exceptions=True)


@_part
def an_engine_in_this_process(folder: Path) -> None:
    """No request is left in it."""
    modulm.register("executors", "arithmetic", Arithmetic)
    llm = AsyncLLM(
        _checkpoint()[1], distributed_executor_backend="arithmetic", max_num_seqs=2,
        disable_frontend_multiprocessing=True, max_model_len=256, cpu_threads=1,
        enable_sleep_mode=True, max_num_queued_reqs=8,
    )  # fmt: skip

    async def main() -> None:
        async with asyncio.timeout(300):
            try:
                await _use(llm)
            finally:
                with suppress(ModulmError):
                    await llm.resume_generation()
                while llm.active:
                    await asyncio.sleep(0.001)

    try:
        asyncio.run(main())
        if llm.dead is None:
            engine = llm._core.core.loop  # type: ignore[attr-defined]
            engine.call(lambda: check_empty(engine)).result(300)
    finally:
        llm.shutdown()
        modulm.unregister("executors", "arithmetic")
