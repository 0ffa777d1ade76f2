"""Memory of a server while a PDF of 200 pages becomes images, and these a question.

    python bench/pdf_pages.py [--pages 200]

Starts a server with a tiny model of images, whose weights take less than 1 MB. Prints the most
memory (PSS) that its processes and their children hold above what they held before the document,
while `/v1/documents` draws the pages, and while a conversation with all of them is answered.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

import httpx
import numpy as np
from PIL import Image, ImageDraw


def document(pages: int) -> bytes:
    """A PDF of scanned pages: lines of text over paper with the noise of a scanner."""
    rng = np.random.default_rng(0)
    paper = rng.integers(244, 252, (1100, 850), dtype=np.uint8)
    drawn = []
    for number in range(pages):
        image = Image.fromarray(paper).convert("L")
        draw = ImageDraw.Draw(image)
        for line in range(40):
            draw.text((60, 40 + 26 * line), f"Page {number}, line {line}: " + "lorem ipsum " * 7)
        drawn.append(image)
    file = io.BytesIO()
    drawn[0].save(file, "PDF", save_all=True, append_images=drawn[1:])
    return file.getvalue()


def memory(root: int) -> int:
    """Bytes (PSS) of a process and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    below, total = {root}, 0
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    for pid in below:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


class Watched:
    """The most memory of a process while something runs."""

    def __init__(self, pid: int) -> None:
        self.pid, self.most, self._end = pid, 0, threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.2):
            self.most = max(self.most, memory(self.pid))

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()


def checkpoint(folder: Path) -> Path:
    """A tiny random model of images, with four tokens of each."""
    import transformers as hf

    from modulm.plugins import current
    from modulm_towers.testing import ImageFamily, write_family

    pixels = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    image = hf.models.clip.image_processing_pil_clip.CLIPImageProcessorPil(**pixels)

    def processor(tokenizer: object) -> object:
        return hf.LlavaProcessor(
            image, tokenizer, patch_size=7, vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )  # fmt: skip

    driver = current().load("models", "LlavaForConditionalGeneration")
    text = {**driver.tiny()["text_config"], "max_position_embeddings": 8192}
    changes = {"text_config": text}
    tokens = {"image_token": "<image>"}
    return write_family(ImageFamily(driver, tokens, processor, changes=changes), folder)


def main() -> None:
    """Print what is held above the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=200)
    pages = parser.parse_args().pages
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        folder = checkpoint(Path(name) / "model")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        limits = ["--limit-mm-per-prompt", json.dumps({"image": pages})]
        limits += ["--max-request-bytes", str(1 << 30)]
        command = [sys.executable, "-m", "modulm", "serve", str(folder), "--port", str(port)]
        command += ["--device", "cpu", "--served-model-name", "M", *limits]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=900)
        try:
            while True:
                try:
                    if client.get("/health").is_success:
                        break
                except httpx.HTTPError:
                    time.sleep(0.2)
            ask(client, ["data:image/png;base64," + blank()])
            data = base64.b64encode(document(pages)).decode()
            before = memory(server.pid)
            print(f"before: {before / 1e6:.0f} MB; the document {len(data) * 3 / 4e6:.0f} MB")
            with Watched(server.pid) as drawing:
                body = {"name": "a.pdf", "data": data, "pages": pages}
                answer = client.post("/v1/documents", json=body)
                answer.raise_for_status()
                urls = answer.json()["pages"]
            with Watched(server.pid) as asking:
                tokens = ask(client, urls)
            sizes = sum(map(len, urls)) / 1e6
            print(f"{len(urls)} images of {sizes:.0f} MB in base64: {tokens} tokens in the prompt")
            for what, watched in (("drawing", drawing), ("asking", asking)):
                print(f"{what}: {(watched.most - before) / 1e6:.0f} MB above")
        finally:
            server.terminate()
            server.wait()


def blank() -> str:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def ask(client: httpx.Client, urls: list[str]) -> int:
    """Tokens of a prompt with these images."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}
    answer = client.post("/v1/chat/completions", json={"model": "M", "messages": [message],
                                                       "max_tokens": 4})  # fmt: skip
    if answer.is_error:
        raise SystemExit(answer.text[:500])
    return int(answer.json()["usage"]["prompt_tokens"])


if __name__ == "__main__":
    main()
