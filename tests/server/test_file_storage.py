"""Files and batches on disk: what is acknowledged survives, what cannot be stored is said."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from modulm.errors import ConfigError
from modulm_route_files import store
from modulm_route_files.batch import Batch
from modulm_route_files.batch_store import BatchStore
from modulm_route_files.clock import Clock
from modulm_server.errors import ApiError
from modulm_server.testing import Live, error_of

ServerMaker = Callable[..., Live]
CHAT = "/v1/chat/completions"
ASKED = {"endpoint": CHAT, "completion_window": "24h"}


def line(name: str, text: str = "hi", tokens: int = 40) -> bytes:
    body = {"model": "M", "messages": [{"role": "user", "content": text}], "max_tokens": tokens}
    return json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body}).encode()


def upload(http: httpx.Client, content: bytes) -> httpx.Response:
    return http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", content)})


def ended(http: httpx.Client, identity: str) -> dict[str, Any]:
    for _ in range(30_000):
        batch: dict[str, Any] = http.get(f"/v1/batches/{identity}").json()
        if batch["status"] in ("completed", "failed", "cancelled"):
            return batch
        time.sleep(0.02)
    raise AssertionError(batch)


def names(http: httpx.Client, identity: str) -> list[str]:
    records = http.get(f"/v1/files/{identity}/content").content.splitlines()
    return [json.loads(record)["custom_id"] for record in records]


def test_files_outlive_a_server_that_was_told_where(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    flags = {"file_storage_path": str(tmp_path / "kept"), "api_key": ("one", "two")}
    mine, other = ({"headers": {"Authorization": f"Bearer {key}"}} for key in ("one", "two"))
    with make_server(**flags).client(**mine) as http:
        card = upload(http, b"abc").json()
        source = upload(http, b"\n".join(line(str(i)) for i in range(3))).json()
        batch = http.post("/v1/batches", json={"input_file_id": source["id"], **ASKED}).json()
        done = ended(http, batch["id"])
    again = make_server(**flags)
    with again.client(**mine) as http:
        assert http.get(f"/v1/files/{card['id']}").json() == card
        assert http.get(f"/v1/files/{card['id']}/content").content == b"abc"
        assert ended(http, batch["id"]) == done
        assert sorted(names(http, done["output_file_id"])) == ["0", "1", "2"]
        assert http.delete(f"/v1/files/{card['id']}").json()["deleted"] is True
        assert http.get(f"/v1/files/{card['id']}").status_code == 404
    with again.client(**other) as http:
        assert http.get(f"/v1/files/{source['id']}").status_code == 404
        assert http.get(f"/v1/batches/{batch['id']}").status_code == 404
    folders = [path for path in (tmp_path / "kept").iterdir() if path.is_dir()]
    modes = {path.stat().st_mode & 0o777 for path in folders}
    assert modes == {0o700}
    assert not any(b"one" in path.read_bytes() for path in tmp_path.rglob("*.json"))


def test_a_folder_of_a_newer_release_is_refused_as_it_is(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    """The next release reads what this one wrote, and says so by its version."""
    note = tmp_path / "format.json"
    with make_server(file_storage_path=str(tmp_path)).client() as http:
        card = upload(http, line("a")).json()
    assert json.loads(note.read_text()) == {"version": store.FORMAT}
    note.unlink()  # as releases before the note left it
    with make_server(file_storage_path=str(tmp_path)).client() as http:
        assert http.get(f"/v1/files/{card['id']}").json() == card
    note.write_text(json.dumps({"version": store.FORMAT + 1}))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match="written by a newer release"):
        make_server(file_storage_path=str(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    note.write_text("[")
    with pytest.raises(ConfigError, match="format.json cannot be read"):
        make_server(file_storage_path=str(tmp_path))


def test_a_batch_goes_on_where_the_last_server_stopped(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    """Its files are as a killed server leaves them: a record, half a record, no news since."""
    flags = {"file_storage_path": str(tmp_path)}
    with make_server(**flags).client() as http:
        source = upload(http, b"\n".join([*(line(str(i)) for i in range(4)), b"nonsense"])).json()
        batch = http.post("/v1/batches", json={"input_file_id": source["id"], **ASKED}).json()
        done = ended(http, batch["id"])
    for _ in range(30_000):
        if not list(tmp_path.glob("batches/*.lock")):
            break
        time.sleep(0.01)
    output = tmp_path / "files" / done["output_file_id"]
    first, second, *_ = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(first + second[:20])
    path = tmp_path / "batches" / f"{batch['id']}.json"
    counts = {"total": 5, "completed": 0, "failed": 0}
    table = {**json.loads(path.read_bytes()), "status": "in_progress", "counts": counts}
    path.write_text(json.dumps(table))
    with make_server(**flags).client() as http:
        finished = ended(http, batch["id"])
        assert finished["status"] == "completed"
        assert finished["request_counts"] == {"total": 5, "completed": 4, "failed": 1}
        assert sorted(names(http, finished["output_file_id"])) == ["0", "1", "2", "3"]
        assert output.read_bytes().startswith(first)
        assert (
            len(http.get(f"/v1/files/{finished['error_file_id']}/content").text.splitlines()) == 1
        )


def test_a_server_that_ends_leaves_its_batches_to_the_next(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    live = make_server(file_storage_path=str(tmp_path))
    with live.client() as http:
        source = upload(http, b"\n".join(line(str(i), "count slowly") for i in range(60))).json()
        batch = http.post("/v1/batches", json={"input_file_id": source["id"], **ASKED}).json()
        for _ in range(30_000):
            if live.engine.active == 32:
                break
            time.sleep(0.01)
        live.served.generation.closing = True
        for _ in range(30_000):
            if http.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] == 32:
                break
            time.sleep(0.02)
        live.served.generation.closing = False
        time.sleep(0.05)
        card = http.get(f"/v1/batches/{batch['id']}").json()
        assert card["status"] == "in_progress", "what ran was finished, nothing more was begun"
        assert card["request_counts"] == {"total": 60, "completed": 32, "failed": 0}


def test_several_servers_on_one_folder(make_server: ServerMaker, tmp_path: Path) -> None:
    flags = {"file_storage_path": str(tmp_path)}
    with make_server(**flags).client() as one, make_server(**flags).client() as two:
        source = upload(one, b"\n".join(line(str(i), "count slowly", 240) for i in range(3))).json()
        assert two.get(f"/v1/files/{source['id']}").json() == source
        batch = one.post("/v1/batches", json={"input_file_id": source["id"], **ASKED}).json()
        assert [card["id"] for card in two.get("/v1/batches").json()["data"]] == [batch["id"]]
        two.post(f"/v1/batches/{batch['id']}/cancel")
        assert ended(two, batch["id"])["status"] == "cancelled"
        two.delete(f"/v1/files/{source['id']}")
        assert one.get(f"/v1/files/{source['id']}").status_code == 404
    assert not list(tmp_path.glob("batches/*.lock"))


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("failing_step", ["write", "card", "spool"])
def test_an_upload_that_has_no_room(
    make_server: ServerMaker, tmp_path: Path, failing_step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> Any:
        raise FULL

    with make_server(file_storage_path=str(tmp_path)).client() as http:
        with monkeypatch.context() as patch:
            target = {
                "write": (store.shutil, "copyfileobj"),
                "card": (store.Path, "replace"),
                "spool": (store.tempfile.SpooledTemporaryFile, "write"),
            }
            patch.setattr(*target[failing_step], full)
            answer = upload(http, b"abc")
        assert answer.status_code == 507
        assert error_of(answer)["code"] == "insufficient_storage"
        assert http.get("/v1/files").json()["data"] == []
        assert not list((tmp_path / "files").glob("*")) or failing_step == "spool"
        assert upload(http, b"abc").status_code == 200


def test_a_batch_that_has_no_room(
    make_server: ServerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_server(file_storage_path=str(tmp_path)).client() as http:
        source = upload(http, b"\n".join(line(str(i)) for i in range(9))).json()

        def full(target: Any, record: bytes) -> None:
            if b'"4"' in record:
                raise FULL
            target.write(record)

        monkeypatch.setattr("modulm_route_files.batch._append", full)
        batch = http.post("/v1/batches", json={"input_file_id": source["id"], **ASKED}).json()
        failed = ended(http, batch["id"])
        assert failed["status"] == "failed"
        assert failed["errors"]["data"][0]["message"] == "No space left on device"
        assert len(names(http, failed["output_file_id"])) == failed["request_counts"]["completed"]


@pytest.mark.exhaustive
def test_uploads_and_lists_at_once(make_server: ServerMaker) -> None:
    """Uploads are written on threads while others look at what there is."""
    with make_server().client() as http, ThreadPoolExecutor(8) as pool:

        def one(number: int) -> int:
            if number % 2:
                return upload(http, b"x").status_code
            return http.get("/v1/files").status_code

        assert set(pool.map(one, range(160))) == {200}


@pytest.mark.exhaustive
def test_a_look_while_a_file_is_kept(tmp_path: Path) -> None:
    files = store.FileStore(tmp_path, 10_000, 1 << 30, lasting=False)

    def keep() -> None:
        for _ in range(150):
            files.write(files.make("me", "x", "user_data"), io.BytesIO())

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(keep) for _ in range(2)]
        while not all(future.done() for future in futures):
            files.list_owned("me")
        for future in futures:
            future.result()
    assert len(files.list_owned("me")) == 300


def test_limits_are_flags(make_server: ServerMaker) -> None:
    with make_server(max_stored_files=2).client() as http:
        answers = [upload(http, b"x").status_code for _ in range(3)]
        assert answers == [200, 200, 429]
    with make_server(max_stored_bytes=10).client() as http:
        assert [upload(http, b"x" * 20).status_code for _ in range(2)] == [200, 429]


def test_a_refused_upload_reads_no_folder_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as nobody has changed it: a key at its limit takes no time of others."""
    files = store.FileStore(tmp_path, 5, 1 << 20, lasting=False)
    for _ in range(5):
        files.write(files.make("me", "x", "user_data"), io.BytesIO(b"x"))
    os.utime(tmp_path / "files", (1, 1))  # its last change is long ago
    files.list_owned("me")
    looks: list[Any] = []

    def look(*arguments: Any) -> Any:
        looks.append(arguments)
        raise OSError("not to be read")

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "scandir", look)
        patch.setattr(store.StoredFile, "size", property(look))
        for _ in range(20):
            with pytest.raises(ApiError, match="too many files"):
                files.make("me", "x", "user_data")
    assert not looks
    other = store.FileStore(tmp_path, 5, 1 << 20, lasting=False)
    other.write(other.make("you", "x", "user_data"), io.BytesIO(b"x"))
    assert len(files.list_owned("you")) == 1, "what another server adds is seen"


def test_records_are_whole_or_not_there(tmp_path: Path) -> None:
    """A disk with room for a record and a half, as a limit of this process's files."""
    code = f"""
import resource, signal
from pathlib import Path
from modulm_route_files.batch import _append, _done
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150))
path = Path({str(tmp_path / "records")!r})
with path.open("ab", buffering=0) as target:
    for number in range(3):
        try:
            _append(target, b'{{"id": "batch_req_x_%d", "x": "%b"}}\\n' % (number, b"x" * 60))
        except OSError as error:
            print(error.errno)
print(sorted(_done(path)), path.stat().st_size)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[:-1] == [str(errno.EFBIG)] * 2
    assert lines[-1] == "[0] 93"


class JumpingClock(Clock):
    """Clocks that the test sets."""

    seconds = 1_000_000.0
    since_start = 500.0

    def wall(self) -> float:
        return self.seconds

    def uptime(self) -> float:
        return self.since_start


def test_a_jump_of_the_clock_makes_no_file_expire(tmp_path: Path) -> None:
    """During one start of the machine the wall clock does not count, also for other servers."""
    clock = JumpingClock(boot="first")
    first = store.FileStore(tmp_path, 9, 1 << 20, lasting=True, clock=clock)
    first.write(first.make("me", "x", "user_data", lasts=3600), io.BytesIO(b"x"))
    for jump in (86_400 * 365 * 50, -86_400 * 365 * 50):
        clock.seconds += jump
        later = store.FileStore(tmp_path, 9, 1 << 20, lasting=True, clock=clock)
        assert first.list_owned("me")
        assert later.list_owned("me")
    clock.since_start += 3601
    assert not first.list_owned("me")
    assert not list((tmp_path / "files").iterdir())


def test_after_a_reboot_a_wrong_clock_has_an_hour_to_be_set_right(tmp_path: Path) -> None:
    clock = JumpingClock(boot="first")
    before = store.FileStore(tmp_path, 9, 1 << 20, lasting=True, clock=clock)
    before.write(before.make("me", "x", "user_data", lasts=3600), io.BytesIO(b"x"))
    clock.boot, clock.since_start = "second", 10.0
    files = store.FileStore(tmp_path, 9, 1 << 20, lasting=True, clock=clock)

    def is_there(wall: float, seconds: float) -> bool:
        clock.seconds, clock.since_start = 1_000_000.0 + wall, clock.since_start + seconds
        return bool(files.list_owned("me"))

    assert is_there(1e9, 0)  # wrong
    assert is_there(1e9, 3_000)
    assert is_there(3_500, 10)  # set right
    assert is_there(3_700, 200)  # its time is over, says the wall clock alone
    assert is_there(7_000, 3_300)
    assert not is_there(7_400, 400)


def test_a_batch_is_its_table() -> None:
    batch = Batch("me", CHAT, "24h", "file-x", {"a": "b"}, 3600)
    batch.enter("in_progress")
    again = Batch.of(json.loads(json.dumps(batch.table())))
    assert again.card() == batch.card()
    assert (again.owner, again.lasts) == ("me", 3600)


#: Operations of the stores on files: what each calls.
OPERATIONS = {
    "open": (Path, "open"),
    "rename": (Path, "replace"),
    "flush": (os, "fsync"),
    "copy": (store.shutil, "copyfileobj"),
    "make a folder": (Path, "mkdir"),
    "list": (os, "scandir"),
    "lock": (os, "open"),
    "read": (Path, "read_bytes"),
    "state": (Path, "stat"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_fails_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A file is stored whole or not at all, a batch is saved or refused and lets go of its lock;
    the next try works, and a later server reads the same.
    """
    owner, operation = OPERATIONS[name]
    original = getattr(owner, operation)
    files = store.FileStore(tmp_path, 9, 1 << 20, lasting=True)
    batches = BatchStore(files)

    def attempt() -> tuple[str | None, bool]:
        """(id of the stored file, whether a batch was saved)"""
        stored = None
        with suppress(OSError):
            file = files.make("me", "x", "batch")
            files.write(file, io.BytesIO(b"content"))
            stored = file.id
        batch = Batch("me", CHAT, "24h", stored or "file-x")

        async def main() -> None:
            batches.start(batch, complete)
            await batches.stop()

        try:
            asyncio.run(main())
        except OSError:
            return stored, False
        return stored, True

    async def complete(batch: Batch) -> None:
        batch.enter("completed")

    for turn in range(6):  # which call of the operation fails
        left, code = [turn], (errno.ENOSPC, errno.EIO, errno.EMFILE)[turn % 3]

        def fail(*args: Any, left: list[int] = left, code: int = code, **keywords: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(code, os.strerror(code))
            return original(*args, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(owner, operation, fail)
            stored, _ = attempt()
        kept = {file.id for file in files.list_owned("me")}
        assert stored is None or stored in kept
        assert batches.running == 0
        assert all(file.path.read_bytes() == b"content" for file in files.list_owned("me"))
        again = store.FileStore(tmp_path, 9, 1 << 20, lasting=True)
        assert {file.id for file in again.list_owned("me")} == kept
        for file in again.list_owned("me"):
            files.remove(file)
    stored, saved = attempt()
    assert stored is not None
    assert saved
    left_behind = {path.suffix for path in (tmp_path / "batches").iterdir()} - {".json"}
    assert not left_behind


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4])
def test_a_batch_that_is_cancelled_at_any_moment_lets_go_of_its_lock(
    tmp_path: Path, turns: int
) -> None:
    """Also before its task began, and while it ends: six of 2,325 batches of a soak kept theirs."""
    files = store.FileStore(tmp_path, 9, 1 << 20, lasting=False)
    batches = BatchStore(files)
    batch = Batch("owner", "/v1/completions", "24h", "file-x")

    async def work(_: Batch) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        await asyncio.sleep(0)

    async def main() -> None:
        batches.start(batch, work)
        for _ in range(turns):
            await asyncio.sleep(0)
        both = (batches.cancel(batch), batches.cancel(batch))
        await asyncio.gather(*both)

    open_before = set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else set()
    asyncio.run(main())
    assert batch.status == "cancelled"
    assert batches.running == 0
    assert [path.suffix for path in (tmp_path / "batches").iterdir()] == [".json"]
    if open_before:
        assert set(os.listdir("/proc/self/fd")) <= open_before
