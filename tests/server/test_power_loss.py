"""Stored files and batches after a power loss, at each step of what servers write."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
from pathlib import Path
from typing import Any

import pytest
from power_loss import PowerLosses, restore

from modulm_route_files import batch as batch_module
from modulm_route_files.batch import Batch
from modulm_route_files.batch_store import BatchStore
from modulm_route_files.slots import Slots
from modulm_route_files.store import FileStore
from modulm_server.errors import ApiError
from modulm_server.loopback import LoopbackClient

PATH = "/v1/completions"
#: The last one is wrong and gets a record in the error file.
LINES = [
    json.dumps({"custom_id": name, "url": url, "body": {}}).encode()
    for name, url in (("a", PATH), ("b", PATH), ("c", "/other"))
]


class Answers(LoopbackClient):
    """Answers each request with a number of its own."""

    count = 0

    async def post(self, path: str, body: bytes, owner: str = "") -> tuple[int, bytes]:
        self.count += 1
        return 200, b'{"number": %d}' % self.count


class Server:
    """The stores of a server, without the rest of it."""

    def __init__(self, folder: Path) -> None:
        self.files = FileStore(folder, 99, 1 << 20, lasting=True)
        self.batches = BatchStore(self.files)
        self._answers, self._slots = Answers(), Slots()

    async def work(self, batch: Batch) -> None:
        await batch.run(self.files, self._answers, self._slots)

    async def finish(self) -> None:
        while self.batches.running:
            await asyncio.sleep(0.001)

    def resume(self) -> None:
        """Do what a start does, and run all batches to their ends."""

        async def main() -> None:
            self.files.remove_leftovers()
            self.batches.remove_leftovers()
            self.batches.resume(self.work)
            await self.finish()

        asyncio.run(main())

    def names(self, identity: str | None) -> list[str]:
        file = self.files.find(identity)
        assert file is not None
        return [json.loads(line)["custom_id"] for line in file.path.read_bytes().splitlines()]


def test_after_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was acknowledged is there, what was removed stays away, batches end as they would have,
    and nothing is left over, whatever part of the last writes reached the disk.
    """
    losses = PowerLosses(tmp_path / "before")
    promises = losses.promises
    append = batch_module._append

    def noted_append(target: Any, record: bytes) -> None:
        losses.note("before a record")
        append(target, record)
        losses.note("after a record")

    async def main() -> None:
        server = Server(losses.folder)
        source = server.files.make("me", "lines", "batch")
        server.files.write(source, io.BytesIO(b"\n".join(LINES)))
        promises["upload"] = source.id
        brief = server.files.make("me", "brief", "user_data")
        server.files.write(brief, io.BytesIO(b"x"))
        server.files.remove(brief)
        promises["removed"] = brief.id
        batch = Batch("me", PATH, "24h", source.id)
        server.batches.start(batch, server.work)
        promises["batch"] = batch.id
        await server.finish()
        assert batch.status == "completed"
        promises["output"] = server.names(batch.output), server.files.find(batch.output)

    losses.folder.mkdir()
    with losses.watch(monkeypatch):
        monkeypatch.setattr(batch_module, "_append", noted_append)
        asyncio.run(main())
    assert len(losses.states) > 50
    monkeypatch.undo()
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    for number, (moment, state, promised) in enumerate(losses.states):
        folder = tmp_path / str(number)
        restore(state, folder)
        check(Server(folder), folder, promised, moment)


def check(server: Server, folder: Path, promised: dict[str, Any], moment: str) -> None:
    server.resume()
    owned = {file.id: file for file in server.files.list_owned("me")}
    if "upload" in promised:
        assert owned[promised["upload"]].path.read_bytes() == b"\n".join(LINES), moment
    if "removed" in promised:
        assert promised["removed"] not in owned, moment
    batches = server.batches.all()
    if "batch" in promised:
        assert [batch.id for batch in batches] == [promised["batch"]], moment
    for batch in batches:
        assert batch.status == "completed", (moment, batch.trouble)
        assert sorted(server.names(batch.output)) == ["a", "b"], moment
        assert server.names(batch.errors) == ["c"], moment
        assert batch.counts == {"total": 3, "completed": 2, "failed": 1}, moment
    if "output" in promised:
        names, file = promised["output"]
        assert server.names(file.id) == names, moment
    stored = {path.name.removesuffix(".json") for path in (folder / "files").iterdir()}
    assert stored == set(owned), moment
    left = {path.name for path in (folder / "batches").iterdir()}
    assert left == {f"{batch.id}.json" for batch in batches}, moment


def test_what_another_server_writes_is_no_leftover(tmp_path: Path) -> None:
    writer, starting = Server(tmp_path), Server(tmp_path)
    file = writer.files.make("me", "x", "user_data")

    class Source(io.BytesIO):
        """Another server starts while this one is read."""

        def read(self, size: int | None = -1) -> bytes:
            starting.files.remove_leftovers()
            return super().read(size)

    writer.files.write(file, Source(b"content"))
    assert starting.files.get(file.id, "me").path.read_bytes() == b"content"
    batch = Batch("me", PATH, "24h", file.id)
    lock = writer.batches._path(batch.id, "lock")
    with lock.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        starting.batches.remove_leftovers()
        assert lock.exists()
    starting.batches.remove_leftovers()
    assert not lock.exists()
    file.path.unlink()
    with pytest.raises(ApiError):
        Server(tmp_path).files.get(file.id, "me")
