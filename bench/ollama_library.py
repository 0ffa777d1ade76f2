"""Try Ollama's library of models with Ollama's own client, on a server of the embedded model.

`.venv/bin/python bench/ollama_library.py` prints what each command answers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ollama
import torch
from harness import Server, free_port
from safetensors.torch import save_file

import modulm_demo

HELLO = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS = {"temperature": 0, "num_predict": 24}


def write_adapter(folder: Path, hidden: int) -> None:
    """Write an adapter that changes what the model says."""
    draw = torch.Generator().manual_seed(0)
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": torch.randn(2, hidden, generator=draw),
               f"{name}.lora_B.weight": torch.randn(hidden, 2, generator=draw)}  # fmt: skip
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(
        '{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "peft_type": "LORA"}'
    )


def main() -> None:
    checkpoint = Path(modulm_demo.__file__).parent / "checkpoint"
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "models").mkdir()
        shutil.copytree(checkpoint, folder / "models" / "demo-copy")
        hidden = json.loads((checkpoint / "config.json").read_text())["hidden_size"]
        write_adapter(folder / "adapter", hidden)
        port = free_port()
        command = [Path(sys.executable).parent / "modulm", "serve", "--port", str(port),
                   "--models-dir", folder / "models", "--models-dir-writable"]  # fmt: skip
        print("$ modulm serve --models-dir models --models-dir-writable")
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        server = Server(process, port, "demo")
        try:
            server.wait()
            trials(ollama.Client(host=server.url, timeout=600), folder)
        finally:
            process.terminate()
            process.wait()


def trials(client: ollama.Client, folder: Path) -> None:
    def names() -> list[str | None]:
        return [model.model for model in client.list().models]

    def ask(name: str) -> str:
        return client.chat(name, HELLO, options=OPTIONS).message.content or ""

    print("list:", names())
    print("demo-copy says:", ask("demo-copy"))
    steps = client.create(
        "brief:v1", from_="demo-copy", system="Answer briefly.",
        parameters={"temperature": 0, "stop": ["Paris"]}, stream=True,
    )  # fmt: skip
    print("create brief:v1:", [step.status for step in steps])
    print("brief:v1 says (stop Paris):", ask("brief:v1"))
    print(client.show("brief:v1").modelfile)
    adapter = {path.name: client.create_blob(path) for path in (folder / "adapter").iterdir()}
    print("create adapted:", client.create("adapted", from_="demo-copy", adapters=adapter).status)
    print("adapted says:", ask("adapted"))
    files = {path.name: client.create_blob(path)
             for path in (folder / "models" / "demo-copy").iterdir()}  # fmt: skip
    print("create uploaded:", client.create("uploaded", files=files).status)
    print("uploaded says:", ask("uploaded"))
    print("copy brief:v1 me/brief:", client.copy("brief:v1", "me/brief").status)
    for name in ("brief:v1", "demo-copy"):
        print(f"delete {name}:", client.delete(name).status)
    print("list:", names())
    print("me/brief says:", ask("me/brief"))
    try:
        client.pull("qwen3:0.6b")
    except ollama.ResponseError as error:
        print("pull qwen3:0.6b without a network:", error.error[:160])


if __name__ == "__main__":
    main()
