"""A subscriber that knows only vLLM's documentation follows the prefix cache by its events."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from modulm import LLM, SamplingParams
from modulm.config import EngineConfig
from modulm.contracts.step_part import PlannerContext, StepPart
from modulm.engine.core.loop import EngineLoop
from modulm.engine.scheduling.limits import Limits
from modulm.engine.scheduling.scheduler import BudgetScheduler
from modulm.errors import ConfigError
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import ByArrival, Recorder, check_empty
from modulm.testing.fakes import FakeExecutor, Group
from modulm.testing.workloads import random_workload, run_workload
from modulm_kv_events import Settings
from modulm_kv_events.part import KVEventsPart
from modulm_kv_events.planner import EventsPlanner
from modulm_kv_events.publisher import Publisher

END = (-1).to_bytes(8, "big", signed=True)


class Mirror:
    """Blocks that an engine has cached: hash -> (hash of the one before it, tokens)."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.cleared = self.stored = 0

    def apply(self, events: Sequence[Any]) -> None:
        for kind, *fields in events:
            if kind == "AllBlocksCleared":
                self.blocks.clear()
                self.cleared += 1
            elif kind == "BlockRemoved":
                for block in fields[0]:
                    del self.blocks[block]
            else:
                self.store(*fields)

    def store(
        self, hashes: list[int], parent: int | None, tokens: list[int], size: int, *rest: Any
    ) -> None:
        assert len(tokens) == size * len(hashes)
        for place, block in enumerate(hashes):
            assert block not in self.blocks
            self.blocks[block] = (parent, tuple(tokens[place * size : (place + 1) * size]))
            self.stored, parent = self.stored + 1, block


class ListPart(StepPart):
    """Applies events to a mirror at once."""

    name = "kv_events"
    api = 1

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror

    def planner(self, context: PlannerContext) -> EventsPlanner:
        planner = EventsPlanner(context)
        planner.publish = self.mirror.apply
        return planner


@pytest.mark.parametrize("groups", [(Group(4, 24),), (Group(4, 34, window=9), Group(4, 40))])
def test_events_follow_the_cache(groups: tuple[Group, ...]) -> None:
    """Whatever happens to requests: eviction, preemption, aborts, an emptied cache."""
    stored = 0
    for seed in range(15):
        draw = random.Random(f"{seed} {len(groups)}")
        arrivals, scripts = random_workload(draw)
        executor, mirror = FakeExecutor(groups, scripts=scripts, max_model_len=70), Mirror()
        capacity = executor.start(EngineConfig())
        limits = Limits(rows=draw.randint(1, 6), tokens=draw.randint(6, 80), chunked=True)
        scheduler = BudgetScheduler(limits, capacity, ByArrival(), (ListPart(mirror),))
        engine = EngineLoop(scheduler, executor, Recorder(), lambda hook, **_: None, 2)
        run_workload(engine, arrivals)
        check_empty(engine)
        index = scheduler.cache.groups[-1].index
        assert set(mirror.blocks) == {int.from_bytes(name[-8:], "big") for name in index._block}
        stored += mirror.stored
        scheduler.forget_prefixes()
        assert (mirror.blocks, mirror.cleared) == ({}, 1)
        executor.stop()
    assert stored > 100


def test_messages_and_replay(tmp_path: Path) -> None:
    model = str(make_tiny(tmp_path / "model", "Qwen3ForCausalLM"))
    events = {
        "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events",
        "endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay",
    }  # fmt: skip
    flags: dict[str, Any] = {
        "dtype": "float32", "block_size": 32, "max_model_len": 128, "num_gpu_blocks_override": 12,
        "cpu_threads": 1, "kv_events_config": events,
    }  # fmt: skip
    context, mirror, batches = zmq.Context(), Mirror(), []
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv-events")
    try:
        with LLM(model, **flags) as llm:
            params = SamplingParams(temperature=0, max_tokens=8)
            prompts = [[5 + i, 9, 40, 7] * 17 for i in range(6)]
            for prompt in prompts:
                llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            index = llm._core.loop.scheduler.cache.groups[0].index
            replay = context.socket(zmq.DEALER)
            replay.connect(events["replay_endpoint"])
            replay.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                _, number, batch = replay.recv_multipart()
                if number == END:
                    break
                assert int.from_bytes(number, "big") == len(batches)
                batches.append(batch)
                seconds, changes, rank = msgspec.msgpack.decode(batch)
                assert (type(seconds), rank) == (float, 0)
                mirror.apply(changes)
            assert set(mirror.blocks) == {int.from_bytes(n[-8:], "big") for n in index._block}
            hashes = {value: block for block, value in mirror.blocks.items()}
            parent, tokens = None, tuple(prompts[-1])
            for start in range(0, 64, 32):
                parent = hashes[parent, tokens[start : start + 32]]
            # Live ones go on where the replay ended.
            subscriber.connect(events["endpoint"])
            assert subscriber.poll(0) == 0
            while not subscriber.poll(20):
                llm.reset_prefix_cache()
            topic, number, batch = subscriber.recv_multipart()
            assert topic == b"kv-events"
            assert int.from_bytes(number, "big") >= len(batches)
            assert msgspec.msgpack.decode(batch)[1] == [["AllBlocksCleared"]]
            replay.close(0)
    finally:
        context.destroy(linger=0)


def test_a_full_queue_leaves_a_gap_and_bad_requests_no_answer(tmp_path: Path) -> None:
    settings = Settings(
        endpoint="inproc://events", replay_endpoint=f"ipc://{tmp_path}/replay", max_queue_size=1
    )
    publisher = Publisher(settings, 0)
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.connect(f"ipc://{tmp_path}/replay")
    try:
        with publisher._lock:  # the thread can take nothing
            publisher._queue.append((0, 0.0, [["AllBlocksCleared"]]))
            publisher._number = 1
        publisher.publish([["AllBlocksCleared"]])
        client.send_multipart([b"", b"?"])
        while publisher._queue:
            client.send_multipart([b"", (9).to_bytes(8, "big")])
            assert client.recv_multipart()[1] == END
        publisher.publish([["AllBlocksCleared"]])
        while len(publisher._sent) < 2:
            client.send_multipart([b"", (9).to_bytes(8, "big")])
            assert client.recv_multipart()[1] == END
        assert [number for number, _ in publisher._sent] == [0, 2]
    finally:
        publisher.close()
        publisher.close()
        context.destroy(linger=0)


def test_nothing_is_done_when_off() -> None:
    config = EngineConfig()
    assert KVEventsPart.opened(config, None) is None
    for table in ({"publisher": "zmq"}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert KVEventsPart.opened(config.with_(kv_events_config=table), None) is None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"topics": "x"}, "topics"),
        ({"publisher": "kafka"}, "publisher"),
        ({"endpoint": "5557"}, "endpoint: '5557' is not tcp"),
        ({"replay_endpoint": "tcp://*:0"}, "replay_endpoint: routers must know the port"),
        ({"buffer_steps": -1}, "buffer_steps"),
        ({"max_queue_size": "many"}, "max_queue_size"),
    ],
)
def test_bad_configuration_names_the_key(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig().with_(kv_events_config=table)


def test_an_endpoint_that_cannot_be_bound_is_an_error_at_start(tmp_path: Path) -> None:
    settings = Settings(endpoint=f"ipc://{tmp_path}/none/events")
    with pytest.raises(ConfigError, match=r"kv_events_config.*endpoint: ipc"):
        Publisher(settings)


def test_replicas_have_endpoints_of_their_own() -> None:
    settings = Settings(endpoint="tcp://*:5557", replay_endpoint="ipc:///tmp/x")
    assert settings.of_replica(0) == ("tcp://*:5557", "ipc:///tmp/x")
    assert settings.of_replica(2) == ("tcp://*:5559", "ipc:///tmp/x_dp2")
