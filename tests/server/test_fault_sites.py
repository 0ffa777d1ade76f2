"""A fault at each await, socket and file operation of what serves: the server goes on, and nothing
is left of the request that met it.

`fault_sites.toml` has a row for each of them, found by AST: under "reached" with the scenario that
reaches it, or under "tried" with a test that is run with the fault. Calls that only look like
operations, because a function of this project has such a name, are under "calls" with that function
(written by hand); their operations have rows of their own. "elsewhere" has what is left, and, by
module, the tests that run it ("tests", written by hand). After a change:

    PYTHONPATH=.:tests/support .venv/bin/python tests/server/test_fault_sites.py
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import fault_engine_parts
import fault_library_parts
import fault_model_parts
import fault_process_parts
import fault_reading_parts
import fault_server_parts
import httpx
import pytest
from fault_parts import PARTS
from fault_scenarios import CHAT, SCENARIOS, TURN
from fault_sites import Faults, kinds_of, sites_of
from fault_sweep import FOLDER, results_of
from samples import parametrize_sample
from tests.server.conftest import reply
from tokenizers import Tokenizer as Core

import modulm
from modulm.config import EngineConfig
from modulm.errors import ModulmError
from modulm.testing.checkpoints import make_tokenizer
from modulm_server.io_processor import IOProcessor
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_server.testing import Live, serve_in_thread
from modulm_tokenizers.tokenizer import load_tokenizer

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
#: What runs beside or below requests. Commands end with their errors.
SCOPE = (
    "core/serving/server", "core/serving/fleet", "core/libs/*", "plugins/routes/*",
    "plugins/executors/*", "plugins/kv_connectors/*",
)  # fmt: skip
#: Modules of tests and kits.
TOOLS = ("testing", "scripted", "kits")
TABLE = HERE / "fault_sites.toml"
ROWS = tomllib.loads(TABLE.read_text())
REACHED: dict[str, dict[str, str]] = ROWS["reached"]
#: The test that is run with a fault at the site, by module (see `fault_sweep`).
TRIED: dict[str, dict[str, str]] = ROWS["tried"]
#: The function of this project that is called at the site, as module:name, by module.
CALLS: dict[str, dict[str, str]] = ROWS["calls"]
ELSEWHERE: dict[str, list[str]] = ROWS["elsewhere"]
#: By module or a beginning of its name.
TESTS: dict[str, str] = ROWS["tests"]
#: What happens when a server starts and stops, which the fault may prevent.
LIFE = "start and stop"
AWAIT = ("await", "async")
#: Modules whose parts are among `PARTS` too.
MORE_PARTS = (
    fault_engine_parts, fault_library_parts, fault_model_parts, fault_process_parts,
    fault_reading_parts, fault_server_parts,
)  # fmt: skip
#: Modules that parts import while they run.
LAZY = (
    "modulm_executor_external_launcher.launched", "modulm_executor_ray.actor",
    "modulm_executor_ray.executor", "modulm_server.websocket_protocol",
)  # fmt: skip
#: uvicorn's main loop, which does nothing that can fail.
CLOCK = "Server.on_tick: await super().on_tick(counter)"
KEY = "the key"


def all_sites() -> dict[str, list[str]]:
    """Sites by module."""
    sites = {}
    for pattern in SCOPE:
        for folder in sorted(ROOT.glob(pattern)):
            for path in sorted(folder.rglob("*.py")):
                name = ".".join(path.relative_to(folder).with_suffix("").parts)
                name = name.removesuffix(".__init__")
                if name.rpartition(".")[2] in TOOLS or name.endswith("_kit"):
                    continue
                if here := sites_of(path):
                    sites[name] = here
    return sites


def covering(module: str) -> str | None:
    """The tests that run what no scenario reaches."""
    names = [name for name in TESTS if module == name or module.startswith(f"{name}.")]
    return TESTS[max(names, key=len)] if names else None


def test_each_has_a_row() -> None:
    sites = all_sites()
    tables: tuple[Any, ...] = (REACHED, TRIED, CALLS, ELSEWHERE)
    rows = {
        module: {site for table in tables for site in table.get(module, ())}
        for module in {module for table in tables for module in table}
    }
    missing = [f"{m}: {site}" for m in sites for site in sites[m] if site not in rows.get(m, ())]
    assert not missing, f"add a scenario and rewrite {TABLE.name}:\n" + "\n".join(missing)
    stale = [f"{m}: {site}" for m in rows for site in rows[m] if site not in sites.get(m, ())]
    assert not stale, f"rewrite {TABLE.name}:\n" + "\n".join(stale)
    assert not [module for module in ELSEWHERE if covering(module) is None]
    for tests in TESTS.values():
        assert tests.split(), TABLE.name
        assert all((ROOT / path).exists() for path in tests.split()), tests


def test_calls_that_are_no_operations_are_of_this_projects_functions() -> None:
    """Or of a tokenizer's, in memory. Each has the name that the site calls."""
    for sites in CALLS.values():
        for site, called in sites.items():
            module, _, path = called.partition(":")
            assert module.startswith("modulm") or module == "tokenizers", called
            found = importlib.import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
            assert callable(found), called
            text = site.partition(": call ")[2].partition(" (")[0]
            assert text.rpartition(".")[2] == path.rpartition(".")[2], (site, called)


class Engine(ScriptedEngine):
    """A scripted engine with weights, whose updates take two looks, and a profiler."""

    async def run_weights(self, operation: str, **arguments: Any) -> dict[str, Any]:
        state = {"weight_version": 0, "paused": arguments.get("mode")}
        return {**state, "busy": operation == "pause", "checking": operation == "update"}

    async def start_profile(self) -> None:
        """Do nothing."""

    async def stop_profile(self) -> None:
        """Do nothing."""


class Twice(IOProcessor):
    """Pools texts as they are."""

    name = "twice"
    api = 1

    def parse_data(self, data: Any) -> Any:
        return data

    def pre_process(self, value: Any) -> Any:
        return value

    def post_process(self, value: Any, outputs: Any) -> Any:
        return len(outputs)


def long_reply(prompt: str, params: Any) -> Reply:
    if "think at length" in prompt:
        return Reply("<think>\n" + "Hello there. " * 400 + "</think>\n\nYes.")
    return reply(prompt, params)


#: Tokens of texts with a gap.
GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def make_model(folder: Path) -> Path:
    """The files of a model: a tokenizer that knows gaps, and names of classes."""
    tokenizer = make_tokenizer(folder, vocab=512) / "tokenizer.json"
    core = Core.from_file(str(tokenizer))
    core.add_special_tokens(list(GAP))
    core.save(str(tokenizer))
    (folder / "config.json").write_text(json.dumps({"id2label": {"0": "good"}}))
    return folder


class World:
    """A server of the scripted engine with a folder of files, and what it has in peace."""

    #: Whether servers have gRPC, whose library may end the process when its servers do not stop.
    grpc = True

    def __init__(self, folder: Path) -> None:
        self.path = make_model(folder / "model")
        self.tokenizer = load_tokenizer(self.path)
        adapter = folder / "adapters" / "far"
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").write_text("{}")
        self.config = EngineConfig.from_keywords(
            model="M", disable_uvicorn_access_log=True, enable_auto_tool_choice=True,
            tool_call_parser="hermes", file_storage_path=str(folder / "stored"), api_key=[KEY],
            server_dev_mode=True, allow_runtime_lora_updating=True, enable_lora=True,
            allowed_lora_path=(str(adapter.parent),), enable_tokenizer_info_endpoint=True,
            lora_resolver_folder=str(adapter.parent), reasoning_parser="qwen3",
            chat_store=str(folder / "chats"), enable_prompt_embeds=True,
            io_processor_plugin="twice", grpc_port=0,
        )  # fmt: skip
        modulm.register("io_processors", "twice", Twice)

    def close(self) -> None:
        modulm.unregister("io_processors", "twice")

    @contextmanager
    def server(self) -> Iterator[tuple[Live, httpx.Client]]:
        config = self.config if self.grpc else self.config.with_(grpc_port=None)
        info = scripted_info(
            self.tokenizer, config=config, parts={"adapters": {"slots": 2}},
            tasks=("generate", "embed", "classify", "score"), max_model_len=1 << 14,
            path=str(self.path),
        )  # fmt: skip
        engine = Engine(self.tokenizer, long_reply, info)
        headers = {"Authorization": f"Bearer {KEY}"}
        with (
            serve_in_thread(engine, config) as live,
            live.client(headers=headers, timeout=60) as http,
        ):
            yield live, http

    def run(self, live: Live | None, http: httpx.Client | None, scenario: str) -> None:
        """Errors are what clients see of the fault; that nothing ends is none of them."""
        try:
            if scenario in PARTS:
                with tempfile.TemporaryDirectory() as folder:
                    PARTS[scenario](Path(folder))
            elif scenario == LIFE:
                with self.server() as (_, other):
                    other.get("/health")
            else:
                assert live is not None
                assert http is not None
                SCENARIOS[scenario](live, http)
        except httpx.TimeoutException:
            raise
        except TimeoutError as error:  # of a part that hung, unless it is the fault itself
            if error.errno is None:
                raise
        except (httpx.HTTPError, OSError, ValueError, KeyError, IndexError, ModulmError):
            return
        except (asyncio.CancelledError, concurrent.futures.CancelledError):
            assert scenario in PARTS  # which end with the fault itself


def tasks(live: Live) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return asyncio.run_coroutine_threadsafe(count(), live.loop).result(60)


def check_as_before(live: Live, http: httpx.Client, before: int) -> None:
    """It answers, the engine runs nothing, and no task is left."""
    with suppress(httpx.TransportError):  # a connection that the fault closed
        http.get("/health")
    answer = http.post(CHAT, json={"model": "M", "messages": TURN})
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there."
    identity = http.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("x", b"x")})
    assert http.delete(f"/v1/files/{identity.json()['id']}").is_success
    end = time.monotonic() + 30
    while live.engine.active or tasks(live) > before:
        assert time.monotonic() < end, (live.engine.active, tasks(live), before)
        time.sleep(0.002)
    assert live.served.app.body_bytes.bytes == 0  # type: ignore[attr-defined]


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@cache
def warm(name: str) -> None:
    """Use a part once, so that threads and files that a process keeps are there."""
    with tempfile.TemporaryDirectory() as folder:
        PARTS[name](Path(folder))


def check_part(name: str, files: int, threads: int) -> None:
    """It works again, and neither run has left a file, a socket or a thread."""
    with tempfile.TemporaryDirectory() as folder:
        PARTS[name](Path(folder))
    end = time.monotonic() + 30
    while open_files() > files or threading.active_count() > threads:
        links = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
        assert time.monotonic() < end, (links, threading.enumerate())
        time.sleep(0.01)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    gc.collect()
    gc.freeze()  # what was imported is not looked at after each fault
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


@pytest.fixture
def served(world: World, module: str) -> Iterator[tuple[Live, httpx.Client, int]]:
    world.grpc = module.startswith("modulm_route_grpc")
    with world.server() as (live, http):
        http.post(CHAT, json={"model": "M", "messages": TURN})
        yield live, http, tasks(live)


def kinds(site: str, scenario: str) -> tuple[str, ...]:
    """Only requests are cancelled: batches and servers end by other ways, with their own tests."""
    if site == CLOCK:
        return ()
    if "async with aclosing(" in site:  # it only remembers what to close
        return ("cancel",)
    if site.partition(": ")[2].split()[0] not in AWAIT:
        return ("ENOSPC", "EIO", "EMFILE")
    return ("EIO",) if scenario == LIFE or scenario.startswith("a batch") else ("cancel", "EIO")


def fire(world: World, live: Live, http: httpx.Client, scenario: str, faults: Faults) -> bool:
    """Run a scenario with a fault; with another server if one reaches its site only once."""
    world.run(live, http, scenario)
    for _ in range(0 if faults.fired or scenario in PARTS else 2):
        try:
            with world.server() as (other, client):
                world.run(other, client, scenario)
        except (OSError, ModulmError):
            assert faults.fired
        if faults.fired:
            break
    return bool(faults.fired)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@parametrize_sample("module", REACHED, every=48)
def test_a_fault_at_each(
    world: World,
    served: tuple[Live, httpx.Client, int],
    module: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    live, http, before = served
    files, missed = open_files(), []
    faults = Faults()
    with faults.inside([importlib.import_module(module)]):
        for site, scenario in REACHED[module].items():
            for kind in kinds(site, scenario):
                part = (0, 0)
                if scenario in PARTS:
                    warm(scenario)
                    part = (open_files(), threading.active_count())
                faults.arm((module, site), kind)
                try:
                    fires = fire(world, live, http, scenario, faults)
                    faults.disarm()
                    if not fires:
                        missed.append(f"{kind} at {site}, by {scenario!r}")
                    if scenario in PARTS:
                        check_part(scenario, *part)
                    else:
                        check_as_before(live, http, before)
                except Exception as error:
                    error.add_note(f"{kind} at {module}: {site}, by {scenario!r}")
                    raise
    assert not missed, "no longer reached:\n" + "\n".join(missed)
    assert open_files() <= files + 8  # connections that the client keeps


FILES = sorted({test.partition("::")[0] for rows in TRIED.values() for test in rows.values()})


@pytest.mark.exhaustive
@pytest.mark.parametrize("file", FILES)
def test_a_fault_at_each_that_a_test_reaches(file: str, tmp_path: Path) -> None:
    """Of those that no scenario reaches: the test ends, and passes when it is run once more."""
    rows = {
        (module, site): test
        for module, sites in TRIED.items()
        for site, test in sites.items()
        if test.partition("::")[0] == file
    }
    wanted: dict[str, list[str]] = {}
    for module, site in rows:
        wanted.setdefault(module, []).append(site)
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    tests = dict.fromkeys(rows.values())
    command = [sys.executable, "-m", "pytest", "-q", "--everything", "-p", "fault_sweep", *tests]
    done = subprocess.run(
        [*command, "-n", "0", "-p", "no:cacheprovider"], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, FOLDER: str(tmp_path)},
    )  # fmt: skip
    tried = results_of(tmp_path)
    assert {one.site for one in tried if one.fired} == rows.keys(), done.stdout[-3000:]
    for one in tried:
        assert one.error is None, one
    assert done.returncode == 0, done.stdout[-3000:]


def main(*folders: str) -> None:
    """Write the table: run every scenario, and note which reaches what. What sweeps have tried is
    in their folders; what was in the table before stays.
    """

    def row(pair: tuple[str, str]) -> str:
        return f"{json.dumps(pair[0])} = {json.dumps(pair[1])}"

    sites = all_sites()
    for name in LAZY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        with world.server() as (_, http):
            http.get("/health")
        modules = [sys.modules[name] for name in sites if name in sys.modules]
        first: dict[tuple[str, str], str] = {}

        def note(name: str, live: Live | None = None, http: httpx.Client | None = None) -> None:
            try:
                world.run(live, http, name)
            except Exception:
                traceback.print_exc()
            for site in faults.reached:
                first.setdefault(site, name)

        with Faults().inside(modules) as faults:
            slow = [name for name in PARTS if PARTS[name].__module__ == fault_model_parts.__name__]
            for name in (*(name for name in PARTS if name not in slow), LIFE):
                note(name)
            with world.server() as (live, http):
                for name in SCENARIOS:
                    note(name, live, http)
            for name in slow:
                note(name)
    lines = [
        "# Written by tests/server/test_fault_sites.py, but for the tests and calls.",
        "",
        "[tests]",
    ]
    lines += [*map(row, TESTS.items()), ""]
    for module, here in sites.items():
        rows = [(site, first[module, site]) for site in here if (module, site) in first]
        lines += [f"[reached.{json.dumps(module)}]", *map(row, rows), ""] if rows else []
    tried = {(module, site): test for module, rows in TRIED.items() for site, test in rows.items()}
    for folder in folders:
        results = [one for one in results_of(Path(folder)) if one.kind in kinds_of(one.site[1])]
        wrong = {one.site for one in results if one.error is not None}
        tried |= {one.site: one.test for one in results if one.fired and one.site not in wrong}
    tried = {site: test for site, test in tried.items() if site not in first}
    calls = {(module, site): one for module, rows in CALLS.items() for site, one in rows.items()}
    for module, here in sites.items():
        rows = [(site, tried[module, site]) for site in here if (module, site) in tried]
        lines += [f"[tried.{json.dumps(module)}]", *map(row, rows), ""] if rows else []
    for module, here in sites.items():
        unknown = {*first, *tried}
        rows = [
            (site, calls[module, site])
            for site in here
            if (module, site) in calls and (module, site) not in unknown
        ]
        lines += [f"[calls.{json.dumps(module)}]", *map(row, rows), ""] if rows else []
    lines += ["[elsewhere]"]
    for module, here in sites.items():
        if rest := [one for one in here if not {(module, one)} & {*first, *tried, *calls}]:
            lines += [f"{json.dumps(module)} = [", *(f"  {json.dumps(one)}," for one in rest), "]"]
    left = sum(line.startswith("  ") for line in lines)
    TABLE.write_text("\n".join(lines) + "\n")
    print(len(first), "and", len(tried), "of", sum(map(len, sites.values())), "left", left)


if __name__ == "__main__":
    main(*sys.argv[1:])
