"""What reaches the socket and file operations below a server: one short use of a part each.

Each raises what its callers handle, or gives the right result.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from modulm_distributed import accepting, secret, stream
from modulm_distributed.tls import TlsSession, tls_contexts
from modulm_kv_transfer import block_files
from modulm_mapped_weights.folder import CacheFolder
from modulm_media.fetch import Budget, Fetcher
from modulm_media.flags import MediaConfig
from modulm_wire import frames

__all__ = ["FIRED", "PARTS", "Part"]

#: Uses a part, in an empty folder.
Part = Callable[[Path], object]
PARTS: dict[str, Part] = {}
#: Whether the fault has happened: a long part may then leave out the rest.
FIRED: list[Callable[[], bool]] = [lambda: False]
BLOCK = b"a block of the cache"


def _part(run: Part) -> Part:
    PARTS[run.__name__.replace("_", " ")] = run
    return run


@_part
def blocks_on_disk(folder: Path) -> None:
    """A block is read whole or refused; nothing temporary is left."""
    path = block_files.block_path(folder, "0" * 32, 0, 1, b"name")
    described = {"model": "m"}
    try:
        block_files.write(path, described, memoryview(BLOCK))
        abandoned = path.with_name(f".{path.name}.1.2")
        abandoned.write_bytes(b"half")
        content = bytearray(len(BLOCK))
        block_files.hold(path, 60.0)
        block_files.touch(path)
        block_files.release(path)
        assert block_files.models(folder) == ["0" * 32]
        block_files.evict(folder, 1 << 20)
        block_files.read(path, described, memoryview(content))
        assert bytes(content) == BLOCK
        block_files.clear(folder)
    except block_files.BadFile as error:
        raise OSError(str(error)) from error
    finally:
        list(block_files.scan(folder))
        assert not list(folder.rglob(".*.kv.*"))


@_part
def packed_weights(folder: Path) -> None:
    """The file of a key is whole or not there, and no part of it is left."""
    cache = CacheFolder(folder / "weights", 1 << 20)
    values = torch.arange(12.0)
    try:
        with cache.lock("a"), cache.write("a") as writer:
            array = writer.add(values)
            writer.mapped()
            writer.finish({"key": "a", "array": array})
    finally:
        assert not list(folder.rglob("*.part"))
    reader = cache.read("a")
    if reader is None:
        raise OSError("ignored")
    assert torch.equal(reader.mapped.tensor(tuple(reader.description["array"])), values)
    with cache.lock("b"), cache.write("b") as writer:
        writer.finish({"key": "b"})


@_part
def a_secret_of_this_user(folder: Path) -> None:
    before, os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME"), str(folder)
    try:
        file = secret.secret_file("127.0.0.1", None)
        assert len(secret.read_secret(file)) == 64
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


@_part
def frames_between_ranks(folder: Path) -> None:
    """A frame and a descriptor arrive, or the stream is at its end."""
    one, other = (stream.FrameStream(peer) for peer in socket.socketpair())
    reader, writer = os.pipe()
    try:
        one.send(frames.pack("run", b"a plan"), [writer])
        if other.receive() != ["run", b"a plan"]:
            raise OSError("at its end")
    finally:
        for descriptor in (reader, writer, *other.descriptors):
            os.close(descriptor)
        one.close()
        other.close()


@_part
def a_listener(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = accepting.accepted(listener, threading.Event())
        with socket.create_connection(listener.getsockname()), next(connections):
            pass


@_part
def a_tls_session(folder: Path) -> None:
    contexts = tls_contexts(secrets.token_bytes(32))
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        for peer in (ours, theirs):
            peer.settimeout(300)
        server = TlsSession(contexts, server=True)

        def greet() -> None:
            try:
                server.handshake(theirs)
            except BaseException:
                theirs.shutdown(socket.SHUT_RDWR)
                raise

        answer = pool.submit(greet)
        try:
            TlsSession(contexts).handshake(ours)
        except BaseException:
            ours.shutdown(socket.SHUT_RDWR)
            raise
        answer.result(300)


@_part
def media_files(folder: Path) -> None:
    """A file of this machine, and one of a server."""
    file = folder / "image"
    file.write_bytes(b"content")
    flags = MediaConfig(
        allowed_local_media_path=str(folder), allowed_media_networks=("127.0.0.2/32",)
    )

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nConnection: close\r\n\r\ncontent")
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.2", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            for url in (f"file://{file}", f"http://127.0.0.2:{port}/image"):
                assert await Fetcher(flags).get(url, "image", Budget(flags)) == b"content"

    asyncio.run(main())


@_part
def ranks_of_ray(folder: Path) -> None:
    """The executor's side and the rank's side of their sockets, near and far, without a cluster."""
    import ray

    from modulm_executor_ray import actor, executor

    answers: list[Any] = []
    with ThreadPoolExecutor(2) as pool:

        def serve(address: str, secret: bytes, rank: int) -> Any:
            answers.append(pool.submit(actor._connect, address, secret, rank))
            return answers[-1]

        def wait(refs: list[Any], timeout: float = 0, **_: Any) -> tuple[list[Any], list[Any]]:
            ended = [one for one in refs if one.done() and one.exception()]
            return ended[:1], []

        before = ray.util.get_node_ip_address, ray.wait, ray.get, tempfile.tempdir
        ray.util.get_node_ip_address, ray.wait = lambda: "127.0.0.1", wait
        ray.get, tempfile.tempdir = (lambda one: one.result()), str(folder)
        one = executor.RayExecutor()
        one._actors = [SimpleNamespace(serve=SimpleNamespace(remote=serve))] * 2
        streams: list[Any] = []
        try:
            streams = one._accept_ranks([True, False], 20)
            assert [stream.local for stream in streams] == [True, False]
        finally:
            ray.util.get_node_ip_address, ray.wait, ray.get, tempfile.tempdir = before
            for stream_ in streams:
                stream_.close()
            for answer in answers:
                if answer.exception(30) is None:
                    answer.result().close()
