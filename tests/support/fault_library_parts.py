"""What reaches the socket and file operations of libraries and connectors: one short use each.

Each raises what its callers handle, or gives the right result.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from fault_parts import PARTS, Part

from modulm.config import EngineConfig
from modulm.errors import ConfigError
from modulm.plugins import manager
from modulm_chat import conversation, named_templates
from modulm_distributed.ring import Ring
from modulm_distributed.rounds import Rounds
from modulm_distributed.stream import FrameStream
from modulm_distributed.tls import Connection, TlsSession, tls_contexts
from modulm_downloads import headers
from modulm_fleet.announce import Announcements, announce
from modulm_fleet.placement import placement
from modulm_kv_events import Settings
from modulm_kv_events.publisher import Publisher
from modulm_kv_events.subscriber import Source, Subscriber
from modulm_kv_peer import memory, wire
from modulm_kv_peer.encoder_outputs import PeerEncoderOutputs
from modulm_kv_transfer import block_files, identity
from modulm_kv_transfer.encoder_outputs import EncoderTransfer, FileEncoderOutputs
from modulm_mapped_weights import key
from modulm_mapped_weights.folder import CacheFolder
from modulm_media.fetch import Budget, from_base64
from modulm_media.flags import MediaConfig
from modulm_media.messages import MediaSource
from modulm_media.opener import MediaOpener
from modulm_memory import usage
from modulm_plugin_lock import files, lock
from modulm_structured_output import compile_process
from modulm_tensor_files import beside
from modulm_tensor_files.safetensors import SafetensorsFolder
from modulm_wire import frames

ITEM, FACTS = b"an item", {"version": "1"}


def _part(run: Part) -> Part:
    PARTS[run.__name__.replace("_", " ")] = run
    return run


def _secret(folder: Path) -> Path:
    path = folder / "secret"
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


# Between processes.


@_part
def an_announcement(folder: Path) -> None:
    """It is accepted, or both sides say why not."""
    port, secret = _free_port(), str(_secret(folder))
    flags = {"data_parallel_size": 3, "data_parallel_rpc_port": port,
             "data_parallel_secret_file": secret}  # fmt: skip
    here = EngineConfig().with_parts({**flags, "data_parallel_size_local": 1})
    there = EngineConfig().with_parts({
        **flags, "data_parallel_size_local": 2, "data_parallel_start_rank": 1, "headless": True,
    })  # fmt: skip
    plugins, before = manager.current(), set(threading.enumerate())
    taking = Announcements(here, placement(here), plugins)
    try:
        announce(there, placement(there), plugins).close()
    finally:
        taking.close()
        for thread in set(threading.enumerate()) - before:
            thread._started.wait(300)  # type: ignore[attr-defined]
            thread.join(300)


@_part
def a_ring(folder: Path) -> None:
    ring = Ring.create(1)
    try:
        memory, *bells = ring.descriptors
        reader = Ring(memory, bells)
        ring.write(b"a frame")
        assert [bytes(frame) for frame in reader.frames()] == [b"a frame"]
    finally:
        ring.close()


@_part
def rounds_of_replicas(folder: Path) -> None:
    one = Rounds(str(folder), 0, 2)
    try:
        other = Rounds(str(folder), 1, 2)
        try:
            one.begin()
            assert other.wait()
            assert other.behind
        finally:
            other.close()
    finally:
        one.close()


@_part
def data_over_tls(folder: Path) -> None:
    """As front ends and engines of other machines send it."""
    contexts = tls_contexts(secrets.token_bytes(32))
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        for peer in (ours, theirs):
            peer.settimeout(300)
        sessions = TlsSession(contexts), TlsSession(contexts, server=True)
        answer = pool.submit(sessions[1].handshake, theirs)
        sessions[0].handshake(ours)
        answer.result(300)
        ours.sendall(Connection(ours, sessions[0]).seal(b"x" * 70_000))
        assert Connection(theirs, sessions[1]).reader().read(70_000) == b"x" * 70_000


@_part
def frames_over_tls(folder: Path) -> None:
    """As ranks of other machines send them."""
    contexts = tls_contexts(secrets.token_bytes(32))
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        for peer in (ours, theirs):
            peer.settimeout(300)
        sessions = TlsSession(contexts), TlsSession(contexts, server=True)
        answer = pool.submit(sessions[1].handshake, theirs)
        sessions[0].handshake(ours)
        answer.result(300)
        FrameStream(ours, sessions[0]).send(frames.pack("run", b"a plan"))
        if FrameStream(theirs, sessions[1]).receive() != ["run", b"a plan"]:
            raise OSError("at its end")


@_part
def messages_between_engines(folder: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            wire.send(ours, {"a": 1}, wire.Deadline(30))
            assert wire.receive(theirs, wire.Deadline(30)) == {"a": 1}
        except wire.Fault as error:
            raise OSError(str(error)) from error


@_part
def memory_that_engines_share(folder: Path) -> None:
    shared = memory.SharedMemory(2, 8)
    try:
        blocks = memory.open_shared(shared.describe(), 8)
        if blocks is None:
            raise OSError("not reached")
        blocks[1] = 7
        assert shared.blocks[1].tolist() == [7] * 8
    finally:
        shared.close()


@_part
def encoder_outputs_of_another_engine(folder: Path) -> None:
    """They come, or are computed."""
    secret, port = str(_secret(folder)), _free_port()
    both = [
        PeerEncoderOutputs(
            folder / name, 1 << 20,
            EncoderTransfer("0" * 32, FACTS, name == "a", name == "b", port=port),
            peers=[f"127.0.0.1:{port}"], secret_file=secret, seconds=20.0,
        )
        for name in "ab"
    ]  # fmt: skip
    try:
        both[0].save(ITEM, torch.ones(2, 3))
        for one in both:
            one.start()
        end = threading.Event()
        while not both[1].fetch("r", [ITEM]):
            end.wait(0.002)
        both[1].finish("r")
        output = both[1].load(ITEM)
        if output is None:
            raise OSError("not there")
        assert torch.equal(output, torch.ones(2, 3))
    finally:
        for one in both:
            one.close()


@_part
def events_of_the_cache(folder: Path) -> None:
    """A batch arrives at who follows them."""
    heard = threading.Event()

    def apply(key: int, events: Sequence[Any]) -> None:
        heard.set()

    endpoint, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    publisher = Publisher(Settings(endpoint=endpoint, replay_endpoint=replay))
    try:
        subscriber = Subscriber(lambda key: None, apply, lambda key: None)
        try:
            subscriber.follow(1, Source(endpoint, replay, ""))
            for _ in range(200):
                publisher.publish([["AllBlocksCleared"]])
                if heard.wait(0.01):
                    return
            raise OSError("nothing came")
        finally:
            subscriber.close()
    finally:
        publisher.close()


# Files.


@_part
def encoder_outputs_in_files(folder: Path) -> None:
    """One that cannot be read is computed; nothing temporary is left."""
    outputs = FileEncoderOutputs(folder / "outputs", 1 << 16, "0" * 32)
    try:
        for value in (1.0, 1.0):
            outputs.save(ITEM, torch.full((2, 3), value))
        output = outputs.load(ITEM)
        if output is None:
            raise OSError("not there")
        assert torch.equal(output, torch.ones(2, 3))
        outputs.path(ITEM).write_bytes(b"damaged")
        assert outputs.load(ITEM) is None
    except block_files.BadFile as error:
        raise OSError(str(error)) from error
    finally:
        assert not list(folder.rglob(".*.kv.*"))


@_part
def blocks_without_room(folder: Path) -> None:
    """A file that cannot be put in its place leaves nothing; a block that is evicted is gone."""
    path = block_files.block_path(folder, "0" * 32, 0, 1, b"name")
    path.mkdir(parents=True)  # which no file replaces
    with suppress(IsADirectoryError):
        block_files.write(path, {"model": "m"}, memoryview(b"block"))
    path.rmdir()
    assert not list(path.parent.iterdir())
    block_files.write(path, {"model": "m"}, memoryview(b"block"))
    block_files.describe(path)
    block_files.evict(folder, 0)
    assert not path.exists()


def _checkpoint(folder: Path) -> Path:
    """The files of a model, as far as they are looked at here."""
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "preprocessor_config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(200_000))
    return folder


@_part
def digests_of_a_checkpoint(folder: Path) -> None:
    config = EngineConfig.from_keywords(model=str(_checkpoint(folder)))
    plugins = manager.current()
    identity.model_digest(config, plugins)
    identity.encoder_facts(config, plugins)
    key._file_facts(folder, "model.safetensors")
    key._source_digest.cache_clear()
    key._source_digest(str(folder / "config.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    conversation._file_template(folder / "chat_template.jinja")
    template = named_templates.ChatTemplate(folder / "chat_template.jinja")
    assert template.source == "{{ messages }}"


@_part
def packed_weights_without_room(folder: Path) -> None:
    """The oldest file is deleted; another process that packs is waited for."""
    cache = CacheFolder(folder / "weights", 1 << 20)
    with cache.lock("a"), cache.write("a") as writer:
        writer.finish({"key": "a"})
    small = CacheFolder(cache.path, 0)
    small._make_space("b", 1)
    if list(cache.path.glob("a.weights")):
        raise OSError("it stays until there is room")
    waiting, entered = threading.Event(), threading.Event()

    def other() -> None:
        with cache.lock("c"):
            entered.set()
            waiting.wait(0.02)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(other)
        try:
            entered.wait(300)
            with cache.lock("c"):
                pass
        finally:
            waiting.set()
            answer.result(300)


@_part
def media_of_a_request(folder: Path) -> None:
    """Sent with it, and given by this process."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()

    async def main() -> None:
        flags = MediaConfig()
        assert await from_base64(data, Budget(flags)) == file.getvalue()
        opener = MediaOpener(flags, trusted=True)
        opener.workers.decode = lambda *_: Image.new("RGB", (4, 4))  # type: ignore[method-assign]
        try:
            (folder / "image.png").write_bytes(file.getvalue())
            sources = [
                MediaSource(kind="image", field="x", data=data),
                MediaSource(kind="image", field="x", url=f"data:image/png;base64,{data}"),
                MediaSource(kind="image", field="x", url=str(folder / "image.png")),
                MediaSource(kind="image", field="x", value=Image.new("RGB", (4, 4))),
            ]
            async with asyncio.timeout(300):
                assert len(await opener.open(sources, {})) == 4
        finally:
            opener.close()

    asyncio.run(main())


@_part
def memory_of_processes(folder: Path) -> None:
    """0 where it cannot be read."""
    assert usage.measure([os.getpid()]) >= 0


class Weights(SafetensorsFolder):
    """A folder of weights."""

    name = "weights"

    @classmethod
    def opens(cls, path: Path) -> bool:
        return True


@_part
def headers_of_a_hub(folder: Path) -> None:
    headers.write_header(folder / "x", {"a": {"data_offsets": [0, 64]}})
    assert (folder / "x").stat().st_size > 64
    (folder / "model.safetensors").touch()
    index = {"weight_map": {"a": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    Weights(folder)._weight_map()


@_part
def a_lock_of_plugins(folder: Path) -> None:
    found = distribution("modulm-route-tokens")
    files.is_editable(found)
    files.files_digest(found, "modulm-route-tokens")
    list(files._found_by_import(found, "modulm-route-tokens"))
    before, lock.distributions = lock.distributions, lambda: [found]
    try:
        lock._installed_packages()
    finally:
        lock.distributions = before
    (folder / "lock").write_text("x")
    with suppress(ConfigError):  # it is none
        lock.read_lock(str(folder / "lock"))


@_part
def files_of_an_exported_checkpoint(folder: Path) -> None:
    """A file is replaced as a whole."""
    (folder / "a").mkdir()
    (folder / "a" / "tokenizer.json").write_text("{}")
    beside.copy_beside(folder / "a", folder)
    try:
        beside.replace(folder / "tokenizer.json", b"new")
    finally:
        assert (folder / "tokenizer.json").read_bytes() in (b"{}", b"new")
        assert not list(folder.glob("*.part"))


@_part
def the_size_of_this_process(folder: Path) -> None:
    assert compile_process._address_space() > 0
