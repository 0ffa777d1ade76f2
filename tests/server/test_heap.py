"""Memory that a server's process has freed is the system's again."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modulm.config import EngineConfig
from modulm.testing.checkpoints import make_tiny
from modulm_server import serve as serving
from modulm_server.flags import ServerConfig
from modulm_server.heap import ARENAS, bound_arenas
from modulm_server.scripted import ScriptedEngine
from modulm_server.testing import Live

#: Sixteen threads take memory at the same time; prints how many arenas there are then.
MANY_THREADS = """
import ctypes, re, sys, threading
from modulm_server.flags import ServerConfig
from modulm_server.heap import bound_arenas

if sys.argv[1] == "bounded":
    assert bound_arenas({})
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
at_once = threading.Barrier(16)

def take():
    at_once.wait()
    libc.malloc(1000)
    at_once.wait()

threads = [threading.Thread(target=take) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
told = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, told)
libc.fclose(told)
print(len(re.findall("<heap nr=", open(sys.argv[2]).read())))
"""
#: Takes 100 MB in pieces and frees them but for the last, which holds the heap's end; prints what
#: is held in MiB before and after it is given back.
GIVING_BACK = """
import ctypes
from pathlib import Path
from modulm_server.flags import ServerConfig
from modulm_server.heap import give_back

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("RssAnon"))

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
pieces = [libc.malloc(100_000) for _ in range(1_000)]
for piece in pieces:
    ctypes.memset(ctypes.c_void_p(piece), 1, 100_000)
for piece in pieces[:-1]:
    libc.free(ctypes.c_void_p(piece))
before = held()
assert give_back()
print(before, held())
"""


def printed(script: str, *arguments: str) -> list[int]:
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return [int(word) for word in process.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_all_threads_share_a_few_arenas(tmp_path: Path) -> None:
    (free,) = printed(MANY_THREADS, "free", str(tmp_path / "free"))
    (bounded,) = printed(MANY_THREADS, "bounded", str(tmp_path / "bounded"))
    assert bounded <= ARENAS < free


def test_who_sets_the_arenas_knows_better() -> None:
    assert not bound_arenas({"MALLOC_ARENA_MAX": "2"})
    assert not bound_arenas({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"})


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_free_pages_go_back() -> None:
    before, after = printed(GIVING_BACK)
    assert after < before - 80


@pytest.mark.parametrize("address", ["/tmp/engine", None])
def test_a_server_gives_back_beside_an_engine_of_its_own_process(
    address: str | None, make_server: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(serving, "give_back", lambda: calls.append(1))
    live = make_server()
    live.engine.address = address
    server = serving.make_server(live.served, live.engine.info.config.group(ServerConfig))

    async def ticks() -> None:
        for counter in (597, 598, 599, 601):
            assert not await server.on_tick(counter)

    asyncio.run(ticks())
    assert len(calls) == (1 if address else 0)


class Ready(Exception):
    """The server takes requests."""


def test_collections_leave_out_what_the_start_has_made(tokenizer: Any, tmp_path: Path) -> None:
    config = EngineConfig.from_keywords(model=str(make_tiny(tmp_path)), host="127.0.0.1", port=0)
    frozen: list[int] = []

    def announce(text: str) -> None:
        frozen.append(gc.get_freeze_count())
        raise Ready

    gc.unfreeze()
    try:
        with pytest.raises(Ready):
            serving.serve(config, lambda engine_config: ScriptedEngine(tokenizer), announce)
    finally:
        gc.unfreeze()
    assert frozen[0] > 1_000
