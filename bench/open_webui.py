"""Use Open WebUI, the program, with a server of demo and one of a tiny embedding model.

    uv venv --python 3.11 /tmp/webui
    uv pip install --python /tmp/webui/bin/python open-webui
    .venv/bin/python bench/open_webui.py /tmp/webui/bin/open-webui

It takes 242 packages, so no test installs it. Prints what each of its calls gave: models, a chat
whole and streamed, a title, and an answer about an uploaded file, whose text Open WebUI embeds with
the second server.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from modulm.testing.checkpoints import make_tiny

MODULM = Path(sys.executable).with_name("modulm")
#: Seconds for a program to answer, which imports torch and more on a busy machine.
LONGEST = 1200
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def running(log: Path, *command: object, env: Mapping[str, str], health: str) -> Iterator[None]:
    """A program while it runs."""
    with log.open("w") as sink:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=sink, stderr=sink, env={**os.environ, **env}
        )
    try:
        began = time.monotonic()
        while True:
            if process.poll() is not None or time.monotonic() - began > LONGEST:
                raise RuntimeError(log.read_text()[-3000:])
            try:
                if httpx.get(health).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        print(f"{health} answers after {time.monotonic() - began:.0f} s", flush=True)
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def use(client: httpx.Client) -> None:
    """Make the calls of its page."""
    signed_in = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
    client.headers["Authorization"] = f"Bearer {signed_in['token']}"
    models = [model["id"] for model in client.get("/api/models").json()["data"]]
    print("models:", models, flush=True)
    body = {"model": "demo", "messages": QUESTION, "temperature": 0}
    answer = client.post("/api/chat/completions", json={**body, "stream": False})
    print("chat:", answer.status_code, answer.json()["choices"][0]["message"]["content"])
    with client.stream("POST", "/api/chat/completions", json={**body, "stream": True}) as stream:
        chunks = [
            json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")
        ]
    text = "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks for choice in chunk.get("choices", ())
    )  # fmt: skip
    print(f"stream: {text!r} in {len(chunks)} chunks", flush=True)
    title = client.post("/api/v1/tasks/title/completions", json=body)
    print("title:", title.status_code, title.text[:200], flush=True)
    uploaded = client.post(
        "/api/v1/files/", params={"process_in_background": "false"},
        files={"file": ("facts.txt", b"The machine room is on the third floor.", "text/plain")},
    )  # fmt: skip
    print("file:", uploaded.status_code, uploaded.json().get("filename"), flush=True)
    about = {**body, "stream": False, "files": [{"type": "file", "id": uploaded.json()["id"]}],
             "messages": [{"role": "user", "content": "Where is the machine room?"}]}  # fmt: skip
    answer = client.post("/api/chat/completions", json=about)
    print("about the file:", answer.status_code, answer.text[:300], flush=True)


def main(program: str) -> None:
    chat, embed, page = free_port(), free_port(), free_port()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_tiny(folder / "embed", "BertModel")
        for port, words in (
            (chat, ("demo",)), (embed, (model, "--served-model-name", "embed")),
        ):  # fmt: skip
            stack.enter_context(
                running(
                    folder / f"{port}.log", MODULM, "serve", *words, "--port", port, env={},
                    health=f"http://127.0.0.1:{port}/health",
                )
            )  # fmt: skip
        env = {
            "OPENAI_API_BASE_URL": f"http://127.0.0.1:{chat}/v1", "OPENAI_API_KEY": "none",
            "ENABLE_OLLAMA_API": "False", "WEBUI_AUTH": "False", "DATA_DIR": str(folder / "data"),
            "RAG_EMBEDDING_ENGINE": "openai", "RAG_EMBEDDING_MODEL": "embed",
            "RAG_OPENAI_API_BASE_URL": f"http://127.0.0.1:{embed}/v1",
            "RAG_OPENAI_API_KEY": "none", "WEBUI_SECRET_KEY": "secret",
            "ENABLE_VERSION_UPDATE_CHECK": "False", "HF_HUB_OFFLINE": "1", "OFFLINE_MODE": "True",
        }  # fmt: skip
        stack.enter_context(
            running(
                folder / "page.log", program, "serve", "--host", "127.0.0.1", "--port", page,
                env=env, health=f"http://127.0.0.1:{page}/health",
            )
        )  # fmt: skip
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{page}", timeout=LONGEST) as client:
                use(client)
        finally:
            text = (folder / "page.log").read_text()
            print("log:", *[line for line in text.splitlines() if "ERROR" in line][-5:], sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
