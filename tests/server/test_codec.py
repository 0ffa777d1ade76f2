"""Everything that crosses between processes comes out as it went in."""

from __future__ import annotations

import random
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from modulm.config import EngineConfig
from modulm.contracts.executor import RowLogprobs
from modulm.contracts.media import MediaItem
from modulm.contracts.requests import Finish, Request, Start, StepEvents, StepStats
from modulm.contracts.sampling import (
    OutputKind,
    PoolingParams,
    SamplingParams,
    StructuredOutputs,
)
from modulm.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    EngineError,
    QueueFull,
    RequestError,
)
from modulm.plugins import manager
from modulm_server.engine import codec
from modulm_server.engine.adapters import AdapterRegistry
from modulm_server.engine.engine_process import _SocketServer, split
from modulm_server.flags import ServerConfig
from modulm_wire import frames


def crossed(value: object) -> object:
    return frames.unpack(frames.pack(value)[4:])[0]


SAMPLING = SamplingParams(
    n=3,
    temperature=0.5,
    stop=["a", "b"],
    stop_token_ids=[4],
    logit_bias={5: 1.0},
    allowed_token_ids=[1, 2],
    bad_words=["x"],
    seed=9,
    output_kind=OutputKind.DELTA,
    structured_outputs=StructuredOutputs(json={"type": "object"}, disable_any_whitespace=True),
    extra_args={"deep": {"er": [1, "two", None]}},
)


@pytest.mark.parametrize("params", [SAMPLING, SamplingParams(), PoolingParams(dimensions=3)])
def test_requests(params: SamplingParams | PoolingParams) -> None:
    request = Request(
        id="r",
        prompt=[1, 2, 70_000],
        params=params,
        eos=(1, 2),
        arrival=5.5,
        priority=-3,
        salt="s",
        adapter="a",
        positions=np.arange(9).reshape(3, 3),
        position_offset=-4,
        seed=2**63 - 1,
        bad_words=((1, 2), (3,)),
    )
    back = codec.unpack_request(crossed(codec.pack_request(request)))
    for field in attrs.fields(Request):
        before, after = getattr(request, field.name), getattr(back, field.name)
        arrays = field.name in ("prompt", "positions")
        same = np.array_equal(before, after) if arrays else before == after
        assert same, field.name
    assert back.prompt.dtype == np.int64


def test_media_of_requests() -> None:
    pixels = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    item = MediaItem("image", b"hash", 1, 2, {"pixel_values": pixels}, ((1, 3),))
    request = Request(id="r", prompt=[1, 2, 3], params=SamplingParams(), media=(item,))
    (back,) = codec.unpack_request(crossed(codec.pack_request(request))).media
    assert (back.kind, back.hash, back.start, back.length) == ("image", b"hash", 1, 2)
    assert back.spans == ((1, 3),)
    looked = MediaItem("image", b"hash", 0, 2, {}, cross=True, seen=5)
    request = Request(id="r", prompt=[1, 2, 3], params=SamplingParams(), media=(looked,))
    (result,) = codec.unpack_request(crossed(codec.pack_request(request))).media
    assert (result.cross, result.seen) == (True, 5)
    np.testing.assert_array_equal(back.tensors["pixel_values"], pixels)


def test_what_cannot_cross_is_an_error() -> None:
    with pytest.raises(EngineError, match="disable-frontend-multiprocessing"):
        frames.pack_config(EngineConfig.from_keywords(logits_processors=(object,)))


@pytest.mark.parametrize(
    "error",
    [
        RequestError("wrong", "prompt"),
        QueueFull("later"),
        ContextLengthExceeded("long", "prompt"),
        EngineDead("gone"),
        ConfigError("seed", "is odd"),
    ],
)
def test_errors_keep_class_message_and_field(error: Exception) -> None:
    back = frames.unpack_error(crossed(frames.pack_error(error)))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_strange_errors_become_engine_errors() -> None:
    back = frames.unpack_error(crossed(frames.pack_error(ZeroDivisionError("x"))))
    assert type(back) is EngineError
    assert "ZeroDivisionError: x" in str(back)
    assert type(frames.unpack_error(["__builtins__", "x"])) is EngineError
    assert frames.unpack_error(None) is None


def events() -> StepEvents:
    entry = RowLogprobs(np.array([3, 4]), np.array([-1.0, -2.0], dtype=np.float32), 2)
    return StepEvents(
        1.5,
        ["a", "b"],
        [3, 4],
        [Start("a", 16, 1.0)],
        [Finish("b", "stop", 4, None, 3), Finish("c", "error", None, RequestError("no", "x"))],
        {"a": (entry,)},
        {"b": (1, (entry,))},
        {"c": np.array([[1.0, 2.0]], dtype=np.float32)},
        StepStats(7, 2, 1, 0.5, drafts=1, accepted_at=(1,), routed=(5, 0)),
        {"b": (3, 1)},
        counts={"kv_offload_load_blocks": 2.0},
    )


def test_events() -> None:
    before = events()
    after = codec.unpack_events(crossed(codec.pack_events(before)))
    assert (after.time, after.requests, after.tokens) == (1.5, ["a", "b"], [3, 4])
    assert after.started == before.started
    assert after.finished[0] == before.finished[0]
    assert after.finished[1].error.param == "x"
    assert after.stats == before.stats
    assert after.drafted == {"b": (3, 1)}
    assert after.counts == {"kv_offload_load_blocks": 2.0}
    assert after.logprobs["a"][0].values.tolist() == [-1.0, -2.0]
    assert after.prompt_logprobs["b"][1][0].rank == 2
    assert after.pooled["c"].tolist() == [[1.0, 2.0]]


def test_front_ends_get_their_own() -> None:
    one, two = object(), object()
    parts = {id(p): part for p, part in split(events(), {"a": one, "b": two}, [one, two])}
    assert (parts[id(one)].requests, parts[id(two)].requests) == (["a"], ["b"])
    assert [finish.request for finish in parts[id(two)].finished] == ["b"]
    assert set(parts[id(one)].logprobs) == {"a"}
    assert (parts[id(one)].drafted, parts[id(two)].drafted) == ({}, {"b": (3, 1)})
    assert parts[id(one)].counts == parts[id(two)].counts == {"kv_offload_load_blocks": 2.0}
    assert parts[id(one)].stats == parts[id(two)].stats == events().stats
    assert not parts[id(one)].pooled


def test_configuration_and_plugins() -> None:
    config = EngineConfig.from_keywords(
        model="x", max_num_seqs=3, hf_overrides={"a": 1}, served_model_name=["n", "m"]
    )
    assert frames.unpack_config(crossed(frames.pack_config(config))) == config
    plugins = manager.current().snapshot()
    assert frames.unpack_plugins(crossed(frames.pack_plugins(plugins))) == plugins


def test_flags_of_packages_and_flags_that_nothing_reads_cross() -> None:
    config = EngineConfig.from_keywords(port=9, swap_space=8, guided_decoding_backend="xgrammar")
    after = frames.unpack_config(crossed(frames.pack_config(config)))
    assert after == config
    assert after.group(ServerConfig).port == 9
    assert after.notices() == config.notices()


def frames_of_everything() -> list[bytes]:
    """A frame of each kind that crosses."""
    request = Request(id="r", prompt=[1, 2, 3], params=SAMPLING, eos=(1,), arrival=5.5)
    values = {
        "submit": [codec.pack_request(request)],
        "events": codec.pack_events(events()),
        "error": frames.pack_error(QueueFull("later")),
        "start": frames.pack_config(EngineConfig.from_keywords(model="x")),
        "abort": "r",
        "answer": 3,
        "is_sleeping": 1,
    }
    return [frames.pack(kind, value) for kind, value in values.items()]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut out, put in or doubled."""
    damaged_bytes = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        index = rng.randrange(len(damaged_bytes) + 1)
        match rng.randrange(4):
            case 0:
                damaged_bytes[index : index + 1] = rng.randbytes(1)
            case 1:
                del damaged_bytes[index : index + rng.randrange(1, 9)]
            case 2:
                damaged_bytes[index:index] = rng.randbytes(rng.randrange(1, 9))
            case _:
                damaged_bytes[index:index] = damaged_bytes[index : index + 20]
    return bytes(damaged_bytes)


def test_damaged_frames_are_errors_and_nothing_else(rng: random.Random, rounds: int) -> None:
    """Whatever comes: a value, or one of the errors that the receivers are written for."""
    whole = frames_of_everything()
    readers = {
        "submit": lambda frame: [codec.unpack_request(table) for table in frame[1]],
        "events": lambda frame: codec.unpack_events(frame[1]),
        "error": lambda frame: frames.unpack_error(frame[1]),
        "start": lambda frame: frames.unpack_config(frame[1]),
    }
    seen = Counter()
    for _ in range(1500 * rounds):
        body = damaged(rng.choice(whole)[4:], rng)
        try:
            frame = frames.unpack(body)
            readers.get(frame[0], len)(frame)
            seen["read"] += 1
        except Exception as error:
            seen[type(error).__name__] += 1
    assert not seen.keys() & {"MemoryError", "SystemError", "AssertionError"}
    assert seen["read"] > 50
    assert len(seen) > 5


@pytest.fixture
def front_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[_SocketServer, socket.socket]]:
    """The socket's half of an engine's process, without an engine and without the process's end,
    and the owner's end of its connection.
    """
    monkeypatch.setattr(_SocketServer, "leave", lambda self: None)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with tempfile.TemporaryDirectory() as folder:
        listener.bind(f"{folder}/engine")
        listener.listen()
        ours, theirs = socket.socketpair()
        server = _SocketServer(theirs, listener)
        with ours:
            yield server, ours
        server.end()


def test_an_engine_lets_go_who_sends_what_cannot_be_read(
    front_ends: tuple[_SocketServer, socket.socket], rng: random.Random, rounds: int
) -> None:
    whole = [frame for frame in frames_of_everything() if b"start" not in frame]
    server, owner = front_ends
    owner.sendall(frames.pack("start", {}, [1]))
    assert server.started.result(300) == [{}, [1]]
    for _ in range(40 * rounds):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(300)
            peer.connect(server.address)
            peer.sendall(damaged(b"".join(rng.sample(whole, 3)), rng))
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(1) == b""
    owner.setblocking(False)
    with pytest.raises(BlockingIOError):
        owner.recv(1)


class Refuses:
    """An engine core that takes what it is given."""

    def __init__(self) -> None:
        self.submitted: list[Request] = []

    def submit(self, *requests: Request) -> None:
        self.submitted += requests


def test_a_request_that_cannot_be_unpacked_ends_and_its_front_end_stays() -> None:
    sent: list[Any] = []
    peer = SimpleNamespace(send=lambda data: sent.append(frames.unpack(data[4:])), open=set())
    server = _SocketServer.__new__(_SocketServer)
    server._requests = {}
    core = Refuses()
    server._registry = AdapterRegistry(core, sent.append)
    good = codec.pack_request(Request(id="good", prompt=[1], params=SamplingParams()))
    bad = {**good, "id": "bad", "params": ["sampling", {"no such field": 1}]}
    for tables in ([bad], [good]):
        server._request(core, peer, "submit", [tables])
    (sent_frame,) = sent
    (finish,) = codec.unpack_events(sent_frame[1]).finished
    assert (finish.request, finish.reason) == ("bad", "error")
    assert [request.id for request in core.submitted] == ["good"]
    assert peer.open == {"good"}
