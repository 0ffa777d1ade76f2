"""Mixed load on one server of three models with room for two, and kills of engines.

A chat model (the embedded one), a tiny embedding model and a tiny Whisper are served with a memory
budget. Clients of OpenAI's, Anthropic's and Ollama's API send requests; from time to time the
process of a loaded engine is killed. Every request must be answered, or refused with a reason; the
memory of all engines is measured once a second; at the end no process, shared memory or temporary
folder may be left. SIGINT and SIGTERM end the load early; the summary is printed in any case.

    python bench/many_models.py [--minutes 5] [--kill-every 60] [--budget 480MiB]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai

from modulm.testing.checkpoints import make_tiny
from modulm_server.models.flags import parse_size
from modulm_server.models.memory import measure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.media.files import sound_file
from tests.speech.whisper import write_whisper

from modulm_towers.testing import sounds

_QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
#: Seconds between two measurements of memory, and between two lines of progress.
_LOOK, _PROGRESS = 1.0, 60.0
#: Errors of the clients that carry the server's answer.
_REFUSALS = (openai.APIError, anthropic.APIError, ollama.ResponseError)
#: Errors of a connection: there was no answer.
_BROKEN = (openai.APIConnectionError, anthropic.APIConnectionError, ConnectionError)


def write_models(folder: Path) -> Path:
    """Write the checkpoints and the file of models."""
    make_tiny(folder / "embed", "BertModel")
    (folder / "hear").mkdir()
    write_whisper(folder / "hear", 4)
    models = folder / "models.yaml"
    models.write_text(
        "models:\n"
        "  chat: {model: demo, max-model-len: 512, kv-cache-memory-bytes: 16777216}\n"
        f"  embed: {{model: {folder / 'embed'}}}\n"
        f"  hear: {{model: {folder / 'hear'}, kv-cache-memory-bytes: 16777216}}\n"
    )
    return models


class Load:
    """The clients, and what they saw: outcomes of each kind of request, and reasons of refusals."""

    def __init__(self, url: str) -> None:
        options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 600}
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", **options)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, **options)
        self.ollama = ollama.AsyncClient(host=url, timeout=600)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.reasons: Counter[str] = Counter()
        self.waits: list[float] = []
        self.wav = sound_file(sounds((1.0,))[0])

    async def run(self, end: asyncio.Event) -> None:
        """Run all clients at once until the event."""
        kinds = (
            self.openai_stream, self.openai_embedding, self.openai_transcription,
            self.anthropic_message, self.anthropic_stream, self.ollama_chat, self.ollama_embedding,
        )  # fmt: skip
        await asyncio.gather(*(self.client(kind, end) for kind in kinds))

    async def client(self, kind: Any, end: asyncio.Event) -> None:
        """One client: requests, with a pause after each."""
        while not end.is_set():
            began = time.monotonic()
            try:
                await kind()
                outcome = "answered"
            except _BROKEN as error:
                outcome = self.note("failed", error)
            except _REFUSALS as error:
                outcome = self.note("refused" if str(error).strip() else "failed", error)
            except Exception as error:
                outcome = self.note("failed", error)
            self.counts[kind.__name__, outcome] += 1
            self.waits.append(time.monotonic() - began)
            with suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), random.uniform(0.1, 3.0))

    def note(self, outcome: str, error: Exception) -> str:
        """Count a reason."""
        self.reasons[f"{outcome}: {type(error).__name__}: {str(error)[:200]}"] += 1
        return outcome

    def total(self, outcome: str) -> int:
        """Requests with an outcome."""
        return sum(count for (_, each), count in self.counts.items() if each == outcome)

    async def openai_stream(self) -> None:
        chunks = await self.openai.chat.completions.create(
            model="chat", messages=_QUESTION, max_tokens=16, stream=True
        )
        reasons = [chunk.choices[0].finish_reason async for chunk in chunks if chunk.choices]
        if not reasons or reasons[-1] is None:
            raise ConnectionError("the stream has no end")

    async def openai_embedding(self) -> None:
        await self.openai.embeddings.create(model="embed", input="one two")

    async def openai_transcription(self) -> None:
        file = ("a.wav", self.wav)
        await self.openai.audio.transcriptions.create(model="hear", file=file, language="en")

    async def anthropic_message(self) -> None:
        await self.anthropic.messages.create(model="chat", messages=_QUESTION, max_tokens=16)

    async def anthropic_stream(self) -> None:
        events = await self.anthropic.messages.create(
            model="chat", messages=_QUESTION, max_tokens=16, stream=True
        )
        if [event.type async for event in events][-1:] != ["message_stop"]:
            raise ConnectionError("the stream has no end")

    async def ollama_chat(self) -> None:
        parts = await self.ollama.chat("chat", _QUESTION, options={"num_predict": 16}, stream=True)
        if not [part.done async for part in parts][-1:] == [True]:
            raise ConnectionError("the stream has no end")

    async def ollama_embedding(self) -> None:
        await self.ollama.embed("embed", "one two")


class Watch:
    """Measures memory, and kills engines. over: seconds of each time above the budget."""

    def __init__(self, server: int, budget: int) -> None:
        self.server = server
        self.budget = budget
        self.peak = self.kills = self.samples = self.most = 0
        self.over: list[float] = []
        self.engines: set[int] = set()

    async def run(self, kill_every: float) -> None:
        """Watch for ever."""
        before = time.monotonic()
        next_kill = before + kill_every
        was_over = False
        while True:
            await asyncio.sleep(_LOOK)
            engines = await asyncio.to_thread(engines_of, self.server)
            total = await asyncio.to_thread(measure, engines)
            now = time.monotonic()
            self.engines |= set(engines)
            self.samples += 1
            self.peak, self.most = max(self.peak, total), max(self.most, len(engines))
            if total > self.budget:
                if not was_over:
                    self.over.append(0.0)
                self.over[-1] += now - before
            was_over, before = total > self.budget, now
            if now > next_kill and engines:
                next_kill += kill_every
                self.kills += 1
                with suppress(ProcessLookupError):
                    os.kill(random.choice(engines), signal.SIGKILL)


def engines_of(server: int) -> list[int]:
    """The ids of a server's engines; any of its threads may have started them."""
    started: list[str] = []
    with suppress(OSError):
        for task in Path(f"/proc/{server}/task").iterdir():
            with suppress(OSError):  # the thread has ended
                started += (task / "children").read_text(encoding="ascii").split()
    return [int(number) for number in started if b"engine_process" in command_of(number)]


def command_of(process: str) -> bytes:
    """The command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def traces(folder: Path) -> set[str]:
    """What the server may leave in its temporary folder, and in shared memory."""
    user = os.getuid()
    shared = [file for file in Path("/dev/shm").iterdir() if file.stat().st_uid == user]
    return {str(path) for path in (*folder.iterdir(), *shared)}


def summary(load: Load, watch: Watch, loads: list[str], seconds: float) -> None:
    """Print what happened."""
    answered, refused, failed = map(load.total, ("answered", "refused", "failed"))
    print(f"{seconds / 60:.1f} minutes: {answered} requests answered, "
          f"{refused} refused with a reason, {failed} failed")  # fmt: skip
    for (kind, outcome), count in sorted(load.counts.items()):
        print(f"{count:7} {kind}: {outcome}")
    for reason, count in load.reasons.most_common():
        print(f"{count:7} {reason}")
    print(f"{watch.kills} of {len(watch.engines)} engines killed; at most {watch.most} at once")
    print(f"memory of all engines at most {watch.peak >> 20} MiB, budget {watch.budget >> 20} MiB; "
          f"above it {len(watch.over)} times, {sum(watch.over):.0f} s in all, at most "
          f"{max(watch.over, default=0):.0f} s at once ({watch.samples} measurements)")  # fmt: skip
    waits = sorted(load.waits) or [0.0]
    print(f"wait: median {waits[len(waits) // 2]:.2f} s, 95 % within "
          f"{waits[len(waits) * 95 // 100]:.1f} s, longest {waits[-1]:.1f} s")  # fmt: skip
    print(*loads, sep="\n", flush=True)


async def main(options: argparse.Namespace) -> int:
    """Run the load and print what happened; returns 1 if anything was wrong."""
    own = Path(tempfile.mkdtemp(prefix="many-models-"))
    server_temporary = own / "tmp"
    server_temporary.mkdir()
    budget = parse_size(options.budget) or 0
    modulm = [sys.executable, "-m", "modulm.cli.main"]
    flags = ["--models-config", str(write_models(own)), "--port", "0",
             "--memory-budget", options.budget, "--disable-uvicorn-access-log"]  # fmt: skip
    before = traces(server_temporary)
    server = subprocess.Popen(
        [*modulm, "serve", *flags], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(server_temporary)},
    )  # fmt: skip
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    loads: list[str] = []
    watch = Watch(server.pid, budget)
    code: int | None = None
    began = time.monotonic()
    url = (server.stdout.readline() if server.stdout else "").split()[-1]
    load = Load(url)
    watching = asyncio.ensure_future(watch.run(options.kill_every))
    progress = asyncio.ensure_future(tell(load, watch, began))
    loop.call_later(options.minutes * 60, end.set)
    try:
        await load.run(end)
        async with httpx.AsyncClient() as client:
            metrics = (await client.get(f"{url}/metrics")).text.splitlines()
        loads += (line for line in metrics if line.startswith("modulm:model_"))
    finally:
        seconds = time.monotonic() - began
        watching.cancel()
        progress.cancel()
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            code = await asyncio.to_thread(server.wait, 120)
        summary(load, watch, loads, seconds)
    processes = [each for each in watch.engines if b"engine_process" in command_of(str(each))]
    files = traces(server_temporary) - before
    print(f"exit code {code}; processes left: {processes or 'none'}; files: {files or 'none'}")
    shutil.rmtree(own)
    failed = load.total("failed") or processes or files or code
    return 1 if failed or code is None else 0


async def tell(load: Load, watch: Watch, began: float) -> None:
    """Print a line of progress from time to time."""
    while True:
        await asyncio.sleep(_PROGRESS)
        print(f"{(time.monotonic() - began) / 60:.0f} min: {load.total('answered')} answered, "
              f"{load.total('refused')} refused, {load.total('failed')} failed, "
              f"{watch.peak >> 20} MiB", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--kill-every", type=float, default=60, help="seconds")
    parser.add_argument("--budget", default="480MiB")
    sys.exit(asyncio.run(main(parser.parse_args())))
