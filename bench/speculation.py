"""The gain of speculation for one stream, and the cost of verification: paired with plain rounds.

    python bench/speculation.py [--folder FOLDER] [--rounds 7] [--tokens 96] [--json FILE]
                                [--only ngram draft wrong trees] [--small] [--cpu]

FOLDER keeps two checkpoints of random weights, created on the first run: one of Qwen3-0.6B's shape
and a draft model of an eighth of its parameters. Each engine is a separate process. In each round
all do the same work, in a changing order, and are compared with the plain one of that round.

- `ngram`: greedy answers to a repetitive text, and answers sampled at temperature 1, which do not
  repeat;
- `draft`: the draft model runs at full cost, but its tokens are replaced: each is correct with
  probability 0.7, known from the plain answer;
- `wrong`: four wrong tokens are drafted at no cost, so every step verifies them;
- `trees`: a drafter at no cost whose first choice is right half of the time, and whose second is in
  three of ten cases. Chains of first choices, and trees of both, each as large as pays.

All engines answer with the text of the first plain answer: its next token gets the highest logit,
since with random weights two tokens often have about the same. `--small` takes a target of a tenth
of the parameters.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from attrs import frozen

from modulm import LLM, SamplingParams
from modulm.contracts.drafter import DraftStep
from modulm.testing.checkpoints import make_tiny
from modulm_speculation import Options, Speculator
from modulm_speculation.speculator import Branch
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
KINDS = ("ngram", "draft", "wrong", "trees")
#: How often the first and the second choice of `trees` are right.
FIRST, SECOND = 0.5, 0.3
SMALL = {
    **TARGET, "vocab_size": 16384, "hidden_size": 640, "intermediate_size": 1920,
    "num_hidden_layers": 10, "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 64,
}  # fmt: skip
#: Whole sequences, prompt included, from which the synthetic draft takes the correct tokens.
KNOWN: list[list[int]] = []


@frozen
class ChoicesOptions(Options):
    trees: bool = False


class Choices(Speculator):
    """Two choices for each token, of known acceptance: the same for chains and trees."""

    name: ClassVar[str] = "choices"
    Config: ClassVar[type] = ChoicesOptions
    cheap: ClassVar[bool] = True

    def __init__(self, config: ChoicesOptions) -> None:
        super().__init__(config)
        self.trees = config.trees
        self._branches: list[list[Branch]] = []

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        self._branches = []
        drafts = []
        for history in step.histories:
            start = len(history)
            known = next((k for k in KNOWN if k[:start] == history.tolist()), [])
            right = np.array(known[start : start + self.most], dtype=np.int64)
            draw = np.array([random.Random(start + index).random() for index in range(len(right))])
            first = np.where(draw < FIRST, right, 7)
            second = np.where((draw >= FIRST) & (draw < FIRST + SECOND), right, 7)
            drafts.append(first)
            self._branches.append([
                (depth, np.append(second[depth], first[depth + 1 : depth + 3]))
                for depth in range(min(len(right), 4))
            ])  # fmt: skip
        return drafts

    def branches(self) -> Sequence[Sequence[Branch]]:
        return self._branches


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


class Told:
    """Makes the tokens of an engine in this process those of a known text, one row at a time."""

    def __init__(self, llm: LLM, known: list[list[int]]) -> None:
        runner = llm._core.loop.executor._worker.runner
        self._known, self._choose = known, runner._choose
        runner._choose = self.choose

    def choose(
        self, step: Any, rows: np.ndarray, ends: np.ndarray, drafts: Any, logits: torch.Tensor
    ) -> None:
        plan, count = step.plan, len(logits)
        if self._known and len(plan.rows) == 1:
            depths = list(range(count))
            parents = plan.parts.get("drafts", {}).get(int(plan.rows[0]), ())
            for node, parent in enumerate(parents, 1):
                depths[node] = depths[parent] + 1
            first = int(plan.starts[0] + plan.counts[0]) - count + 1
            text = self._known[0]
            told = [(i, text[first + at]) for i, at in enumerate(depths) if first + at < len(text)]
            if told:
                logits[[i for i, _ in told], [token for _, token in told]] = 1e4
        self._choose(step, rows, ends, drafts, logits)


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
        "chains": {"method": "custom", "model": "speculation:Choices", "num_speculative_tokens": 8},
        "trees": {
            "method": "custom", "model": "speculation:Choices", "num_speculative_tokens": 8,
            "trees": True,
        },
    }  # fmt: skip


def work(name: str, folder: Path, target: Path) -> None:
    """Run an engine in this process: reads a request per line from stdin, writes its time to
    stdout.
    """
    import speculation  # this file, as the engine imports it

    table = engines(folder)[name]
    flags = {"speculative_config": table} if table else {"speculative": "off"}
    llm = LLM(str(target), max_model_len=2048, **flags)
    Told(llm, speculation.KNOWN)
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
        cpu = time.process_time()
        steps, began = scheduler.gauges().step, time.perf_counter()
        outputs = llm.generate([prompt], params, use_tqdm=False)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        told = {
            "seconds": took,
            "cpu": cpu,
            "tokens": list(outputs[0].outputs[0].token_ids),
            "steps": scheduler.gauges().step - steps,
        }
        print(json.dumps(told), flush=True)


class Engine:
    """A handle of an engine's process."""

    def __init__(self, name: str, folder: Path, target: Path) -> None:
        command = [sys.executable, __file__, "--engine", name, "--folder", str(folder)]
        command += ["--target", str(target)]
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
    words.add_argument("--only", nargs="+", default=[*KINDS], choices=KINDS)
    words.add_argument("--small", action="store_true")
    words.add_argument("--cpu", action="store_true", help="compare CPU seconds")
    words.add_argument("--engine", help=argparse.SUPPRESS)
    words.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    given = words.parse_args()
    if given.engine:
        work(given.engine, given.folder, given.target)
        return
    made = {"small": SMALL} if given.small else {"target": TARGET}
    for name, shape in (made | ({"draft": DRAFT} if "draft" in given.only else {})).items():
        if not (given.folder / name / "tokenizer.json").exists():
            make_tiny(given.folder / name, "Qwen3ForCausalLM", dtype="bfloat16", **shape)
    table = rounds(given, given.folder / next(iter(made)))
    if given.json:
        given.json.write_text(json.dumps(table, indent=1))


def rounds(given: argparse.Namespace, target: Path) -> dict[str, list[float]]:
    """Run the measurements; returns the printed figures by name."""
    draw = np.random.default_rng(0)
    tokens, kinds = given.tokens, set(given.only)
    needed = {"plain", *(kinds - {"trees"}), *(("chains", "trees") if "trees" in kinds else ())}
    running = {
        name: Engine(name, given.folder, target) for name in engines(given.folder) if name in needed
    }
    once, most = draw.integers(5, 1000, 40).tolist(), 16000 if given.small else 100000
    cases = {
        "repeats": {"prompt": once * 6, "temperature": 0.0},
        "does not": {"prompt": draw.integers(5, most, 240).tolist(), "temperature": 1.0},
    }
    lines = {
        "ngram, text that repeats itself (at least 2.2)": ("ngram", "repeats"),
        "ngram, text that does not (at least 0.97)": ("ngram", "does not"),
        "a draft of 1/8, right 7 times of 10 (at least 1.6)": ("draft", "repeats"),
        "a step that verifies 4 tokens / one step (at most 1.25)": ("wrong", "does not"),
        "chains, half right": ("chains", "repeats"),
        "trees / chains (at least 1.15)": ("trees", "repeats"),
    }
    lines = {line: (name, of) for line, (name, of) in lines.items() if name in running}
    found: dict[str, list[float]] = {line: [] for line in lines}
    answers: dict[str, list[int]] = {}
    steps: dict[str, int] = {}
    for turn in range(given.rounds + 1):
        took: dict[tuple[str, str], float] = {}
        for case, request in cases.items():
            names = [name for name, of in lines.values() if of == case]
            if not names:
                continue
            order = ["plain", *names] if turn % 2 or not turn else [*names, "plain"]
            for name in order:
                known = [*request["prompt"], *answers.get(case, ())]
                told = running[name].ask(known=known, tokens=tokens, **request)
                if answers.setdefault(case, told["tokens"]) != told["tokens"]:
                    print(f"{name}: another answer than plain ({case})")
                took[name, case] = told["cpu" if given.cpu else "seconds"]
                steps[f"{name}, {case}"] = told["steps"]
        for line, (name, case) in lines.items() if turn else ():
            ratio = took["chains" if name == "trees" else "plain", case] / took[name, case]
            found[line].append(1 / ratio if name == "wrong" else ratio)
    plain = next(seconds for (name, _), seconds in took.items() if name == "plain")
    plain *= 1000 / tokens
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
