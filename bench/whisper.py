"""Whisper in the shape of the small checkpoint: 16 concurrent sounds, compared with transformers
and, in an interpreter of its own, faster-whisper with int8 weights.

    python bench/whisper.py [--sounds 16] [--tokens 64] [--runs 2] [--faster-whisper PYTHON]

Random weights, so that answers have the maximum number of tokens. Times the way from samples to
tokens: features, encoder and decoder. transformers runs the same files as one batch, in the faster
of two dtypes, in a process with the same malloc settings; times are the best of the runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import modulm
from modulm.testing.checkpoints import make_tiny
from modulm_platform_cpu.memory import keep_freed_memory

#: The shape of openai/whisper-small; its tokens are those of the test tokenizer.
SHAPE = {
    "d_model": 768, "num_mel_bins": 80, "max_source_positions": 1500, "max_target_positions": 448,
    "encoder_layers": 12, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072,
    "decoder_layers": 12, "decoder_attention_heads": 12, "decoder_ffn_dim": 3072,
    "vocab_size": 51865,
}  # fmt: skip
_RATE = 16000
_BEGUN = [1, 5, 6, 7]


def best(runs: int, call: Callable[[], Any]) -> float:
    """Seconds of the fastest run after a warm-up."""
    times = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def ours(
    folder: Path, sounds: list[np.ndarray], tokens: int, runs: int, quantization: str | None = None
) -> float:
    """Seconds for all sounds in the engine."""
    params = modulm.SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
    )

    def ask() -> None:
        # Other samples in each run, so that nothing is cached.
        fresh = [sound + np.float32(np.random.default_rng().normal(0, 1e-3)) for sound in sounds]
        asked = [
            {"prompt_token_ids": _BEGUN, "multi_modal_data": {"audio": (sound, _RATE)}}
            for sound in fresh
        ]
        answers = llm.generate(asked, params, use_tqdm=False)
        counts = {len(answer.outputs[0].token_ids) for answer in answers}
        if counts != {tokens}:
            raise SystemExit(f"answers have {counts} tokens, not {tokens}")

    settings = {"device": "cpu", "dtype": "bfloat16", "quantization": quantization,
                "speculative": "off"}  # fmt: skip
    with modulm.LLM(str(folder), **settings) as llm:
        return best(runs, ask)


def faster_whisper(
    python: str, folder: Path, sounds: list[np.ndarray], tokens: int, runs: int
) -> float:
    """Seconds for all sounds in faster-whisper with int8 weights."""
    np.savez(folder / "sounds.npz", *sounds)
    script = Path(__file__).parent / "peers/faster_whisper_peer.py"
    command = [python, script, folder, folder / "sounds.npz", str(tokens), str(runs)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(answer.stdout.splitlines()[-1])["seconds"])


def theirs(
    folder: Path, sounds: list[np.ndarray], tokens: int, runs: int, dtype: torch.dtype
) -> float:
    """Seconds for all sounds in transformers."""
    import transformers

    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
    extract = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    rules = transformers.GenerationConfig(
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=2,
        pad_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    begun = torch.tensor([_BEGUN] * len(sounds))

    def ask() -> None:
        mel = extract(sounds, sampling_rate=_RATE, return_tensors="pt")["input_features"]
        found = transformers.GenerationMixin.generate(
            model, input_features=mel.to(dtype), decoder_input_ids=begun, generation_config=rules
        )
        if found.shape[1] != len(_BEGUN) + tokens:
            raise SystemExit(f"transformers answers with {found.shape[1]} tokens")

    with torch.inference_mode():
        return best(runs, ask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("sounds", 16), ("tokens", 64), ("runs", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--faster-whisper", metavar="PYTHON", help="an interpreter that has it")
    given = parser.parse_args()
    keep_freed_memory()
    import transformers

    rng = np.random.default_rng(0)
    sounds = [
        rng.normal(0, 0.1, int(length * _RATE)).astype(np.float32)
        for length in np.linspace(10, 30, given.sounds)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(folder, "WhisperForConditionalGeneration", dtype="bfloat16", **SHAPE)
        transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
        count = given.sounds
        mine = ours(folder, sounds, given.tokens, given.runs)
        print(f"modulm, bfloat16: {mine:.2f} s, {count / mine:.2f} sounds a second", flush=True)
        if given.faster_whisper:
            small = ours(folder, sounds, given.tokens, given.runs, "int8")
            print(f"modulm, int8: {small:.2f} s, {count / small:.2f} sounds a second", flush=True)
            other = faster_whisper(given.faster_whisper, folder, sounds, given.tokens, given.runs)
            words = f"faster-whisper, int8: {other:.2f} s, {count / other:.2f} sounds a second"
            print(f"{words}, modulm is {other / small:.2f} times as fast", flush=True)
        for dtype in (torch.bfloat16, torch.float32):
            other = theirs(folder, sounds, given.tokens, given.runs, dtype)
            words = f"transformers, {dtype}: {other:.2f} s, {count / other:.2f} sounds a second"
            print(f"{words}, modulm is {other / mine:.2f} times as fast", flush=True)


if __name__ == "__main__":
    main()
