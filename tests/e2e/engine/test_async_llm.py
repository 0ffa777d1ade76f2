"""AsyncLLM, with its engine in a thread and in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from samples import parametrize_sample

from modulm import LLM, AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputs
from modulm.config import EngineConfig
from modulm.contracts.sampling import OutputKind
from modulm.errors import CheckpointError, EngineDead, QueueFull, RequestError, UnsupportedError
from modulm.plugins import current, register
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import check_empty
from modulm.testing.fakes import FakeExecutor, Group, Script, reference_tokens
from modulm_server.engine.core_client import ThreadCoreClient
from modulm_server.engine.spawn import EngineProcess

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind=OutputKind.DELTA)


class SlowFake(FakeExecutor):
    """5 ms per step; a request whose prompt begins with 13 crashes its first step."""

    def __init__(self) -> None:
        super().__init__((Group(16, 200),), step_delay=0.005, scripts=_script)


def _script(start: Any) -> Script | None:
    return Script(crash=0) if start.prompt[0] == 13 else None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM"))


def _flags(checkpoint: str, **more: Any) -> dict[str, Any]:
    return {"model": checkpoint, "kv_cache_memory_bytes": 1 << 24, "cpu_threads": 1} | more


@pytest.fixture(scope="module", params=["thread", "process"])
def config(request: pytest.FixtureRequest, checkpoint: str) -> EngineConfig:
    inside = request.param == "thread"
    return EngineConfig.from_keywords(
        **_flags(checkpoint, disable_frontend_multiprocessing=inside, max_num_seqs=8)
    )


@pytest.fixture(scope="module")
def llm(config: EngineConfig) -> Iterator[AsyncLLM]:
    made = AsyncLLM.from_config(config)
    yield made
    _idle(made)
    made.shutdown()


@pytest.fixture
def fake(checkpoint: str) -> Iterator[AsyncLLM]:
    """On an engine of 5 ms a step, in a thread."""
    register("executors", "slow-fake", SlowFake)
    made = AsyncLLM(
        **_flags(checkpoint),
        distributed_executor_backend="slow-fake",
        disable_frontend_multiprocessing=True,
        max_num_seqs=2,
        max_num_queued_reqs=3,
    )
    yield made
    made.shutdown()


def run(make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(600):
            await make()

    asyncio.run(limited())


async def collect(source: Any) -> list[Any]:
    return [output async for output in source]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.005)


def _idle(llm: AsyncLLM) -> None:
    assert llm.active == 0
    if isinstance(llm._core, ThreadCoreClient):
        engine = llm._core.core.loop
        engine.call(lambda: check_empty(engine)).result(300)


def test_kinds_of_output_agree(llm: AsyncLLM) -> None:
    async def main() -> None:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        kinds = await asyncio.gather(
            *(
                collect(llm.generate("Hello there", params.with_(output_kind=kind), f"r{kind}"))
                for kind in OutputKind
            )
        )
        cumulative, deltas, final = kinds
        texts = [output.outputs[0].text for output in cumulative]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        assert "".join(output.outputs[0].text for output in deltas) == texts[-1]
        ids = [token for output in deltas for token in output.outputs[0].token_ids]
        assert ids == cumulative[-1].outputs[0].token_ids
        assert [output.outputs[0].text for output in final] == [texts[-1]]
        assert all(outputs[-1].finished and not outputs[0].finished for outputs in kinds[:2])

    run(main)


def test_leaving_early_ends_the_request(llm: AsyncLLM) -> None:
    async def main() -> None:
        source = llm.generate("Hello", LONG, "left")
        await anext(source)
        await source.aclose()
        task = asyncio.ensure_future(collect(llm.generate("Hello", LONG, "cancelled")))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: llm.stats is not None and llm.stats.running == 0)
        assert llm.stats is not None
        assert llm.stats.usage == 0.0
        await collect(llm.generate("Hello", LONG.with_(max_tokens=2), "left"))
        assert llm.active == 0

    run(main)


def test_abort_gives_the_reader_an_end(llm: AsyncLLM) -> None:
    async def main() -> None:
        reading = asyncio.ensure_future(collect(llm.generate("Hello", LONG, "a")))
        await until(lambda: llm.active == 1)
        await llm.abort("a")
        await llm.abort("nobody")
        outputs = await reading
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"

    run(main)


def test_wrong_requests_raise_and_nothing_else_is_hurt(llm: AsyncLLM) -> None:
    async def main() -> None:
        wrong = [
            SamplingParams(temperature=-1),
            SamplingParams(structured_outputs=StructuredOutputs(regex="(")),
        ]
        for number, params in enumerate(wrong):
            with pytest.raises(RequestError):
                await collect(llm.generate("Hello", params, f"bad{number}"))
        good = await collect(llm.generate("Hello", LONG.with_(max_tokens=3), "good"))
        assert good[-1].outputs[0].finish_reason == "length"
        twice = llm.generate("Hello", LONG, "same")
        await anext(twice)
        with pytest.raises(RequestError, match="in use"):
            await collect(llm.generate("Hello", LONG, "same"))
        await twice.aclose()

    run(main)


def test_structured_output_logprobs_and_choices_cross_the_line(llm: AsyncLLM) -> None:
    async def main() -> None:
        choice = StructuredOutputs(choice=["yes", "no"])
        params = SamplingParams(n=2, seed=1, logprobs=1, prompt_logprobs=1, max_tokens=9)
        (output,) = await collect(
            llm.generate(
                "Well?",
                params.with_(structured_outputs=choice, output_kind=OutputKind.FINAL_ONLY),
                "s",
            )
        )
        assert {answer.text for answer in output.outputs} <= {"yes", "no"}
        assert all(len(a.logprobs) == len(a.token_ids) for a in output.outputs)
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        assert output.metrics.arrival_time < output.metrics.first_token_time

    run(main)


def test_operations(llm: AsyncLLM) -> None:
    async def main() -> None:
        prompt = {"prompt_token_ids": [20 + i for i in range(70)]}
        few = LONG.with_(max_tokens=2)
        await collect(llm.generate(prompt, few, "one"))
        hit = await collect(llm.generate(prompt, few, "two"))
        assert hit[-1].num_cached_tokens == 64
        assert await llm.reset_prefix_cache()
        miss = await collect(llm.generate(prompt, few, "three"))
        assert miss[-1].num_cached_tokens == 0
        with pytest.raises(UnsupportedError):
            await llm.sleep()
        await llm.check_health()
        assert await llm.drain(1.0)

    run(main)


def test_whoever_waits_for_an_operation_may_leave(llm: AsyncLLM) -> None:
    """A client that hangs up cancels what it waits for; engine and receiving thread go on."""

    async def main() -> None:
        for ask in (llm.is_sleeping, llm.reports, llm.reset_prefix_cache):
            waiting = asyncio.ensure_future(ask())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert await llm.is_sleeping() is False
        assert await llm.reports() == []
        *_, last = await collect(llm.generate("hi", SamplingParams(max_tokens=2), "after"))
        assert last.finished

    run(main)


def test_draining_aborts_what_takes_too_long(fake: AsyncLLM) -> None:
    async def main() -> None:
        reading = asyncio.ensure_future(collect(fake.generate("Hello", LONG, "a")))
        await until(lambda: fake.active == 1)
        assert not await fake.drain(0.05)
        assert (await reading)[-1].outputs[0].finish_reason == "abort"
        assert await fake.drain(1.0)

    run(main)


def test_a_slow_reader_gets_merged_deltas(fake: AsyncLLM) -> None:
    async def main() -> None:
        outputs = []
        async for output in fake.generate({"prompt_token_ids": [9, 9]}, LONG, "slow"):
            outputs.append(output)
            await asyncio.sleep(0.1)
        tokens = [token for output in outputs for token in output.outputs[0].token_ids]
        assert tokens == reference_tokens([9, 9], 200)
        assert len(outputs) < 60

    run(main)


def test_streams_may_gather_tokens(checkpoint: str) -> None:
    async def main() -> None:
        outputs = await collect(llm.generate("Hello", LONG.with_(max_tokens=10), "a"))
        assert len(outputs) <= 4
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 10
        for interval, most in ((2, 4), (8, 3)):  # the larger one holds
            params = LONG.with_(max_tokens=10, stream_interval=interval)
            outputs = await collect(llm.generate("Hello", params, "a"))
            assert len(outputs) <= most
        with pytest.raises(RequestError, match="stream_interval"):
            await collect(llm.generate("Hello", LONG.with_(stream_interval=0), "a"))

    flags = _flags(checkpoint, disable_frontend_multiprocessing=True, stream_interval=4)
    llm = AsyncLLM(**flags)
    run(main)
    llm.shutdown()


def test_a_full_queue_says_try_later(fake: AsyncLLM) -> None:
    async def main() -> None:
        params = LONG.with_(max_tokens=20)
        readers = [
            asyncio.ensure_future(collect(fake.generate("Hello", params, f"r{n}")))
            for n in range(9)
        ]
        results = await asyncio.gather(*readers, return_exceptions=True)
        refused = [result for result in results if isinstance(result, QueueFull)]
        assert len(refused) == 4
        assert all(r[-1].finished for r in results if not isinstance(r, QueueFull))
        _idle(fake)

    run(main)


def test_a_failed_step_and_a_dead_engine(fake: AsyncLLM) -> None:
    async def main() -> None:
        bad = {"prompt_token_ids": [13, 9]}
        for number in range(3):
            await fake.check_health()
            (output,) = await collect(fake.generate(bad, LONG, f"bad{number}"))
            assert output.outputs[0].finish_reason == "error"
            assert "scripted crash" in output.outputs[0].stop_reason
        await until(lambda: fake.dead is not None)
        with pytest.raises(EngineDead, match="scripted crash"):
            await fake.check_health()
        with pytest.raises(EngineDead):
            await collect(fake.generate("Hello", LONG, "late"))

    run(main)


def test_killing_the_engine_is_seen(checkpoint: str) -> None:
    async def main() -> None:
        readers = [
            asyncio.ensure_future(collect(llm.generate("Hello", LONG, f"r{n}"))) for n in range(4)
        ]
        await until(lambda: llm.stats is not None)
        os.kill(pid, signal.SIGKILL)
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(result, EngineDead) for result in results), results
        with pytest.raises(EngineDead, match="SIGKILL"):
            await llm.check_health()
        with pytest.raises(EngineDead):
            await collect(llm.generate("Hello", LONG, "late"))

    llm = AsyncLLM(**_flags(checkpoint))
    pid = llm._core._owned.pid
    # It was opened while the process loaded the model.
    assert llm.tokenizer is llm._core.early.tokenizer is not None
    run(main)
    llm.shutdown()


def test_what_goes_wrong_in_the_process_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        AsyncLLM(model=str(tmp_path / "nowhere"), cpu_threads=1)


def test_an_engine_whose_tokenizer_cannot_be_read_is_stopped(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise CheckpointError("the tokenizer is damaged")

    register("executors", "slow-fake", SlowFake)
    monkeypatch.setattr("modulm_server.engine.core_client.open_tokenizer", refuse)
    stopped: list[int] = []
    monkeypatch.setattr(SlowFake, "stop", lambda self: stopped.append(1))
    with pytest.raises(CheckpointError, match="damaged"):
        AsyncLLM(
            **_flags(checkpoint), distributed_executor_backend="slow-fake",
            disable_frontend_multiprocessing=True,
        )  # fmt: skip
    assert stopped


def test_several_front_ends_share_an_engine(checkpoint: str) -> None:
    async def main() -> None:
        params = LONG.with_(max_tokens=30)
        one, other = await asyncio.gather(
            collect(first.generate("Hello", params, "a")),
            collect(second.generate("Hello", params, "b")),
        )
        ids = [[t for o in outputs for t in o.outputs[0].token_ids] for outputs in (one, other)]
        assert ids[0] == ids[1]
        assert len(ids[0]) == 30
        reading = asyncio.ensure_future(collect(first.generate("Hello", LONG, "c")))
        lost = asyncio.ensure_future(collect(second.generate("Hello", LONG, "d")))
        await until(lambda: first.stats is not None and first.stats.running == 2)
        second.shutdown()
        with pytest.raises(EngineDead):
            await lost
        assert (await reading)[-1].finished
        await until(lambda: first.stats is not None and first.stats.running == 0)

    engine = EngineProcess()
    engine.start(EngineConfig.from_keywords(**_flags(checkpoint)), current())
    first, second = AsyncLLM.connect(engine.address), AsyncLLM.connect(engine.address)
    assert first.info == second.info
    run(main)
    first.shutdown()
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


@pytest.mark.exhaustive
def test_the_engine_goes_with_its_owner(checkpoint: str) -> None:
    code = f"""
        import os, signal
        from modulm import AsyncLLM
        llm = AsyncLLM(**{_flags(checkpoint)!r})
        print(llm._core._owned.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    owner = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    pid = int(owner.stdout)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the engine's process is still there")


def test_beams_are_those_of_the_offline_engine_and_end_when_told(
    llm: AsyncLLM, checkpoint: str
) -> None:
    params = BeamSearchParams(3, 12, length_penalty=0.7)
    prompt = {"prompt_token_ids": [7 + (i * 37) % 400 for i in range(40)]}

    async def main() -> None:
        answers = await asyncio.gather(
            *(collect(llm.beam_search(prompt, params, f"beam{n}")) for n in range(3))
        )
        for (output,) in answers:
            assert output.finished
            assert [list(answer.token_ids) for answer in output.outputs] == expected
            scores = [
                a.cumulative_logprob / len(a.token_ids) ** params.length_penalty
                for a in output.outputs
            ]
            assert scores == sorted(scores, reverse=True)
        long = params.with_(max_tokens=200, ignore_eos=True)
        reading = asyncio.ensure_future(collect(llm.beam_search(prompt, long, "long")))
        await until(lambda: bool(llm._requests))
        with pytest.raises(RequestError, match="in use"):
            await collect(llm.beam_search(prompt, long, "long"))
        await llm.abort("long")
        assert {answer.finish_reason for answer in (await reading)[-1].outputs} == {"abort"}
        reading = asyncio.ensure_future(collect(llm.beam_search(prompt, long, "drained")))
        await until(lambda: bool(llm._requests))
        assert not await llm.drain(0.01)
        assert {answer.finish_reason for answer in (await reading)[-1].outputs} == {"abort"}
        reading = asyncio.ensure_future(collect(llm.beam_search(prompt, long, "left")))
        await until(lambda: bool(llm._requests))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert llm.active == 0

    with LLM(**_flags(checkpoint)) as offline:
        (found,) = offline.beam_search(prompt, params)
        expected = [beam.tokens[40:] for beam in found.sequences]
    run(main)


def test_a_search_that_was_accepted_waits_for_a_full_queue(fake: AsyncLLM) -> None:
    async def main() -> None:
        search = asyncio.ensure_future(
            collect(fake.beam_search("Hello", BeamSearchParams(1, 30, ignore_eos=True), "beam"))
        )
        await until(
            lambda: bool(fake._beam_searches) and fake._beam_searches["beam"].beams._length > 2
        )
        params = LONG.with_(max_tokens=20)
        others = [
            asyncio.ensure_future(collect(fake.generate("Hello", params, f"r{n}")))
            for n in range(8)
        ]
        results = await asyncio.gather(*others, return_exceptions=True)
        assert any(isinstance(result, QueueFull) for result in results)
        (output,) = await search
        assert [answer.finish_reason for answer in output.outputs] == ["length"]
        _idle(fake)

    run(main)


@pytest.mark.exhaustive
@parametrize_sample("inside", [True, False], every=2, ids=["thread", "process"])
def test_sleeping_gives_memory_back_and_changes_nothing(checkpoint: str, inside: bool) -> None:
    async def main() -> None:
        prompt = {"prompt_token_ids": [20 + i for i in range(70)]}
        params = LONG.with_(max_tokens=6, output_kind=OutputKind.FINAL_ONLY, logprobs=1)
        (before,) = await collect(llm.generate(prompt, params, "before"))
        running = llm.generate(prompt, LONG, "running")
        await anext(running)
        with pytest.raises(RequestError, match="running"):
            await llm.sleep(1)
        await running.aclose()
        with pytest.raises(RequestError, match="level"):
            await llm.sleep(3)
        for level in (1, 2):
            awake = memory()
            await llm.sleep(level)
            assert await llm.is_sleeping()
            assert memory() < awake - (40 << 20)
            with pytest.raises(QueueFull, match="asleep"):
                await collect(llm.generate(prompt, params, "early"))
            await llm.wake_up()
            await llm.wake_up()
            assert not await llm.is_sleeping()
            (after,) = await collect(llm.generate(prompt, params, f"after{level}"))
            assert after.num_cached_tokens == 0
            assert after.outputs == before.outputs

    def memory() -> int:
        """Bytes of address space that the engine's process has; untouched caches count."""
        pid = "self" if inside else str(llm._core._owned.pid)
        pages = Path(f"/proc/{pid}/statm").read_text().split()[0]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    large = {"kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 512, "max_model_len": 256}
    llm = AsyncLLM(
        **_flags(checkpoint) | large,
        enable_sleep_mode=True,
        disable_frontend_multiprocessing=inside,
    )
    run(main)
    llm.shutdown()


def test_an_engine_sleeps_only_if_it_was_started_for_that(llm: AsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(UnsupportedError, match="--enable-sleep-mode"):
            await llm.sleep()

    run(main)
