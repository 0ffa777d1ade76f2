"""Weight updates, pauses and sleep of engines that serve, through every front end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch
from attrs import frozen
from safetensors.torch import load_file
from torch import Tensor

from modulm import LLM, AsyncLLM, SamplingParams
from modulm.contracts.sampling import OutputKind
from modulm.errors import QueueFull, RequestError
from modulm.testing.checkpoints import make_tiny
from modulm_server.app import create_app
from modulm_weights_shared_memory import SharedWeights

T = TypeVar("T")
FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "num_gpu_blocks_override": 128,
    "cpu_threads": 1,
}  # fmt: skip
SERVED: dict[str, Any] = {
    **FLAGS, "weight_transfer_config": {"backend": "shared_memory"}, "enable_sleep_mode": True,
    "engine_heartbeat_timeout": 300.0,
    "server_dev_mode": True, "served_model_name": ("M",), "skip_tokenizer_init": True,
}  # fmt: skip
FRONT_ENDS: dict[str, dict[str, Any]] = {
    "thread": {"disable_frontend_multiprocessing": True, "sleeping_requests": "wait"},
    "process": {},
    "replicas": {"data_parallel_size": 2},
}
PROMPT = {"prompt_token_ids": list(range(5, 45))}
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
LONG = SHORT.with_(max_tokens=200, output_kind=OutputKind.DELTA)


@frozen
class Engine:
    llm: AsyncLLM
    runner: asyncio.Runner
    name: str

    def run(self, awaitable: Awaitable[T]) -> T:
        async def await_it() -> T:
            return await asyncio.wait_for(awaitable, 300)

        return self.runner.run(await_it())


async def tokens(
    llm: AsyncLLM,
    name: str,
    params: SamplingParams = SHORT,
    seen: list[int] | None = None,
    ranges: list[tuple[int, int, int]] | None = None,
) -> list[int]:
    """Return the tokens. ranges: gets `weight_versions` of the last output."""
    found = [] if seen is None else seen
    async with aclosing(llm.generate(PROMPT, params, name)) as outputs:
        async for output in outputs:
            new = list(output.outputs[0].token_ids)
            found[:] = [*found, *new] if params.output_kind is OutputKind.DELTA else new
            if ranges is not None:
                ranges[:] = output.outputs[0].weight_versions
    return found


async def begin(
    llm: AsyncLLM, name: str, ranges: list[tuple[int, int, int]] | None = None
) -> tuple[asyncio.Task[list[int]], list[int]]:
    """A long request that has given its first tokens."""
    seen: list[int] = []
    running = asyncio.create_task(tokens(llm, name, LONG, seen, ranges))
    while not seen:
        await asyncio.sleep(0.01)
    return running, seen


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    old, new = (make_tiny(root / str(seed), "Qwen3ForCausalLM", seed=seed) for seed in (1, 2))
    return old, new


@pytest.fixture(scope="module")
def weights(folders: tuple[Path, Path]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    old, new = (load_file(folder / "model.safetensors") for folder in folders)
    return old, new


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> list[list[int]]:
    """What the old and the new weights answer."""
    found = []
    for folder in folders:
        with LLM(str(folder), **FLAGS) as llm:
            (output,) = llm.generate([PROMPT], SHORT, use_tqdm=False)
            found.append(list(output.outputs[0].token_ids))
    assert found[0] != found[1]
    return found


#: Tests of what front ends do in different ways.
IN_EACH = ("test_sleep_stops_scheduling_or_gives_memory_back", "test_routes")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`make test` runs all with replicas, and those of IN_EACH with a thread."""
    if "engine" in metafunc.fixturenames:
        names = ["replicas", *(["thread"] if metafunc.function.__name__ in IN_EACH else [])]
        front_ends = [
            pytest.param(name, marks=() if name in names else pytest.mark.exhaustive)
            for name in FRONT_ENDS
        ]
        metafunc.parametrize("engine", front_ends, indirect=True, scope="module")


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Iterator[Engine]:
    with asyncio.Runner() as runner:
        llm = AsyncLLM(str(folders[0]), **SERVED, **FRONT_ENDS[request.param])
        made = Engine(llm, runner, request.param)
        made.run(llm.init_weight_transfer_engine())
        yield made
        llm.shutdown()


async def update(llm: AsyncLLM, tensors: dict[str, Tensor]) -> None:
    with SharedWeights(tensors) as shared:
        await llm.start_weight_update()
        await llm.update_weights({"update_info": shared.info})
        await llm.finish_weight_update()


def test_all_engines_are_updated(
    engine: Engine, weights: tuple[dict[str, Tensor], ...], expected: list[list[int]]
) -> None:
    llm = engine.llm
    for number, (tensors, answer) in enumerate(
        zip((weights[1], weights[0]), expected[::-1], strict=True), llm.weight_version + 1
    ):
        engine.run(update(llm, tensors))
        assert llm.weight_version == engine.run(llm.get_weight_version()) == number
        for replica in range(2):  # the router sends the second one elsewhere
            assert engine.run(tokens(llm, f"{number}-{replica}")) == answer
    bad = {**weights[1], "model.norm.weight": torch.full((64,), torch.nan)}
    with pytest.raises(RequestError, match=r"model\.norm\.weight has NaN"):
        engine.run(update(llm, bad))
    assert engine.run(tokens(llm, "after")) == expected[0]
    assert llm.weight_version == number


def test_requests_that_are_kept_go_on_with_the_new_weights(
    engine: Engine, weights: tuple[dict[str, Tensor], ...], expected: list[list[int]]
) -> None:
    llm = engine.llm

    ranges: list[tuple[int, int, int]] = []

    async def keep() -> None:
        old = await tokens(llm, "alone", LONG)
        running, seen = await begin(llm, "kept", ranges)
        await llm.pause_generation(mode="keep")
        assert await llm.is_paused()
        waiting = asyncio.create_task(tokens(llm, "waiting"))
        await asyncio.sleep(0.05)
        before = len(seen)
        await update(llm, weights[1])
        await llm.get_weight_version()
        assert len(seen) == before < 200
        assert not waiting.done()
        await llm.resume_generation()
        assert await waiting == expected[1]
        mixed = await running
        assert len(mixed) == 200
        assert [(first, end) for _, first, end in ranges] == [(0, before), (before, 200)]
        assert ranges[1][0] == ranges[0][0] + 1 == llm.weight_version
        assert mixed[:before] == old[:before]
        assert mixed != old
        assert await tokens(llm, "again") == expected[1]  # not what "kept" has cached
        await update(llm, weights[0])

    engine.run(keep())


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_pause_ends_or_awaits_requests(engine: Engine, mode: str) -> None:
    llm = engine.llm

    async def pause() -> None:
        running, _ = await begin(llm, f"running-{mode}")
        await llm.pause_generation(mode=mode)
        waiting = asyncio.create_task(tokens(llm, f"waiting-{mode}"))
        assert (len(await running) == 200) is (mode == "wait")
        assert not waiting.done()
        await llm.resume_generation()
        assert len(await waiting) == 5

    engine.run(pause())
    with pytest.raises(RequestError, match="must be one of abort, wait, keep"):
        engine.run(llm.pause_generation(mode="stop"))


def test_sleep_stops_scheduling_or_gives_memory_back(
    engine: Engine, expected: list[list[int]]
) -> None:
    llm = engine.llm

    async def sleep() -> None:
        running, seen = await begin(llm, "dozing")
        await llm.sleep(0)
        await llm.get_weight_version()
        before = len(seen)
        assert await llm.is_sleeping()
        waiting = asyncio.create_task(tokens(llm, "late"))
        await asyncio.sleep(0.05)
        assert (len(seen), waiting.done()) == (before, False)
        await llm.wake_up()
        assert await waiting == expected[0]
        assert len(await running) == 200
        await llm.sleep(1)
        waiting = asyncio.create_task(tokens(llm, "later"))
        await asyncio.sleep(0.05)
        if engine.name == "thread":  # sleeping_requests
            assert not waiting.done()
            await llm.wake_up()
            assert await waiting == expected[0]
            return
        with pytest.raises(QueueFull, match="the engine is asleep"):
            await waiting
        await llm.wake_up()
        assert await tokens(llm, "awake") == expected[0]

    engine.run(sleep())


def test_a_release_of_the_weights_brings_the_checkpoints_back(
    engine: Engine, weights: tuple[dict[str, Tensor], ...], expected: list[list[int]]
) -> None:
    llm = engine.llm

    async def release() -> int:
        await update(llm, weights[1])
        version = llm.weight_version
        await llm.sleep(2)
        await llm.wake_up()
        assert await tokens(llm, "released") == expected[0]
        await llm.sleep(2)
        await llm.wake_up(["weights"])
        assert await llm.is_sleeping()
        await update(llm, weights[1])
        await llm.wake_up(["kv_cache"])
        assert await tokens(llm, "updated") == expected[1]
        await update(llm, weights[0])
        return version + 3

    version = engine.run(release())
    assert llm.weight_version == version + 1


def test_choices_compute_their_prompt_once(engine: Engine) -> None:
    """Of four choices, three find all full blocks of the prompt but the last token's."""
    served = create_app(engine.llm, engine.llm.info.config)
    transport = httpx.ASGITransport(app=served.app)
    prompt = [9, *PROMPT["prompt_token_ids"]]

    async def call() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:

            async def counts() -> list[float]:
                """Tokens looked up and found in the prefix cache, of all engines."""
                lines = (await http.get("/metrics")).text.splitlines()
                return [
                    sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
                    for name in (
                        "modulm:prefix_cache_queries_total",
                        "modulm:prefix_cache_hits_total",
                    )
                ]

            before = await counts()
            body = {"model": "M", "prompt": prompt, "n": 4, "max_tokens": 4, "ignore_eos": True}
            answer = await http.post("/v1/completions", json=body)
            assert len(answer.json()["choices"]) == 4
            queried, found = (b - a for a, b in zip(before, await counts(), strict=True))
            assert (queried, found) == (4 * len(prompt), 3 * 32)

    engine.run(call())


def test_routes(
    engine: Engine, weights: tuple[dict[str, Tensor], ...], expected: list[list[int]]
) -> None:
    """As a trainer calls them, with the number of the weights in answers and metrics."""
    served = create_app(engine.llm, engine.llm.info.config)
    transport = httpx.ASGITransport(app=served.app)

    async def call() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:

            async def post(path: str, **body: Any) -> dict[str, Any]:
                answer = await http.post(path, json=body)
                assert answer.status_code == 200, answer.text
                found: dict[str, Any] = answer.json()
                return found

            async def get(path: str) -> Any:
                return (await http.get(path)).json()

            await post("/pause?mode=wait")
            assert await get("/is_paused") == {"is_paused": True}
            await post("/init_weight_transfer_engine", init_info={})
            with SharedWeights(weights[1]) as shared:
                await post("/start_weight_update")
                wrong = {**shared.info, "names": ["x", *shared.info["names"][1:]]}
                refused = await http.post("/update_weights", json={"update_info": wrong})
                assert refused.status_code == 400
                assert "unexpected weights: x" in refused.json()["error"]["message"]
                await post("/update_weights", update_info=shared.info)
                before = (await post("/weight_checker", action="checksum"))["checksums"]
                finished = await post("/finish_weight_update", weight_version="60")
                assert await get("/weight_info") == {"weight_version": 60}
            assert finished["weight_version"] == 60
            answer = await post("/weight_checker", action="compare", baseline=before)
            assert (answer["match"], set(answer["mismatches"])) == (False, set(before))
            changed = await post("/update_weight_version", new_version="70")  # as in vLLM
            assert (changed["success"], changed["new_version"]) == (True, "70")
            refused = await http.post("/update_weight_version", json={"new_version": "v7"})
            assert "must be a number" in refused.json()["error"]["message"]
            await post("/resume")
            assert await get("/is_paused") == {"is_paused": False}
            replicas = 2 if engine.name == "replicas" else 1
            assert await get("/get_world_size") == {"world_size": replicas}
            answer = await post(
                "/v1/completions", model="M", prompt=PROMPT["prompt_token_ids"], max_tokens=5,
                temperature=0, ignore_eos=True, return_token_ids=True, return_weight_versions=True,
            )  # fmt: skip
            assert answer["choices"][0]["token_ids"] == expected[1]
            spans = [{"version": "70", "start": 0, "end": 5}]
            assert answer["choices"][0]["weight_versions"] == spans
            refused = await http.post("/release_kv_cache_memory")
            assert "sleep at level 0" in refused.json()["error"]["message"]
            await post("/sleep?level=0&mode=wait")
            assert await post("/release_kv_cache_memory") == {"status": "kv_cache_released"}
            woken = await post("/wake_up?tags=kv_cache")
            assert woken == {"status": "awake", "tags": ["kv_cache"]}
            assert answer["system_fingerprint"].endswith("-w70")
            metrics = (await http.get("/metrics")).text
            line = next(x for x in metrics.splitlines() if ":weight_version{" in x)
            assert line.endswith(" 70.0")
            for path in ("/sleep?level=2", "/wake_up?tags=weights"):
                assert (await http.post(path)).status_code == 200
            assert await get("/is_sleeping") == {"is_sleeping": True}
            refused = await http.post("/wake_up?tags=graphs")
            assert "must be some of weights" in refused.json()["error"]["message"]
            if engine.name != "thread":  # sleeping_requests
                asked = {"model": "M", "prompt": PROMPT["prompt_token_ids"]}
                refused = await http.post("/v1/completions", json=asked)
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "engine_asleep"
            assert (await http.post("/wake_up?tags=kv_cache")).status_code == 200
            await post("/shutdown_weight_transfer_engine")
            refused = await http.post("/start_weight_update")
            assert "init_weight_transfer_engine" in refused.json()["error"]["message"]

    engine.run(call())
