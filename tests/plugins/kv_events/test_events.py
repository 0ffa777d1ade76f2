"""A subscriber that knows only vLLM's documentation follows the prefix cache by its events."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
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
from modulm_kv_events.events import as_array, as_map
from modulm_kv_events.lives import BlockLivesPlanner
from modulm_kv_events.part import KVEventsPart
from modulm_kv_events.planner import EventsPlanner
from modulm_kv_events.publisher import Publisher
from modulm_kv_events.subscriber import Source, Subscriber, source_of

END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag=True):
    """As vLLM 0.33 documents it, with the fields that all routers read."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def decoded(batch: bytes) -> list[Any]:
    """The events of a batch, as arrays."""
    read = msgspec.msgpack.decode(batch, type=Batch)
    assert read.data_parallel_rank == 0
    return [[type(event).__name__, *msgspec.structs.astuple(event)] for event in read.events]


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


class LivesPart(StepPart):
    """Measures every block, in ticks of a clock that each look moves on."""

    name = "block_lives"
    api = 1

    def planner(self, context: PlannerContext) -> BlockLivesPlanner:
        return BlockLivesPlanner(context, 1.0, clock=map(float, count()).__next__)


def test_lives_of_blocks_are_measured() -> None:
    for seed in (1, 3, 7):
        arrivals, scripts = random_workload(random.Random(seed))
        executor = FakeExecutor((Group(4, 24),), scripts=scripts, max_model_len=70)
        capacity, mirror, recorder = executor.start(EngineConfig()), Mirror(), Recorder()
        limits, parts = Limits(rows=4, tokens=40, chunked=True), (ListPart(mirror), LivesPart())
        scheduler = BudgetScheduler(limits, capacity, ByArrival(), parts)
        run_workload(EngineLoop(scheduler, executor, recorder, lambda hook, **_: None, 2), arrivals)
        counts = [step.counts for step in recorder.steps if step.counts]
        lives, idle = (
            [seconds for each in counts for seconds in each[f"kv_block_{name}_seconds"]]
            for name in ("lifetime", "idle_before_evict")
        )
        assert 0 < len(lives) == len(idle) == mirror.stored - len(mirror.blocks)
        assert all(0 < unused <= life for unused, life in zip(idle, lives, strict=True))
        executor.stop()


def test_uses_of_a_block_end_its_idle_time() -> None:
    watched: list[Any] = []
    group = SimpleNamespace(block_size=4, watch=watched.append)
    cache = SimpleNamespace(sizes=(4,), groups=(group,))
    rows = SimpleNamespace(computed=np.array([8]))
    context: Any = SimpleNamespace(
        prefixes=SimpleNamespace(enabled=True), rows=rows, cache=cache,
        capacity=SimpleNamespace(groups=(group,)),
    )  # fmt: skip
    planner = BlockLivesPlanner(context, 0.5, clock=map(float, count()).__next__)
    low, high = bytes(28) + b"\x7f\0\0\0", bytes(28) + b"\x80\0\0\0"
    for name in (low, high):  # the second one is not among the half that is measured
        watched[0](name, True)  # at 0
    waiting: Any = SimpleNamespace(chains=[SimpleNamespace(names=[low, high, b"not cached"])])
    for _ in range(6):
        planner.admit(waiting, 0)  # at 1 to 6
    for name in (low, high):
        watched[0](name, False)  # at 7
    assert planner.events({}) == {
        "counts": {
            "kv_block_lifetime_seconds": [7.0], "kv_block_idle_before_evict_seconds": [1.0],
            "kv_block_reuse_gap_seconds": [1.0, 1.0, 1.0],
        },
    }  # fmt: skip
    assert planner.events({}) == {}


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
                mirror.apply(decoded(batch))
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
            assert decoded(batch) == [["AllBlocksCleared"]]
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


def test_events_are_maps_or_arrays(tmp_path: Path) -> None:
    stored = ["BlockStored", [7], None, [1, 2], 2, None, "GPU", None, [["a"]]]
    events = [stored, stored[:-1], ["BlockRemoved", [7], "GPU"], ["AllBlocksCleared"]]
    for event in events:
        assert as_array(as_map(event))[: len(event)] == event
        assert as_array(event) == event
    with pytest.raises(ValueError, match="BlockRemoved"):
        as_array({"type": "BlockRemoved", "medium": "GPU"})
    with pytest.raises(ValueError, match="Other"):
        as_array({"type": "Other"})
    for form, wanted in (("map", [as_map(event) for event in events]), ("array", events)):
        publisher = Publisher(Settings(endpoint=f"ipc://{tmp_path}/{form}", event_format=form))
        publisher.publish(events)
        publisher.close()
        ((_, batch),) = publisher._sent
        assert msgspec.msgpack.decode(batch)[1] == wanted


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
        ({"event_format": "json"}, "event_format"),
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


class Heard:
    """What a subscriber reports, in order."""

    def __init__(self) -> None:
        self.news: list[Any] = []
        self._changed = threading.Condition()

    def add(self, one: Any) -> None:
        with self._changed:
            self.news.append(one)
            self._changed.notify_all()

    def apply(self, key: int, events: Sequence[Any]) -> None:
        if events == ["bad"]:
            raise ValueError("bad")
        self.add(events[0])

    def wait(self, last: Any) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: last in self.news, 300)
            news, self.news = self.news, []
        return news


@pytest.fixture
def heard() -> Iterator[tuple[Heard, Subscriber]]:
    heard = Heard()
    subscriber = Subscriber(
        lambda key: heard.add("begin"), heard.apply, lambda key: heard.add("lost")
    )
    yield heard, subscriber
    subscriber.close()


def publish_until(publisher: Publisher, heard: Heard, *, last: int) -> list[Any]:
    """Publish numbered events until the subscriber, which connects in its own time, has one."""
    number = last
    while not any(isinstance(one, int) and one >= last for one in heard.news):
        publisher.publish([number])
        number += 1
        time.sleep(0.01)
    return heard.wait(number - 1)


def test_a_subscriber_repairs_gaps_by_replay(
    tmp_path: Path, heard: tuple[Heard, Subscriber], caplog: pytest.LogCaptureFixture
) -> None:
    """What came before it subscribed, batches that were dropped, and those lost for good."""
    news, subscriber = heard
    address = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    settings = Settings(
        True, endpoint=address[0], replay_endpoint=address[1], buffer_steps=50, event_format="array"
    )
    publisher = Publisher(settings)
    try:
        for number in range(5):
            publisher.publish([number])
        subscriber.follow(0, Source(*address))
        got = publish_until(publisher, news, last=5)
        assert got == ["begin", *range(got[-1] + 1)]
        following = got[-1] + 1
        # The network drops three batches; the publisher has them.
        send, left = publisher._events.send_multipart, [3]

        def drop(frames: list[bytes]) -> None:
            left[0] -= 1
            if left[0] < 0:
                send(frames)

        publisher._events = SimpleNamespace(send_multipart=drop)
        for number in range(following, following + 5):
            publisher.publish([number])
        assert news.wait(following + 4) == list(range(following, following + 5))
        # It has a place for fewer than are missing.
        left[0] = 60
        for number in range(61):
            publisher.publish([1000 + number])
        got = news.wait(1060)
        assert got[0] == "lost"
        assert got[1:] == list(range(1061 - len(got[1:]), 1061))
        for event in ("bad", "bad", "after"):
            publisher.publish([event])
        assert news.wait("after") == ["lost", "lost", "after"]
        assert caplog.text.count("not understood") == 1
    finally:
        publisher.close()


def test_a_publisher_that_begins_anew_is_noticed(
    tmp_path: Path, heard: tuple[Heard, Subscriber]
) -> None:
    news, subscriber = heard
    settings = Settings(True, endpoint=f"ipc://{tmp_path}/events", event_format="array")
    source = Source(settings.endpoint)
    subscriber.follow(0, source)
    for _ in range(2):
        publisher = Publisher(settings)
        try:
            got = publish_until(publisher, news, last=0)
        finally:
            publisher.close()
        assert got[0] in ("begin", "lost")
    assert "lost" in got
    subscriber.follow(0, source)  # as when a replica was restarted
    publisher = Publisher(settings)
    try:
        assert publish_until(publisher, news, last=0)[0] == "begin"
    finally:
        publisher.close()


def test_what_another_process_can_subscribe_to() -> None:
    def source(**events: Any) -> Source | str | None:
        table = {"enable_kv_cache_events": True, **events}
        config = EngineConfig().with_(kv_events_config=table)
        return source_of(config, "10.0.0.5")

    replay = source(replay_endpoint="tcp://*:7001", topic="t")
    assert replay == Source("tcp://10.0.0.5:5557", "tcp://10.0.0.5:7001", "t")
    assert source(endpoint="ipc:///run/events") == Source("ipc:///run/events")
    assert "tcp://*:PORT" in str(source(endpoint="tcp://router:5557"))
    assert "process only" in str(source(endpoint="inproc://events"))
    assert source(publisher="null") is None
