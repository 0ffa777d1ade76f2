"""Try the faults that the first users met, and print what happens: run it with two trees' Python.

`.venv/bin/python bench/first_use.py [NAME ...]`; without names all of them.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from harness import Server, free_port

MODULM = str(Path(sys.executable).parent / "modulm")
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def show(text: object, most: int = 400) -> None:
    line = " ".join(str(text).split())
    print("   ", line if len(line) <= most else line[:most] + " ...")


def command(*arguments: str, timeout: float = 480) -> None:
    print("   $ modulm", *arguments)
    done = subprocess.run(
        [MODULM, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    show(f"[{len(lines)} lines, exit {done.returncode}] " + " | ".join(lines[-6:]))


@contextmanager
def server(*flags: str) -> Iterator[tuple[str, subprocess.Popen]]:
    port = free_port()
    process = subprocess.Popen(
        [MODULM, "serve", *(flags or ("demo",)), "--port", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    served = Server(process, port, "demo")
    try:
        served.wait()
        yield served.url, process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


@case
def interrupt() -> None:
    """Ctrl-C in `generate`, then another call."""
    from modulm import LLM, SamplingParams

    with LLM("demo") as llm:
        params = SamplingParams(max_tokens=300, ignore_eos=True)
        for _ in range(4):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                llm.generate(["a"] * 8, params, use_tqdm=False)
                first = "ended"
            except KeyboardInterrupt:
                first = "KeyboardInterrupt"
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                answer = llm.generate("The capital of France is", use_tqdm=False)
                show(f"{first}; next call: {answer[0].outputs[0].text!r}")
            except Exception as error:
                show(f"{first}; next call: {type(error).__name__}: {error}")


@case
def hangup() -> None:
    """SIGHUP while a request runs."""
    with server() as (url, process):
        body = {"model": "demo", "prompt": "a", "max_tokens": 200, "ignore_eos": True,
                "stream": True}  # fmt: skip
        body["model"] = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        tokens = 0
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
                for line in answer.iter_lines():
                    tokens += line.startswith("data: {")
                    if tokens == 3:
                        os.killpg(process.pid, signal.SIGHUP)
                    if line == "data: [DONE]":
                        show(f"the stream ended whole, with {tokens} chunks")
        except httpx.HTTPError as error:
            show(f"the stream broke after {tokens} chunks: {type(error).__name__}: {error}")
        show(f"exit code {process.wait(300)}")


def _silence() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 16000, 0, "NONE", ""))
        sound.writeframes(bytes(32000))
    return file.getvalue()


@case
def whisper() -> None:
    """A Whisper folder without tokenizer."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
             "vocab_size": 51865, "num_mel_bins": 80}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        WhisperForConditionalGeneration(WhisperConfig(**small)).save_pretrained(folder)
        try:
            with server(folder) as (url, _):
                show("the server starts")
                sound = {"file": ("a.wav", _silence(), "audio/wav")}
                answer = httpx.post(f"{url}/v1/audio/transcriptions", files=sound, timeout=60)
                show(f"a transcription: {answer.status_code} {answer.text}")
        except RuntimeError:
            command("serve", folder)


@case
def uncuttable() -> None:
    """Heads that ranks cannot share."""
    command("serve", "demo", "--tensor-parallel-size", "3")


@case
def advice() -> None:
    """What is asked of the wrong model, route or command."""
    from modulm import LLM

    with LLM("demo") as llm:
        try:
            show(llm.embed("a"))
        except Exception as error:
            show(f"llm.embed: {type(error).__name__}: {error}")
    command("generate", "demo", "The capital of France is")
    with server() as (url, _):
        command("complete", "--url", url, "-q", "The capital of France is")


@case
def parse() -> None:
    """A tokenizer of transformers in modulm.parsing.parse."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    import modulm.parsing

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))
    try:
        parsed = modulm.parsing.parse(
            "<think>\nx\n</think>\n\ny", reasoning_parser="qwen3", tokenizer=tokenizer
        )
        show(parsed)
    except Exception as error:
        show(f"{type(error).__name__}: {error}")


@case
def expect() -> None:
    """`100 Continue`, for a client that expects it and one that does not."""
    with server() as (url, _):
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        for header in ("", "Expect: 100-continue\r\n"):
            with socket.create_connection((host, int(port))) as link:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n{header}"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                link.sendall(head.encode())
                time.sleep(0.5)
                link.sendall(body)
                first = link.recv(100).split(b"\r\n")[0]
                show(f"{header.strip() or 'no Expect'}: the first line is {first.decode()}")


@case
def adapters() -> None:
    """Adapters with a wrong alpha, wrong names, norms and biases; their root."""
    import torch
    from safetensors.torch import save_file

    def write(folder: Path, more: dict, tensors: dict) -> str:
        folder.mkdir()
        settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "peft_type": "LORA"}
        text = json.dumps({**settings, **more}).replace('"NaN"', "NaN")
        (folder / "adapter_config.json").write_text(text)
        save_file(tensors, str(folder / "adapter_model.safetensors"))
        return str(folder)

    import modulm_demo

    checkpoint = Path(modulm_demo.__file__).parent / "checkpoint"
    hidden = json.loads((checkpoint / "config.json").read_text())["hidden_size"]
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    plain = {f"{name}.lora_A.weight": torch.zeros(2, hidden),
             f"{name}.lora_B.weight": torch.zeros(hidden, 2)}  # fmt: skip
    norm = {**plain, "base_model.model.model.norm.weight": torch.ones(hidden)}
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        folders = {
            "good": write(root / "good", {}, plain),
            "nan": write(root / "nan", {"lora_alpha": "NaN"}, plain),
            "norm": write(root / "norm", {"modules_to_save": ["norm"]}, norm),
        }
        with server(
            "demo", "--enable-lora", "--allowed-lora-path", text, "--allow-runtime-lora-updating"
        ) as (url, _):
            for label, path in (*folders.items(), ("a/../b", folders["good"]),
                                ("a\0b", folders["good"])):  # fmt: skip
                answer = httpx.post(
                    f"{url}/v1/load_lora_adapter", json={"lora_name": label, "lora_path": path}
                )
                show(f"load {label!r}: {answer.status_code} {answer.text}")
            for model in httpx.get(f"{url}/v1/models").json()["data"]:
                show({key: model.get(key) for key in ("id", "root", "parent")})


@case
def ollama() -> None:
    """Ollama's errors, a large num_ctx, and empty chunks."""
    with server() as (url, _):
        for method, path in (("POST", "create"), ("POST", "copy"), ("DELETE", "delete")):
            answer = httpx.request(method, f"{url}/api/{path}", json={})
            show(f"/api/{path}: {answer.status_code} {answer.text}")
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        body = {"model": name, "prompt": "The capital of France is",
                "options": {"num_ctx": 10**9, "num_predict": 5}}  # fmt: skip
        lines = httpx.post(f"{url}/api/generate", json=body, timeout=60).text.splitlines()
        tables = [json.loads(line) for line in lines]
        empty = sum(not t.get("response") and not t.get("done") for t in tables)
        show(f"num_ctx 1000000000: {len(lines)} lines, {empty} empty ones, {lines[0]}")


@case
def config() -> None:
    """Several wrong flags; reasons of an explanation."""
    command("config", "show", "--max-num-seqs", "0", "--block-size", "-1", "--dtype", "float7")
    command("explain", "demo")
    command("explain", "demo", "--all")


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        print(f"{name}: {CASES[name].__doc__}")
        try:
            CASES[name]()
        except Exception as error:
            show(f"the trial failed: {type(error).__name__}: {error}")
