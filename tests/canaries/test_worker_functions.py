"""Calls into workers through every front end, with functions and a worker of a package."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Iterator
from contextlib import aclosing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from samples import parametrize_sample, sample

from modulm import LLM, AsyncLLM, SamplingParams
from modulm.contracts.sampling import OutputKind
from modulm.errors import (
    ConfigError,
    EngineError,
    EngineTimeout,
    NotFound,
    RequestError,
    UnsupportedError,
)
from modulm.testing.checkpoints import make_tiny

FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "num_gpu_blocks_override": 64,
    "cpu_threads": 1,
    "worker_cls": "modulm_workers_canary:LabelledWorker",
    "worker_extension_cls": "modulm_workers_canary:Doubling",
}
#: Flags of the front end and the ranks that its calls reach.
FRONT_ENDS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "thread": ({"disable_frontend_multiprocessing": True}, [0]),
    "process": ({}, [0]),
    "ranks": ({"tensor_parallel_size": 2, "async_scheduling": True}, [0, 1]),
    "replicas": ({"data_parallel_size": 2}, [0, 0]),
}
PROMPT = {"prompt_token_ids": [5, 9, 40, 7]}
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_kind=OutputKind.DELTA)


@frozen
class Engine:
    """An engine, the ranks that calls reach, and the loop that it is used from."""

    llm: AsyncLLM
    ranks: list[int]
    runner: asyncio.Runner
    inside: bool

    def call(self, method: Any, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        return self.runner.run(self.llm.collective_rpc(method, timeout, args, kwargs))

    def generate(self, prefix: str = "") -> list[int]:
        return self.runner.run(generate(self.llm, prefix))


async def generate(llm: AsyncLLM, name: str, begun: asyncio.Event | None = None) -> list[int]:
    tokens: list[int] = []
    async with aclosing(llm.generate(PROMPT, PARAMS, name)) as outputs:
        async for output in outputs:
            tokens += output.outputs[0].token_ids
            if begun is not None:
                begun.set()
    return tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), "Qwen3ForCausalLM"))


@pytest.fixture(scope="module", autouse=True)
def canary(tmp_path_factory: pytest.TempPathFactory, installed: Any) -> Iterator[None]:
    with installed("workers", tmp_path_factory.mktemp("site")):
        yield


@pytest.fixture(scope="module", params=sample(FRONT_ENDS, every=2))
def engine(request: pytest.FixtureRequest, folder: str, canary: None) -> Iterator[Engine]:
    flags, ranks = FRONT_ENDS[request.param]
    with asyncio.Runner() as runner:
        llm = AsyncLLM(folder, **FLAGS, **flags)
        yield Engine(llm, ranks, runner, request.param == "thread")
        llm.shutdown()


def test_each_worker_answers(engine: Engine) -> None:
    answers = engine.call("checksum", 2.0, digits=1)
    assert [answer["rank"] for answer in answers] == engine.ranks
    for answer in answers:
        assert answer["sum"] == round(2 * answer["norms"].sum(), 1) > 0


def test_methods_of_the_worker(engine: Engine) -> None:
    assert engine.call("label", "!") == [f"rank {rank}!" for rank in engine.ranks]
    for name in ("_secret", "sleep", "close", "nothing"):  # the engine's own are not called
        with pytest.raises(NotFound, match=name):
            engine.call(name)


def test_methods_of_an_extension(engine: Engine, folder: str) -> None:
    assert engine.call("double_rank", plus=1) == [2 * rank + 1 for rank in engine.ranks]
    flags = {**FLAGS, "worker_extension_cls": "modulm_workers_canary:Closing"}
    with pytest.raises(ConfigError, match="worker_extension_cls.*workers have close already"):
        LLM(folder, **flags)


def test_functions_of_the_model(engine: Engine) -> None:
    count_weights = import_module("modulm_workers_canary").count_weights
    counts = engine.runner.run(engine.llm.apply_model(count_weights))
    assert len(counts) == len(engine.ranks)
    assert min(counts) > 0
    if not engine.inside:
        with pytest.raises(RequestError, match="cannot be sent to another process"):
            engine.runner.run(engine.llm.apply_model(lambda model: 1))


def test_functions_themselves(engine: Engine) -> None:
    checksum = import_module("modulm_workers_canary").checksum
    assert [answer["rank"] for answer in engine.call(checksum)] == engine.ranks
    with pytest.raises(RequestError, match="is not the name of a worker function"):
        engine.call("os:getpid")
    if engine.inside:
        assert engine.call(lambda worker: worker.rank) == [0]
    else:
        with pytest.raises(RequestError, match=r"modulm\.worker_functions"):
            engine.call(lambda worker: worker.rank)


def test_a_failing_rank_is_named_and_hurts_no_request(engine: Engine) -> None:
    expected, failing = engine.generate(), engine.ranks[-1]

    async def fail_beside() -> list[int]:
        begun = asyncio.Event()
        running = asyncio.create_task(generate(engine.llm, "beside", begun))
        await begun.wait()
        text = rf"worker {failing}: fail_on raised ValueError: on purpose"
        with pytest.raises(EngineError, match=text):
            await engine.llm.collective_rpc("fail_on", args=[failing])
        return await running

    assert engine.runner.run(fail_beside()) == expected


def test_what_cannot_be_sent(engine: Engine) -> None:
    if engine.inside:
        assert engine.call("make_tensor")[0].tolist() == [1, 1]
        return
    with pytest.raises(EngineError, match="the answer cannot be sent: a Tensor"):
        engine.call("make_tensor")
    with pytest.raises(RequestError, match="the arguments cannot be sent: a object"):
        engine.call("checksum", object())
    assert len(engine.call("checksum")) == len(engine.ranks)


def test_timeout(engine: Engine, tmp_path: Path) -> None:
    expected, path = engine.generate(), tmp_path / "lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(EngineTimeout):
            engine.call("wait_for_lock", str(path), timeout=0.01)
    assert engine.generate() == expected


def test_another_front_end(engine: Engine) -> None:
    """It has not started the engine: it calls by name only."""
    if engine.llm.address is None:
        return
    other = AsyncLLM.connect(engine.llm.address)
    names = engine.runner.run(other.collective_rpc("label", args=["?"]))
    assert names == [f"rank {rank}?" for rank in engine.ranks]
    with pytest.raises(UnsupportedError, match="only the process that started the engine"):
        engine.runner.run(other.collective_rpc(import_module("modulm_workers_canary").checksum))
    other.shutdown()


@parametrize_sample("ranks", [1, 2], every=2)
def test_llm(folder: str, ranks: int, tmp_path: Path) -> None:
    """In the caller's thread, with ranks in it or in processes of their own."""
    with LLM(folder, tensor_parallel_size=ranks, **FLAGS) as llm:
        (before,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
        answers = llm.collective_rpc("checksum", kwargs={"digits": 2})
        assert [answer["rank"] for answer in answers] == list(range(ranks))
        with pytest.raises(EngineError, match=f"worker {ranks - 1}: fail_on raised"):
            llm.collective_rpc("fail_on", args=[ranks - 1])
        path, late = (
            tmp_path / "lock",
            "worker 0, worker 1 within" if ranks > 1 else "within 0.01 s",
        )
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(EngineTimeout, match=late):
                llm.collective_rpc("wait_for_lock", 0.01, [str(path)])
        assert llm.apply_model(import_module("modulm_workers_canary").count_weights)[0] > 0
        (after,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
