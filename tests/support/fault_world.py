"""A server and its parts, whose operations fail one at a time: `Trials` tries a module's faults.

What a fault may leave: nothing. The server answers as before and runs no further request or task;
a part leaves no file, socket or thread, and works again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import importlib
import json
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
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
from fault_parts import FIRED, PARTS
from fault_scenarios import CHAT, SCENARIOS, TURN
from fault_sites import Faults
from fault_table import LIFE, Trial, trials_of
from starlette.requests import ClientDisconnect
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
from modulm_weight_transfer import functions

#: Modules whose parts are among `PARTS` too.
MORE_PARTS = (
    fault_engine_parts, fault_library_parts, fault_model_parts, fault_process_parts,
    fault_reading_parts, fault_server_parts,
)  # fmt: skip
KEY = "the key"


class Engine(ScriptedEngine):
    """A scripted engine with weights, whose updates take two looks, a profiler, and sleep."""

    async def run_weights(self, operation: str, **arguments: Any) -> dict[str, Any]:
        state = {"weight_version": 0, "paused": arguments.get("mode")}
        return {**state, "busy": operation == "pause", "checking": operation == "update"}

    async def collective_rpc(self, method: Any, *arguments: Any, **more: Any) -> list[Any]:
        if method in (functions.compute_checksums, functions.reset_weights):
            return [[None, {}]]
        return await super().collective_rpc(method, *arguments, **more)

    async def sleep(self, level: int = 1) -> None:
        """Do nothing."""

    async def wake_up(self, tags: Any = None) -> None:
        """Do nothing."""

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
            self.tokenizer, config=config,
            parts={"adapters": {"slots": 2}, "speech": {"rate": 24_000}},
            tasks=("generate", "embed", "classify", "score"), max_model_len=1 << 14,
            path=str(self.path),
        )  # fmt: skip
        engine = Engine(self.tokenizer, long_reply, info)
        headers = {"Authorization": f"Bearer {KEY}"}
        with (
            serve_in_thread(engine, config) as live,
            live.client(headers=headers, timeout=300) as http,
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
        except ClientDisconnect:  # which Starlette makes of an OSError
            return
        except (asyncio.CancelledError, concurrent.futures.CancelledError):
            assert scenario in PARTS  # which end with the fault itself


def tasks(live: Live) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return asyncio.run_coroutine_threadsafe(count(), live.loop).result(300)


def check_as_before(live: Live, http: httpx.Client, before: int) -> None:
    """It answers, the engine runs nothing, and no task is left."""
    with suppress(httpx.TransportError):  # a connection that the fault closed
        http.get("/health")
    answer = http.post(CHAT, json={"model": "M", "messages": TURN})
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there."
    identity = http.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("x", b"x")})
    assert http.delete(f"/v1/files/{identity.json()['id']}").is_success
    end = time.monotonic() + 300
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


def check_leftovers(files: int, threads: int) -> None:
    """No more files, sockets and threads are there than before."""
    end = time.monotonic() + 300
    while open_files() > files or threading.active_count() > threads:
        links = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
        assert time.monotonic() < end, (links, threading.enumerate())
        time.sleep(0.01)


def in_turn(rows: dict[str, str]) -> list[Trial]:
    """All faults of a module, those of a scenario together, parts last."""
    order = {scenario: number for number, scenario in enumerate(dict.fromkeys(rows.values()))}
    return sorted(
        trials_of(rows), key=lambda trial: (trial.scenario in PARTS, order[trial.scenario])
    )


class Trials:
    """Tries the faults of a module. begin: called before each. wrong: texts, by the fault.

    What goes wrong is tried once more, with another server: a starved process is late.
    """

    def __init__(
        self, world: World, module: str, begin: Callable[[Trial], None] = lambda trial: None,
        end: Callable[[Trial, str | None], None] = lambda trial, error: None,
    ) -> None:  # fmt: skip
        self._world, self._module, self._begin, self._end = world, module, begin, end
        self._faults = Faults()
        self.wrong: dict[Trial, str] = {}

    def run(self, trials: list[Trial]) -> None:
        self._world.grpc = self._module.startswith("modulm_route_grpc")
        FIRED[0] = lambda: bool(self._faults.fired)
        with self._faults.inside([importlib.import_module(self._module)]):
            self._of_server([trial for trial in trials if trial.scenario not in PARTS])
            for name in dict.fromkeys(one.scenario for one in trials if one.scenario in PARTS):
                self._of_part(name, [trial for trial in trials if trial.scenario == name])

    def _note(self, trial: Trial, error: str | None) -> None:
        if error is not None:
            self.wrong[trial] = error
        self._end(trial, error)

    def _of_server(self, left: list[Trial]) -> None:
        """All with one server, until something is wrong."""
        second = False
        while left:
            with self._world.server() as (live, http):
                http.post(CHAT, json={"model": "M", "messages": TURN})
                before, files, error = tasks(live), open_files(), None
                while left and error is None:
                    trial = left[0]
                    self._begin(trial)
                    error = self._failure(lambda: self._with_server(live, http, before, trial))  # noqa: B023
                    if error is None and open_files() > files + 8:  # that the client keeps
                        error = "descriptors were left"
                    if error is None or second:
                        self._note(left.pop(0), error)
                    second = error is not None and not second

    def _with_server(self, live: Live, http: httpx.Client, before: int, trial: Trial) -> None:
        self._faults.arm((self._module, trial.site), trial.kind)
        fires = self._fire(live, http, trial.scenario)
        self._faults.disarm()
        assert fires, "it is no longer reached"
        check_as_before(live, http, before)

    def _fire(self, live: Live, http: httpx.Client, scenario: str) -> bool:
        """Run a scenario with a fault; with another server if one reaches its site only once."""
        self._world.run(live, http, scenario)
        for _ in range(0 if self._faults.fired else 2):
            try:
                with self._world.server() as (other, client):
                    self._world.run(other, client, scenario)
            except (OSError, ModulmError):
                assert self._faults.fired
            if self._faults.fired:
                break
        return bool(self._faults.fired)

    def _of_part(self, name: str, trials: list[Trial]) -> None:
        self._faults.fired = 0
        warm(name)
        usual = open_files(), threading.active_count()

        def fire(trial: Trial) -> None:
            self._faults.arm((self._module, trial.site), trial.kind)
            self._world.run(None, None, name)
            self._faults.disarm()
            assert self._faults.fired, "it is no longer reached"
            check_leftovers(*usual)

        def works() -> None:
            self._faults.fired = 0
            with tempfile.TemporaryDirectory() as folder:
                PARTS[name](Path(folder))
            check_leftovers(*usual)

        for number, trial in enumerate(trials):
            self._begin(trial)
            error = self._failure(lambda: fire(trial))  # noqa: B023
            if error is not None:
                usual = open_files(), threading.active_count()  # what is left is told once
                error = self._failure(lambda: fire(trial))  # noqa: B023
            if error is None and number == len(trials) - 1:
                error = self._failure(works)
            self._note(trial, error)

    def _failure(self, run: Callable[[], None]) -> str | None:
        """How a call failed."""
        try:
            run()
        except Exception as error:
            return "".join(traceback.format_exception(error)[-2:])[-1500:]
        finally:
            self._faults.disarm()
        return None
