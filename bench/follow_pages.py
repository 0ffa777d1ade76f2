"""Follow the blocks of docs/ that tests only show, as a reader would, and record it.

`.venv/bin/python bench/follow_pages.py [PAGE ...]`; without pages, those with a block that is not
recorded, or recorded as not followed yet. `--rest` follows nothing and records the others as such.
Commands run with `demo` or a tiny checkpoint in place of models that have to be downloaded, with
and files of a temporary folder in place of /srv and so on; every server has to become healthy,
answer the requests of its page, and end with exit code 0. The record is
tests/unit/docs/followed.toml, which a test compares with the pages.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))

from page_blocks import Block, pages, shown_blocks  # noqa: E402

RECORD = ROOT / "tests/unit/docs/followed.toml"
BIN = Path(sys.executable).parent
#: Seconds for a server to become healthy, and for a command to end.
LONGEST = 400

Edits = Mapping[str, str]
#: What happens with a block: a state that says why it is not run here, or a function that follows
#: it and returns how.
Step = str | Callable[["Folder", Block, Sequence[Block]], str]


class Folder:
    """Files in place of those that pages name, each made when it is needed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def adapter(self) -> Path:
        """A LoRA adapter for demo."""
        import torch
        from safetensors.torch import save_file

        import modulm_demo

        checkpoint = Path(modulm_demo.__file__).parent / "checkpoint"
        hidden = json.loads((checkpoint / "config.json").read_text())["hidden_size"]
        folder = self.path / "adapters" / "sql"
        folder.mkdir(parents=True)
        settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "peft_type": "LORA"}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        name = "base_model.model.model.layers.0.self_attn.q_proj"
        tensors = {"lora_A": torch.zeros(2, hidden), "lora_B": torch.zeros(hidden, 2)}
        save_file(
            {f"{name}.{side}.weight": tensor for side, tensor in tensors.items()},
            str(folder / "adapter_model.safetensors"),
        )
        return folder

    def tiny(self, architecture: str) -> Path:
        """A tiny checkpoint of an architecture."""
        from modulm.testing.checkpoints import make_tiny

        folder = self.path / architecture
        return folder if folder.exists() else make_tiny(folder, architecture)

    def file(self, name: str, text: str) -> Path:
        """A file that a page shows."""
        path = self.path / name
        path.write_text(text, encoding="utf-8")
        return path


def edited(text: str, edits: Edits) -> str:
    for old, new in edits.items():
        if old not in text:
            raise ValueError(f"{old!r} is not in:\n{text}")
        text = text.replace(old, new)
    return text


def commands(text: str) -> list[str]:
    """The lines of a block, with continued ones joined and the prompt removed."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines: list[str] = []
    for prompted in joined.splitlines():
        line = re.sub(r"^(head|other)?\$ +", "", prompted)
        if lines and lines[-1].count("'") % 2:
            lines[-1] += "\n" + line
        elif line.strip() and not line.startswith("#"):
            lines.append(line)
    return lines


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def shell(folder: Folder, text: str) -> str:
    """Run lines in bash; curl fails for an error of the server."""
    prelude = 'set -euo pipefail\ncurl() { command curl --fail-with-body -sS "$@"; }\n'
    done = subprocess.run(
        ["bash", "-c", prelude + text], cwd=folder.path, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=LONGEST,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}\n{text}\n{done.stdout[-2000:]}")
    return done.stdout


@contextmanager
def running(folder: Folder, command: str) -> Iterator[str]:
    """A server while it runs; its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = shlex.split(command, comments=True)
    if "--port" in words:
        words[words.index("--port") + 1] = str(port)
    else:
        words += ["--port", str(port)]
    if "--host" in words:
        words[words.index("--host") + 1] = "127.0.0.1"
    uds = words[words.index("--uds") + 1] if "--uds" in words else None
    log = folder.path / "server.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            words, cwd=folder.path, env=environment(), stdout=sink, stderr=sink
        )
    url = f"http://127.0.0.1:{port}"
    transport = None if uds is None else httpx.HTTPTransport(uds=uds)
    began = time.monotonic()
    try:
        with httpx.Client(transport=transport) as client:
            while True:
                if process.poll() is not None or time.monotonic() - began > LONGEST:
                    raise RuntimeError(f"{command}\n{log.read_text()[-3000:]}")
                try:
                    if client.get(f"{url}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.2)
        yield url
        process.send_signal(signal.SIGTERM)
        if process.wait(LONGEST) or "Traceback" in log.read_text():
            raise RuntimeError(f"{command}\n{log.read_text()[-3000:]}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def serve(
    edits: Edits | Callable[[Folder], Edits] | None = None,
    *,
    flags: str = "",
    asks: Sequence[int] = (),
    only: Sequence[int] | None = None,
) -> Step:
    """Start each server of a block. flags: more of them. asks: blocks of the page that are sent to
    the last one, by index. only: the commands to start.
    """

    def follow(folder: Folder, block: Block, shown: Sequence[Block]) -> str:
        table = edits(folder) if callable(edits) else edits or {}
        lines = commands(edited(block.text, table))
        for line in lines:
            match = re.search(r"<<|> ", line)
            if line.startswith("printf") or match:
                shell(folder, line)
        servers = [
            line for line in lines
            if re.match(r"(\w+=\S+ )*(modulm|vllm) serve|python -m vllm", line)
        ]  # fmt: skip
        chosen = servers if only is None else [servers[index] for index in only]
        rest = [line for line in lines if line.startswith("curl")]
        for at, line in enumerate(chosen):
            prefix = re.match(r"((?:\w+=\S+ )*)", line)
            names = prefix[1] if prefix else ""
            command = f"env {names}{line[len(names) :]} {flags}"
            with running(folder, command) as url:
                if at + 1 == len(chosen):
                    texts = [*rest, *(shown[index].text for index in asks)]
                    for text in texts:
                        ask(folder, text, url, table)
        return "started with demo or a tiny checkpoint" + (", asked" if asks or rest else "")

    return follow


def ask(folder: Folder, text: str, url: str, edits: Edits) -> str:
    """Send the requests of a block to a server."""
    for old, new in edits.items():
        text = text.replace(old, new)
    text = re.sub(r"(http://)?(127\.0\.0\.1|localhost):8000|\$URL", url, text)
    return shell(folder, "\n".join(commands(text)))


def asked(index: int) -> Step:
    """The block is sent by the step of another one."""
    return lambda folder, block, shown: f"sent to the server of block {index + 1} of the page"


def run(edits: Edits | Callable[[Folder], Edits] | None = None, *, expect: str = "") -> Step:
    """Run the commands of a block."""

    def follow(folder: Folder, block: Block, shown: Sequence[Block]) -> str:
        table = edits(folder) if callable(edits) else edits or {}
        output = shell(folder, "\n".join(commands(edited(block.text, table))))
        if expect not in output:
            raise RuntimeError(f"{expect!r} is not in\n{output}")
        return "run"

    return follow


def program(edits: Edits | Callable[[Folder], Edits], *, server: str | None = None) -> Step:
    """Run a block of Python, perhaps beside a server."""

    def follow(folder: Folder, block: Block, shown: Sequence[Block]) -> str:
        table = edits(folder) if callable(edits) else edits
        with ExitStack() as stack:
            text = edited(block.text, table)
            if server is not None:
                url = stack.enter_context(running(folder, server.format(folder=folder.path)))
                text = text.replace("http://127.0.0.1:8000", url)
            path = folder.file("block.py", text)
            shell(folder, f"python {path}")
        return "run"

    return follow


def written(name: str) -> Step:
    """The block is a file that the next ones use."""

    def follow(folder: Folder, block: Block, shown: Sequence[Block]) -> str:
        folder.file(name, block.text)
        return f"written as {name} for the commands beside it"

    return follow


PAGE_PLUGIN = "not run: the package is the page's own; test_plugin_pages.py runs its code"
FRAGMENT = "{day}, read: a fragment of a request or of a file"
NO_INDEX = "not run: modulm is on no index; tests/e2e/test_wheels.py installs the wheels"
DOCKER = (
    "not run: needs images from the network; tests/unit/docs/test_deployment.py reads the files"
)
#: Of a block that nobody has followed.
_LATER = "not run: not followed yet"
CLIENTS = "test: tests/e2e/server/test_client_programs.py"


def lora(folder: Folder) -> Edits:
    return {"/srv/adapters/sql": str(folder.adapter)}


def embed_models(folder: Folder) -> Edits:
    return {
        "Qwen/Qwen3-0.6B": "demo",
        "BAAI/bge-small-en-v1.5": str(folder.tiny("BertModel")),
        "openai/whisper-tiny": str(folder.tiny("WhisperForConditionalGeneration")),
    }


def bert(folder: Folder) -> Edits:
    return {"BAAI/bge-small-en-v1.5": str(folder.tiny("BertModel"))}


def keys(folder: Folder) -> None:
    folder.file("keys.yaml", "keys:\n  - {name: ann, key: sk-ann}\n")


def with_files(step: Step, make: Callable[[Folder], object]) -> Step:
    """A step that needs a file which its page describes in words."""
    assert callable(step)

    def follow(folder: Folder, block: Block, shown: Sequence[Block]) -> str:
        make(folder)
        return step(folder, block, shown)

    return follow


def with_demo(folder: Folder, text: str) -> str:
    """Send requests to a server of demo."""
    with running(folder, "modulm serve demo") as url:
        ask(folder, text, url, {})
    return "sent to a server of demo"


def printed(folder: Folder, page: str, text: str) -> str:
    """Run the Python above a block and compare what it prints."""
    path = ROOT / f"docs/{page}.md"
    code = path.read_text(encoding="utf-8").partition(text)[0].rpartition("```python\n")[2]
    folder.file("block.py", code.partition("```")[0])
    if (output := shell(folder, "python block.py")) != text:
        raise RuntimeError(f"printed:\n{output}")
    return "compared with what the code above it prints"


def models_file(folder: Folder, text: str) -> str:
    folder.file(
        "models.yaml", edited(text, {"Qwen/Qwen3-0.6B": "demo", **bert(folder), "8192": "1024"})
    )
    return "written as models.yaml for the command beside it"


def library_model(folder: Folder, text: str) -> str:
    """Serve a model of a library whose settings are the block's."""
    model = folder.path / "pirates" / "pirate"
    folder.tiny("LlamaForCausalLM").rename(model.parent.mkdir() or model)
    (model / "modulm.yaml").write_text(edited(text, {"./model.gguf": "./"}))
    with running(folder, "modulm serve --models-dir pirates") as url:
        ask(
            folder,
            f"""curl {url}/v1/completions -H 'content-type: application/json' -d \\
          '{{"model": "pirate", "prompt": "a", "max_tokens": 2}}'""",
            url,
            {},
        )
    return "written beside a tiny checkpoint, asked"


def tools_file(folder: Folder, text: str, clock: str) -> str:
    """The server of tools that the page shows last; the one on the network is left out."""
    folder.file("tools.yaml", text.partition("  search:")[0])
    folder.file("clock.py", clock)
    return "written as tools.yaml, without the server on a network"


def transformers_bridge(folder: Folder, block: Block) -> str:
    explain, command = commands(edited(block.text, {"MODEL": "demo"}))
    shell(folder, explain)
    with running(folder, command):
        pass
    return "run with demo"


def vllm_commands(folder: Folder, text: str) -> str:
    """vLLM's commands: two servers, then what asks the second, or ends by itself."""
    lines = commands(edited(text, {"Qwen/Qwen3-0.6B --max-model-len 4096": "demo",
                                   "Qwen/Qwen3-0.6B": "demo"}))  # fmt: skip
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
               "body": {"model": "demo", "max_tokens": 4,
                        "messages": [{"role": "user", "content": "Hello"}]}}  # fmt: skip
    folder.file("in.jsonl", json.dumps(request) + "\n")
    for line in lines[:2]:
        with running(folder, line) as url:
            pass
    with running(folder, lines[0]) as url:
        shell(folder, f"{lines[2]} --url {url}/v1")
    for line in lines[3:]:
        shell(folder, line)
    return "run with demo"


def vllm_note(folder: Folder, text: str) -> str:
    command, note = text.splitlines()[:2]
    with running(folder, "env " + command.removeprefix("$ ")):
        log = (folder.path / "server.log").read_text()
    if note.partition(":")[0] not in log:
        raise RuntimeError(f"{note!r} is not in\n{log}")
    return "run, the note compared"


#: For each page what to do with each of its blocks, in order; or what holds for a generated page.
STEPS: dict[str, list[Step] | str] = {
    "CONTRIBUTING": [
        "{day}, run by every session of this project and by CI (.ci/run)",
    ],
    "README": [
        "{day}, run in a fresh clone at the end of every session of this project",
        lambda folder, block, shown: with_demo(folder, block.text),
        serve({".venv/bin/modulm": "modulm", "Qwen/Qwen3-0.6B": "demo"}),
        run({"install NAME": "install --help", "NAME ": "modulm-parser-hermes ",
             "explain MODEL": "explain demo"}),
    ],
    "adapters": [
        serve(lambda f: {"MODEL": "demo", "org/poet-lora": str(f.adapter), **lora(f),
                         '"base_model_name": "llama"': '"base_model_name": "demo"'},
              flags="--allow-runtime-lora-updating --allowed-lora-path .", asks=[1]),
        asked(0),
        program(lambda f: {"MODEL": "demo", **lora(f)}),
    ],
    "chat-page": [
        NO_INDEX,
        with_files(serve({"Qwen/Qwen3-0.6B": "demo"}), keys),
        serve(),
    ],
    "cli": "test: tests/unit/docs/test_reference.py",
    "clients": [
        "not run: needs images from the network; docs/clients.md says how the program was tried",
        CLIENTS,
        CLIENTS,
        CLIENTS,
        "{day}, read: the fields of the block above, in the proxy's file",
        CLIENTS,
        "2026-11-28, with Cline's command line",
        "2026-11-28, with Claude Code's command line",
    ],
    "compatibility": [
        "test: tests/unit/plugins/test_migrate.py",
        with_files(run(), lambda f: (f.path / "src").mkdir()),
        "test: tests/unit/plugins/test_old_names.py",
    ],
    "deployment": [
        *[DOCKER] * 3,
        "test: tests/unit/docs/test_deployment.py::test_ray_serve",
        "not run: several machines; tests/ray_serve/test_cluster.py starts a cluster",
        DOCKER,
        "test: tests/ray_serve/test_pool_cluster.py",
        "test: tests/unit/docs/test_deployment.py",
    ],
    "disaggregation": [
        serve({"MODEL": "demo"}),
        "not run: nixl needs its wheel and network cards; tests/plugins/kv_connectors has it",
        "test: tests/plugins/kv_connectors/test_peer.py",
        "test: tests/media/test_encoder_only.py",
        "test: tests/media/test_encoder_only.py",
    ],
    "embeddings": [
        serve(bert),
        lambda folder, block, shown: printed(folder, "embeddings", block.text),
        FRAGMENT,
        "not run: needs the checkpoint, of 7 GB",
        "not run: needs the checkpoint; tests/e2e/server/test_pooling_models.py has tiny ones",
    ],
    "fair-sharing": [
        written("keys.yaml"),
        serve({"MODEL": "demo"}),
    ],
    "fit": ["test: tests/memory/test_fit_page.py"] * 3,
    "from-ollama": [
        "not run: needs the program ollama; tests/e2e/server/clients/with_ollama.py lists models",
        with_files(serve({"~/models": "models"}),
                   lambda f: f.tiny("LlamaForCausalLM").rename(f.path / "models" / "tiny")
                   if (f.path / "models").mkdir() is None else None),
        with_files(serve({"~/models": "library"}), lambda f: (f.path / "library").mkdir()),
    ],
    "from-vllm": [serve({"Qwen/Qwen3-0.6B --max-model-len 8192": "demo"})],
    "grpc": [
        serve(),
        "not run: needs grpcurl; tests/server/test_grpc.py finds services as it does",
        program({"127.0.0.1:50051": "127.0.0.1:50052"},
                server="modulm serve demo --grpc-port 50052"),
    ],
    "hooks": [run({"NAME": "greeting"}), FRAGMENT],
    "index": [serve({"Qwen/Qwen3-0.6B": "demo"})],
    "install": [
        "{day}, run in a fresh clone at the end of every session of this project",
        "test: tests/e2e/test_wheels.py",
        serve(),
        "test: tests/unit/docs/test_guides.py",
    ],
    "install-plugins": [
        *["test: tests/unit/plugins/test_package_commands.py"] * 2,
        run({"modulm-longest": "modulm-parser-hermes"}),
        *["test: tests/unit/plugins/test_package_commands.py"] * 2,
        *["test: tests/unit/plugins/test_attestations.py"] * 2,
    ],
    "kv-cache": [
        serve(lambda f: {"MODEL": "demo", "size 8": "size 0.01",
                         "/var/cache/kv": str(f.path / "kv")}),
        serve(lambda f: {"MODEL": "demo", "8589934592": "8589934",
                         "/var/cache/kv": str(f.path / "kv")}),
        FRAGMENT,
        serve({"MODEL": "demo"}),
    ],
    "many-models": [
        serve(embed_models, asks=[1]),
        asked(0),
        lambda folder, block, shown: models_file(folder, block.text),
        serve(),
        with_files(serve({"~/models": "library"}), lambda f: (f.path / "library").mkdir()),
        lambda folder, block, shown: library_model(folder, block.text),
        "test: tests/e2e/server/test_many_models.py",
    ],
    "media": ["test: tests/e2e/server/test_media.py"],
    "metrics": [serve()],
    "models": [run({"Qwen/Qwen3-0.6B": "demo"})],
    "parallel": [
        serve({"MODEL": "demo"}),
        "not run: needs eight devices; tests/distributed has the same on four ranks",
        "not run: needs eight devices; tests/distributed has the same on four ranks",
        "not run: several machines; tests/ray_serve/test_cluster.py starts a cluster",
        FRAGMENT,
        "not run: the function is a reader's own; tests/plugins has registered ones",
        "not run: the next block is its script",
        "test: tests/distributed/test_external_launcher.py",
        serve({"MODEL": "demo"}, only=[0]),
        "not run: several machines; tests/e2e/server/test_replicas.py has two hosts on one",
        "test: tests/e2e/server/test_restart.py",
        "not run: needs a mixture on eight devices; tests/distributed has two ranks",
    ],
    "parsers": [run({"MODEL": "demo"}), serve({"MODEL": "demo"})],
    "performance": [
        serve({"MODEL": "demo"}),
        "test: tests/weight_offload/test_weight_offload.py",
        "test: tests/weight_offload/test_weight_offload.py",
        "not run: needs a GPU; `make test-all` has the dry run",
        "2026-11-28, the dry run in Triton's interpreter",
    ],
    "plugins-connector": [FRAGMENT, PAGE_PLUGIN],
    "plugins-io-processor": [FRAGMENT, PAGE_PLUGIN, PAGE_PLUGIN],
    **{
        f"plugins-{kind}": [FRAGMENT]
        for kind in ("checkpoint", "executor", "loader", "logits-processor", "media", "parser",
                     "resolver", "route", "scheduler", "speaker", "stat-logger", "step-part",
                     "tokenizer", "transcriber")
    },
    "plugins-isolation": [
        serve({"MODEL": "demo", "modulm-parser-foo": "modulm-parser-gigachat",
               " --isolate modulm-route-bar": ""}),
        "test: tests/unit/plugins/test_isolation.py",
    ],
    "plugins-speculator": [FRAGMENT, PAGE_PLUGIN],
    "plugins-threats": [
        with_files(serve(), lambda f: shell(f, "modulm plugins lock")),
        "test: tests/unit/plugins/test_lock.py",
    ],
    "plugins-weight-transfer": [PAGE_PLUGIN],
    "publish-a-plugin": [
        "test: tests/unit/docs/test_publish_page.py",
        "not run: an option of the page on isolation, for this package",
        "test: tests/unit/docs/test_publish_page.py",
    ],
    "quantization": [
        serve({"MODEL": "demo"}),
        "test: tests/plugins/quantization/test_gguf.py",
    ],
    "reinforcement-learning": [
        *["test: tests/e2e/server/test_trl.py"] * 3,
        "test: tests/plugins/weight_transfer/test_updates.py",
        "test: tests/plugins/weight_transfer/test_drafters.py",
        *["test: tests/plugins/expert_routes/test_routed_experts.py"] * 2,
    ],
    "run-at-home": [
        NO_INDEX,
        serve({"Qwen/Qwen3-4B": "demo"}),
        serve({"Qwen/Qwen3-4B": "demo"}),
        serve(lambda f: {"Qwen/Qwen3-4B": "demo",
                         "google/gemma-3-1b-it": str(f.tiny("Gemma3ForCausalLM"))}),
    ],
    "run-for-a-team": [
        written("keys.yaml"),
        serve(lambda f: {"MODEL": "demo", "/var/lib/modulm": str(f.path / "files")}),
    ],
    "sampling": [FRAGMENT],
    "security": [
        "test: tests/unit/docs/test_deployment.py",
        with_files(serve(lambda f: {"MODEL": "demo", "/run/modulm/": f"{f.path}/",
                                    "/etc/modulm/keys": "key"}),
                   lambda f: f.file("key", "sk-one\n")),
    ],
    "server": [
        FRAGMENT,
        lambda folder, block, shown: with_demo(folder, block.text),
        "test: tests/server/test_render.py",
        "test: tests/server/test_grpc.py",
        serve({"MODEL": "demo"}),
        serve({"MODEL": "demo", "pip install modulm[tracing]\n": "", "HOST": "127.0.0.1"}),
        serve({"MODEL": "demo", "FOLDER": "."}),
    ],
    "speculation": [
        serve(),
        serve({"big-model": "demo", "small-model": "demo"}, only=[0]),
        "not run: needs the drafter; tests/plugins/speculators has tiny ones",
        serve(),
    ],
    "speech": ["test: tests/plugins/models/test_csm.py"] * 2,
    "structured-answers": [lambda folder, block, shown: with_demo(folder, block.text)],
    "testing-plugins": [
        NO_INDEX,
        *["test: tests/unit/plugins/test_pytest_modulm.py"] * 2,
    ],
    "tool-servers": [
        lambda folder, block, shown: tools_file(folder, block.text, shown[-1].text),
        serve({"Qwen/Qwen3-0.6B": "demo", "pip install 'modulm-route-responses[tools]'\n": ""},
              asks=[2, 3, 6]),
        asked(1),
        asked(1),
        "test: tests/server/test_tool_servers.py",
        "test: tests/server/test_tool_servers.py",
        asked(1),
        "{day}, run by the server of block 2 of the page",
    ],
    "tpu": [
        "not run: needs TPUs; tests/distributed/test_ray.py runs it on two machines of JAX on CPUs",
        "not run: needs a TPU",
        "not run: needs a TPU",
        run({"--dtype": "--max-tokens 4 --dtype"}),
        FRAGMENT,
    ],
    "transcription": ["test: tests/e2e/server/test_transcription.py"],
    "transformers": [
        lambda folder, block, shown: transformers_bridge(folder, block),
    ],
    "translate-the-chat-page": [FRAGMENT, "test: tests/server/test_page_languages.py"],
    "vllm-scripts": [
        serve({"Qwen/Qwen3-0.6B --max-model-len 4096": "demo", "pip install modulm-vllm\n": ""}),
        lambda folder, block, shown: vllm_commands(folder, block.text),
        lambda folder, block, shown: vllm_note(folder, block.text),
    ],
    "write-a-plugin": [
        "test: tests/unit/docs/test_plugin_pages.py",
        FRAGMENT,
        FRAGMENT,
    ],
}  # fmt: skip


def main(names: Sequence[str]) -> int:
    """Follow pages and write the record. Returns 1 if a block failed."""
    record: dict[str, dict[str, str]] = tomllib.loads(RECORD.read_text(encoding="utf-8"))
    day = datetime.now(UTC).date().isoformat()
    failed = 0
    for page, path in pages().items():
        shown = shown_blocks(page, path)
        known = record.get(page, {})
        done = {name for name, state in known.items() if state != _LATER}
        fresh = {block.hash for block in shown} == done or "page" in known
        if "--rest" in names:
            if shown and not fresh:
                record[page] = {**unfollowed(page, shown, day), **known}
            continue
        if (page not in names) if names else (fresh or not shown):
            continue
        steps = STEPS.get(page)
        if isinstance(steps, str):
            record[page] = {"page": steps}
            continue
        if steps is None or len(steps) != len(shown):
            print(f"{page}: {len(shown)} blocks and {len(steps or ())} steps", flush=True)
            failed += 1
            continue
        states: dict[str, str] = {}
        with tempfile.TemporaryDirectory() as place:
            folder = Folder(Path(place))
            for at, (block, step) in enumerate(zip(shown, steps, strict=True), 1):
                if isinstance(step, str):
                    states[block.hash] = step.format(day=day)
                    continue
                try:
                    states[block.hash] = f"{day}, {step(folder, block, shown)}"
                    print(f"{page} {at}: {states[block.hash]}", flush=True)
                except Exception as error:
                    failed += 1
                    print(f"{page} {at}: {type(error).__name__}: {error}", flush=True)
        # What failed keeps the state that it had, if any.
        record[page] = {b.hash: states.get(b.hash) or known.get(b.hash, _LATER) for b in shown}
        write(record)
    write(record)
    return int(failed > 0)


def unfollowed(page: str, shown: Sequence[Block], day: str) -> dict[str, str]:
    """The states of a page's blocks before any is followed."""
    steps = STEPS.get(page, ())
    states = dict.fromkeys((block.hash for block in shown), _LATER)
    if not isinstance(steps, str) and len(steps) == len(shown):
        for block, step in zip(shown, steps, strict=True):
            if isinstance(step, str):
                states[block.hash] = step.format(day=day)
    return states


def write(record: Mapping[str, Mapping[str, str]]) -> None:
    """Write the record, page by page."""
    lines = ["# Written by bench/follow_pages.py; tests/unit/docs/test_followed_pages.py says what",
             "# the states are.\n"]  # fmt: skip
    for page in sorted(record):
        lines.append(f"[{page}]")
        lines += [f"{name} = {json.dumps(state)}" if name.isidentifier()
                  else f'"{name}" = {json.dumps(state)}'
                  for name, state in record[page].items()]  # fmt: skip
        lines.append("")
    RECORD.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
