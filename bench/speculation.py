"""The gain of speculation for one stream, and the cost of verification: paired with plain rounds.

    python bench/speculation.py [--folder FOLDER] [--rounds 7] [--tokens 96] [--json FILE]

FOLDER keeps two checkpoints of random weights, created on the first run: one of Qwen3-0.6B's shape
and a draft model of an eighth of its parameters. Each engine is a separate process. In each round
all do the same work, in a changing order, and are compared with the plain one of that round.

- `ngram`: greedy answers to a repetitive text, and answers sampled at temperature 1, which do not
  repeat;
- `draft`: the draft model runs at full cost, but its tokens are replaced: each is correct with
  probability 0.7, known from the plain answer;
- `wrong`: four wrong tokens are drafted at no cost, so every step verifies them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from attrs import frozen

from modulm import LLM, SamplingParams
from modulm.contracts.drafter import DraftStep
from modulm.testing.checkpoints import make_tiny
from modulm_speculation import Speculator
from modulm_speculator_draft_model.speculator import DraftModelOptions, DraftModelSpeculator

TARGET = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
DRAFT = {
    **TARGET, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 7,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
ACCEPTANCE = 0.7
#: Whole sequences, prompt included, from which the synthetic draft takes the correct tokens.
KNOWN: list[list[int]] = []


class Wrong(Speculator):
    """Drafts wrong tokens at no cost."""

    name: ClassVar[str] = "wrong"

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        return [np.arange(3, 3 + most) for most in step.most]


@frozen
class SyntheticOptions(DraftModelOptions):
    """draft: folder of the draft model, since `model` names the class."""

    draft: str = ""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "model", self.draft)


class Synthetic(DraftModelSpeculator):
    """The draft model at its full cost, with a fixed acceptance rate."""

    name: ClassVar[str] = "synthetic"
    Config: ClassVar[type] = SyntheticOptions
    draw = np.random.default_rng(0)

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        found = super().propose(step)
        for history, tokens in zip(step.histories, found, strict=True):
            start = len(history)
            known = next((k for k in KNOWN if k[:start] == history.tolist()), [])
            right = np.array(known[start : start + len(tokens)], dtype=np.int64)
            tokens[: len(right)] = right
            tokens[self.draw.random(len(tokens)) > ACCEPTANCE] = 7
        return found


def engines(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> speculation flags."""
    fixed = {"method": "custom", "adaptive": False}
    return {
        "plain": {},
        "ngram": {"method": "ngram"},
        "draft": {
            **fixed, "model": "speculation:Synthetic", "draft": str(folder / "draft"),
            "num_speculative_tokens": 4,
        },
        "wrong": {**fixed, "model": "speculation:Wrong", "num_speculative_tokens": 4},
    }  # fmt: skip


def work(name: str, folder: Path) -> None:
    """Run an engine in this process: reads a request per line from stdin, writes its time to
    stdout.
    """
    import speculation  # this file, as the engine imports it

    table = engines(folder)[name]
    flags = {"speculative_config": table} if table else {"speculative": "off"}
    llm = LLM(str(folder / "target"), max_model_len=2048, **flags)
    scheduler = llm._core.loop.scheduler
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        speculation.KNOWN[:] = [asked["known"]] if asked["known"] else []
        prompt = {"prompt_token_ids": asked["prompt"]}
        params = SamplingParams(
            max_tokens=asked["tokens"], temperature=asked["temperature"], seed=1, ignore_eos=True
        )
        llm.generate([prompt], params.with_(max_tokens=8), use_tqdm=False)
        steps, began = scheduler.gauges().step, time.perf_counter()
        outputs = llm.generate([prompt], params, use_tqdm=False)
        took = time.perf_counter() - began
        told = {
            "seconds": took,
            "tokens": list(outputs[0].outputs[0].token_ids),
            "steps": scheduler.gauges().step - steps,
        }
        print(json.dumps(told), flush=True)


class Engine:
    """A handle of an engine's process."""

    def __init__(self, name: str, folder: Path) -> None:
        command = [sys.executable, __file__, "--engine", name, "--folder", str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)
        while (line := self.process.stdout.readline()) and line.strip() != "ready":
            pass
        if not line:
            raise SystemExit(f"the engine {name} did not start")

    def ask(self, **request: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        return told


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--folder", type=Path, default=Path("/tmp/modulm-speculation"))
    words.add_argument("--rounds", type=int, default=7)
    words.add_argument("--tokens", type=int, default=96)
    words.add_argument("--json", type=Path)
    words.add_argument("--engine", help=argparse.SUPPRESS)
    given = words.parse_args()
    if given.engine:
        work(given.engine, given.folder)
        return
    for name, shape in (("target", TARGET), ("draft", DRAFT)):
        if not (given.folder / name / "tokenizer.json").exists():
            make_tiny(given.folder / name, "Qwen3ForCausalLM", dtype="bfloat16", **shape)
    table = rounds(given.folder, given.rounds, given.tokens)
    if given.json:
        given.json.write_text(json.dumps(table, indent=1))


def rounds(folder: Path, count: int, tokens: int) -> dict[str, list[float]]:
    """Run all measurements; returns the printed figures by name."""
    draw = np.random.default_rng(0)
    running = {name: Engine(name, folder) for name in engines(folder)}
    once = draw.integers(5, 1000, 40).tolist()
    cases = {
        "repeats": {"prompt": once * 6, "temperature": 0.0},
        "does not": {"prompt": draw.integers(5, 100000, 240).tolist(), "temperature": 1.0},
    }
    lines = {
        "ngram, text that repeats itself (at least 2.2)": ("ngram", "repeats"),
        "ngram, text that does not (at least 0.97)": ("ngram", "does not"),
        "a draft of 1/8, right 7 times of 10 (at least 1.6)": ("draft", "repeats"),
        "a step that verifies 4 tokens / one step (at most 1.25)": ("wrong", "does not"),
    }
    found: dict[str, list[float]] = {line: [] for line in lines}
    answers: dict[str, list[int]] = {}
    steps: dict[str, int] = {}
    for turn in range(count + 1):
        took: dict[tuple[str, str], float] = {}
        for case, request in cases.items():
            names = [name for name, of in lines.values() if of == case]
            order = ["plain", *names] if turn % 2 or not turn else [*names, "plain"]
            for name in order:
                known = [*request["prompt"], *answers.get(case, ())]
                told = running[name].ask(known=known, tokens=tokens, **request)
                if answers.setdefault(case, told["tokens"]) != told["tokens"]:
                    print(f"{name}: another answer than plain ({case})")
                took[name, case] = told["seconds"]
                steps[f"{name}, {case}"] = told["steps"]
        for line, (name, case) in lines.items() if turn else ():
            ratio = took["plain", case] / took[name, case]
            found[line].append(1 / ratio if name == "wrong" else ratio)
    plain = took["plain", "repeats"] / tokens * 1000
    print(f"plain: {plain:.1f} ms for a token; steps for {tokens} tokens: {steps}")
    for line, ratios in found.items():
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{line}: {statistics.median(ratios):.3f} (median of {each})")
    for engine in running.values():
        engine.process.stdin.close()
        engine.process.wait()
    return found


if __name__ == "__main__":
    main()
