"""Mixed load on one server of three models with room for two, and kills of engines.

A chat model (the embedded one), a tiny embedding model and a tiny Whisper are served with a memory
budget. Clients of OpenAI's, Anthropic's and Ollama's API send requests in turn; from time to time
the process of a loaded engine is killed. Every request must be answered, or refused with a reason;
the memory of all engines is measured once a second; at the end no process may be left.

    python bench/many_models.py [--minutes 5] [--kill-every 60] [--budget 420MiB]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai

from modulm.testing.checkpoints import make_tiny
from modulm_server.models.memory import measure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.media.files import sound_file
from tests.speech.whisper import write_whisper

from modulm_towers.testing import sounds

_QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
#: Seconds between two measurements of memory.
_LOOK = 1.0


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
    """The clients, and what they saw."""

    def __init__(self, url: str) -> None:
        options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 600}
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", **options)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, **options)
        self.ollama = ollama.AsyncClient(host=url, timeout=600)
        self.counts: Counter[str] = Counter()
        self.waits: list[float] = []
        self.wav = sound_file(sounds((1.0,))[0])

    async def run(self, seconds: float) -> None:
        """Run all clients at once."""
        end = time.monotonic() + seconds
        kinds = (self.stream, self.message, self.chat, self.embed, self.hear)
        await asyncio.gather(*(self.client(kind, end) for kind in kinds))

    async def client(self, kind: Any, end: float) -> None:
        """One client: requests, with a pause after each."""
        while time.monotonic() < end:
            began = time.monotonic()
            try:
                await kind()
                outcome = "answered"
            except (openai.APIConnectionError, anthropic.APIConnectionError, ConnectionError) as e:
                outcome = f"NO ANSWER ({type(e).__name__})"
            except (openai.APIError, anthropic.APIError, ollama.ResponseError) as error:
                outcome = f"refused: {str(error)[:160]}"
            self.counts[f"{kind.__name__}: {outcome}"] += 1
            self.waits.append(time.monotonic() - began)
            await asyncio.sleep(random.uniform(0.1, 3.0))

    async def stream(self) -> None:
        """A stream of OpenAI's client."""
        chunks = await self.openai.chat.completions.create(
            model="chat", messages=_QUESTION, max_tokens=16, stream=True
        )
        reasons = [chunk.choices[0].finish_reason async for chunk in chunks if chunk.choices]
        if reasons[-1] is None:
            raise ConnectionError("the stream has no end")

    async def message(self) -> None:
        """A message of Anthropic's client."""
        await self.anthropic.messages.create(model="chat", messages=_QUESTION, max_tokens=16)

    async def chat(self) -> None:
        """A chat of Ollama's client."""
        await self.ollama.chat("chat", _QUESTION, options={"num_predict": 16})

    async def embed(self) -> None:
        """An embedding by OpenAI's client."""
        await self.openai.embeddings.create(model="embed", input="one two")

    async def hear(self) -> None:
        """A transcription by OpenAI's client."""
        file = ("a.wav", self.wav)
        await self.openai.audio.transcriptions.create(model="hear", file=file, language="en")


def engines_of(server: int) -> list[int]:
    """The ids of a server's engines; any of its threads may have started them."""
    started = []
    for task in Path(f"/proc/{server}/task").iterdir():
        started += (task / "children").read_text(encoding="ascii").split()
    return [int(number) for number in started if b"engine_process" in command_of(number)]


def command_of(process: str) -> bytes:
    """The command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


async def watch(server: int, peaks: dict[str, int], kill_every: float) -> None:
    """Measure memory, and kill an engine from time to time."""
    next_kill = time.monotonic() + kill_every
    while True:
        await asyncio.sleep(_LOOK)
        engines = await asyncio.to_thread(engines_of, server)
        total = await asyncio.to_thread(measure, engines)
        peaks["bytes"] = max(peaks["bytes"], total)
        if time.monotonic() > next_kill and engines:
            next_kill += kill_every
            peaks["kills"] += 1
            os.kill(random.choice(engines), signal.SIGKILL)


async def main(options: argparse.Namespace) -> int:
    """Run the load and print what happened; returns 1 if anything was wrong."""
    folder = Path(tempfile.mkdtemp(prefix="many-models-"))
    modulm = [sys.executable, "-m", "modulm.cli.main"]
    flags = ["--models-config", str(write_models(folder)), "--port", "0",
             "--memory-budget", options.budget, "--disable-uvicorn-access-log"]  # fmt: skip
    server = subprocess.Popen([*modulm, "serve", *flags], stdout=subprocess.PIPE, text=True)
    peaks: dict[str, int] = Counter()
    try:
        url = (server.stdout.readline() if server.stdout else "").split()[-1]
        load = Load(url)
        watching = asyncio.ensure_future(watch(server.pid, peaks, options.kill_every))
        await load.run(options.minutes * 60)
        watching.cancel()
        metrics = httpx.get(f"{url}/metrics").text.splitlines()
    finally:
        engines = engines_of(server.pid)
        server.terminate()
        code = server.wait(120)
    left = [number for number in engines if Path(f"/proc/{number}").exists()]
    for line in sorted(load.counts.items()):
        print(f"{line[1]:6} {line[0]}")
    print(f"{peaks['kills']} engines killed; exit code {code}; processes left: {left or 'none'}")
    print(f"memory of all engines at most {peaks['bytes'] >> 20} MiB, budget {options.budget}")
    waits = sorted(load.waits)
    print(f"wait: median {waits[len(waits) // 2]:.2f} s, longest {waits[-1]:.1f} s")
    print(*(line for line in metrics if line.startswith("modulm:model_loads{")), sep="\n")
    silent = any("NO ANSWER" in name for name in load.counts)
    return 1 if silent or left or code else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--kill-every", type=float, default=60, help="seconds")
    parser.add_argument("--budget", default="420MiB")
    sys.exit(asyncio.run(main(parser.parse_args())))
