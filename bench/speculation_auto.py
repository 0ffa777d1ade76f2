"""Drafts, as they are by default, beside plain decoding, in five kinds of work.

    python bench/speculation_auto.py [--rounds 5] [--prompts 2] [--tokens 400] [--streams 1]
                                     [--part demo|replay|grammar|steps] [--kind NAME ...]
                                     [--folder FOLDER] [--json FILE] [--force]

- `demo`: the embedded model answers held-out prompts of its recipe. Its steps take less than a
  millisecond: by default it drafts nothing. With `--force`, it drafts as `--speculative auto` does.
- `replay`: a model of random weights (145 million parameters) runs, and its tokens are replaced by
  those of a prepared answer: an edited file of this repository, JSON extracted from tables, a
  summary that quotes, an unrelated page, a text in which each word is replaced. Steps, drafts and
  verification are real; only the choice of the token is not the model's.
- `grammar`: replays of JSON with fixed keys, which a schema determines.
- `steps`: the drafter alone is driven through the texts of `replay`, without a model, by a clock in
  which a token more than one costs 0.15 of a step (AVX2), in which 4 cost 1.36 and 16 2.7 times as
  much as one (Zen 4, measured), in which 4 cost as much as one and 16 2.4 times that (cheap), or in
  which each costs 0.02 of a step (flat, where memory limits). Steps, tokens per step, and the gain
  by these clocks, of chains and of trees. In the last lines a drafter's first choice is right half
  of the time, its second in three of ten cases. The same on any machine.

`--kind` names kinds of work, such as `edits`; by default all are run. `first` is the share of the
first token in the seconds of an answer with drafts.

Both engines are in one process and take turns, in changing order. Each round has a cache salt of
its own, so that no answer is drafted from the same answer in an earlier round. For each kind:
steps, accepted of drafted tokens, plain / drafts of CPU seconds, of seconds, and of seconds after
the first token (median and quartiles of the rounds), the share of the first token, and whether all
tokens are the same. On a loaded machine only steps and CPU seconds mean something.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from speculation import KNOWN, Choices, ChoicesOptions
from transformers import AutoTokenizer

from modulm import LLM, SamplingParams
from modulm.contracts.drafter import DraftStep
from modulm.contracts.sampling import StructuredOutputs
from modulm.engine.sampling.sampler import Chosen
from modulm.testing.checkpoints import make_tiny
from modulm_demo import Demo
from modulm_demo.recipe.generator import heldout
from modulm_speculation import Speculator
from modulm_speculation.adaptive import Adaptive
from modulm_speculator_suffix.speculator import Suffix, SuffixOptions

ROOT = Path(__file__).resolve().parent.parent
#: Kind of work -> category of the recipe. The recipe has no code; its edits are of sentences.
DEMO = {
    "chat": "everyday", "edits": "editing", "extraction": "json", "summaries": "summaries",
    "translation": "translation",
}  # fmt: skip
SHAPE = {
    "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16,
    "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip

FIELDS = ("origin", "destination", "travel_day", "passenger_name", "seat_preference")
RECORD = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 12} for name in FIELDS},
    "required": FIELDS,
    "additionalProperties": False,
}

#: A row of a table of flags in docs/config.md.
FLAG = re.compile(
    r"^\| `(?P<flag>--[a-z-]+)[^|]* \| (?P<default>[^|]*) \| (?P<help>[^|]*) \|$", re.M
)
#: A prompt and, in a replay, its answer.
Pair = tuple[list[int], list[int]]


def replays(encode: Any, count: int, tokens: int) -> Iterator[tuple[str, list[Pair]]]:
    """Yield each kind of work with its pairs."""
    draw = random.Random(0)
    code = sorted((ROOT / "core/libs/speculation/modulm_speculation").glob("*.py"))
    code = [file for file in code if len(file.read_text()) > 3 * tokens]
    pages = sorted((ROOT / "docs").glob("*.md"))
    texts: dict[str, list[tuple[str, str]]] = {}
    for index in range(count):
        file, page, other = code[index % len(code)].read_text(), pages[index], pages[-1 - index]
        file = file[-4 * tokens :]
        passage = page.read_text()[600 : 600 + 4 * tokens]
        sentences = re.findall(r"[A-Z][^.|`]{40,160}\.", page.read_text()) or [passage]
        rows = [
            (draw.choice(["Lima", "Oslo", "Kyoto"]), draw.randrange(1000, 9999), draw.random())
            for _ in range(max(30, tokens // 12))
        ]
        table = "\n".join(
            f"{city} order {number} total {price:.2f}" for city, number, price in rows
        )
        numbers = [
            {"city": city, "order": number, "total": f"{price:.2f}"} for city, number, price in rows
        ]
        flags = list(FLAG.finditer((ROOT / "docs/config.md").read_text()))[index * tokens // 25 :]
        flags = flags[: max(10, tokens // 25)]
        records = [each.groupdict() for each in flags]
        quoted = " ".join(f"The page says: {each} That matters here." for each in sentences)
        each = {
            "chat": ("How does this work?", other.read_text()[500 : 500 + 4 * tokens]),
            "edits": (f"Rename self to this.\n{file}", file.replace("self", "this")),
            "extraction": (
                "As JSON:\n" + "\n".join(each.group() for each in flags),
                json.dumps(records),
            ),
            "extraction of numbers": (f"As JSON:\n{table}", json.dumps(numbers)),
            "summaries": (f"Summarize with quotes.\n{page.read_text()[:12000]}", quoted),
            "translation": (f"Translate.\n{passage}", _translated(passage)),
        }
        for kind, pair in each.items():
            texts.setdefault(kind, []).append(pair)
    for kind, pairs in texts.items():
        yield kind, [(encode(p)[-3000:], encode(a)[: tokens + 1]) for p, a in pairs]


def records(encode: Any, count: int) -> list[Pair]:
    """Return short prompts with JSON in the form of `RECORD`."""
    draw = random.Random(0)
    values = [
        ("Lima", "Oslo", "Kyoto"), ("Rome", "Quito", "Cairo"),
        ("2026-01-02", "2026-11-28", "2027-05-14"), ("Nora Vale", "Ada Brink", "Tom Reed"),
        ("window", "aisle", "none"),
    ]  # fmt: skip
    pairs = []
    for index in range(count):
        record = {name: draw.choice(some) for name, some in zip(FIELDS, values, strict=True)}
        pairs.append((encode(f"Booking {index} as JSON."), [*encode(json.dumps(record)), 2]))
    return pairs


def _translated(text: str) -> str:
    """Replace each word by one of the same length that depends only on the word."""

    def word(match: re.Match[str]) -> str:
        draw = random.Random(match.group())
        return "".join(draw.choice("aeinrstdulo") for _ in match.group())

    return re.sub(r"[A-Za-z]+", word, text)


class Replay:
    """Makes the greedy tokens of an engine in this process those of prepared answers."""

    def __init__(self, llm: LLM) -> None:
        runner = llm._core.loop.executor._worker.runner
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self._rows: dict[int, list[int]] = {}
        self._sampler, self._admit = runner.sampler, runner.sampler.admit
        self._sample = runner.sampler.sample
        self._sampler.admit, self._sampler.sample = self.admit, self.sample

    def admit(self, start: Any, *more: Any) -> None:
        prompt = start.prompt.tolist()
        self._rows[start.row] = [*prompt, *self.answers[tuple(prompt)]]
        self._admit(start, *more)

    def sample(self, rows: np.ndarray, positions: np.ndarray, logits: torch.Tensor) -> Chosen:
        texts = (self._rows[row] for row in rows.tolist())
        tokens = [
            text[at] if at < len(text) else 3
            for text, at in zip(texts, positions.tolist(), strict=True)
        ]
        logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 1e4
        return self._sample(rows, positions, logits)


def answer(llm: LLM, prompts: Sequence[Any], params: SamplingParams, streams: int) -> Any:
    """Return tokens, (verified, accepted) drafts, steps, CPU seconds, seconds, and those after the
    first tokens.
    """
    tokens, drafts, gauges, decoding = [], [0, 0], llm._core.loop.scheduler.gauges, 0.0
    steps, cpu, began = gauges().step, time.process_time(), time.perf_counter()
    for at in range(0, len(prompts), streams):
        for output in llm.generate(prompts[at : at + streams], params, use_tqdm=False):
            tokens.append(list(output.outputs[0].token_ids))
            decoding += output.metrics.last_token_time - output.metrics.first_token_time
            metrics = output.outputs[0].spec_decode_metrics
            for verified, accepted in metrics.steps if metrics else ():
                drafts[0] += verified
                drafts[1] += accepted
    used = time.process_time() - cpu, time.perf_counter() - began
    return tokens, drafts, gauges().step - steps, *used, decoding


def compare(
    engines: Mapping[str, LLM], prompts: Sequence[Any], params: SamplingParams, streams: int,
    rounds: int,
) -> dict[str, Any]:  # fmt: skip
    """Let both engines answer in turns; return the figures of a kind of work."""
    ratios: list[tuple[float, ...]] = []
    results: dict[str, Any] = {}
    for turn in range(rounds + 1):
        for name in sorted(engines, reverse=bool(turn % 2)):
            salted = [{**prompt, "cache_salt": str(turn)} for prompt in prompts]
            results[name] = answer(engines[name], salted, params, streams)
        plain, auto = results["plain"], results["auto"]
        if turn:
            ratios.append(tuple(plain[at] / auto[at] for at in (3, 4, 5)))
    quartiles = np.percentile(np.array(ratios), [25, 50, 75], axis=0).round(3).T.tolist()
    return {
        "tokens": sum(map(len, plain[0])), "same": plain[0] == auto[0], "steps": plain[2],
        "steps_auto": auto[2], "drafted": auto[1][0], "accepted": auto[1][1],
        "cpu": quartiles[0], "seconds": quartiles[1], "decoding": quartiles[2],
        "first": round(1 - auto[5] / auto[4], 3),
    }  # fmt: skip


#: Sizes of steps, and their times measured on two cores of Zen 4 (0.6B, bf16, in steps of one).
ZEN_4 = (1, 2, 3, 4, 6, 8, 10, 12, 16), (1.0, 1.0, 1.32, 1.36, 1.42, 1.72, 2.0, 2.2, 2.7)
#: Name -> the time of a step of so many tokens.
CLOCKS: dict[str, Callable[[int], float]] = {
    "AVX2": lambda tokens: 1.0 + 0.15 * (tokens - 1),
    "Zen 4": lambda tokens: float(np.interp(tokens, *ZEN_4)) + 0.15 * max(tokens - 16, 0),
    "cheap": lambda tokens: 1.0 + 1.4 / 12 * max(tokens - 4, 0),
    "flat": lambda tokens: 1.0 + 0.02 * (tokens - 1),
}


def drive(
    speculator: Speculator, pairs: Sequence[Pair], cost: Callable[[int], float]
) -> tuple[int, int, int, float]:
    """Drive a drafter through answers, one after the other, as `--speculative auto` does.

    Returns steps, drafted and accepted tokens, and how many times as long decoding takes without
    drafts.
    """
    clock = [0.0]
    drafter = Adaptive(speculator, lambda: clock[0])
    steps = drafted = accepted = count = 0
    for prompt, answer in pairs:
        drafter.admit(0, len(prompt), None)
        text = np.array([*prompt, *answer], dtype=np.int64)
        at, size = len(prompt) + 1, 1
        while at < len(text):
            drafts: Sequence[int] = ()
            branches: Sequence[Any] = ()
            if not drafter.rest(1):
                batch: Any = SimpleNamespace(tokens=np.zeros(size))
                step = DraftStep([0], [text[:at]], [drafter.most], batch, np.zeros(1))
                drafts = drafter.propose(step)[0].tolist()[: len(text) - at - 1]
                branches = drafter.branches()[0] if drafter.trees else ()
            right = same(text[at:], drafts)
            size = 1 + len(drafts) + sum(len(tokens) for _, tokens in branches)
            for depth, tokens in branches:
                if depth == right and (more := same(text[at + depth :], tokens)):
                    right += more
                    break
            clock[0] += cost(size)
            at += right + 1
            steps, count = steps + 1, count + right + 1
            drafted, accepted = drafted + size - 1, accepted + right
        drafter.release(0)
    return steps, drafted, accepted, count * cost(1) / clock[0]


def same(text: np.ndarray, tokens: Sequence[int]) -> int:
    """Return how many of the tokens the text begins with."""
    equal = text[: len(tokens)] == np.asarray(tokens[: len(text)], dtype=np.int64)
    return len(equal) if equal.all() else int(equal.argmin())


def print_steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Print what the drafter does without a model; return the figures."""
    tokenizer = AutoTokenizer.from_pretrained(Demo.source())
    each = "steps | a step | accepted / drafted | gain"
    print(f"| work, clock | tokens | {each} | with trees: {each} |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    table: dict[str, Any] = {}
    kinds = list(replays(tokenizer.encode, arguments.prompts, arguments.tokens))
    draw = np.random.default_rng(0)
    text = draw.integers(10, 8000, 1 + 8 * arguments.tokens).tolist()
    KNOWN[:] = [text]
    kinds.append(("two choices for each token", [(text[:1], text[1:])]))
    for kind, pairs in kinds:
        tokens = sum(len(answer) - 1 for _, answer in pairs)
        for name, cost in CLOCKS.items():
            both = [
                drive(
                    Choices(ChoicesOptions(num_speculative_tokens=16, trees=trees))
                    if kind.startswith("two choices")
                    else Suffix(SuffixOptions(suffix_decoding_max_spec_factor=4.0, trees=trees)),
                    pairs,
                    cost,
                )
                for trees in (False, True)
            ]
            table[f"{kind}, {name}"] = [tokens, *both]
            cells = " | ".join(
                f"{steps} | {tokens / steps:.2f} | {accepted} / {drafted} | {gain:.2f}"
                for steps, drafted, accepted, gain in both
            )
            print(f"| {kind}, {name} | {tokens} | {cells} |")
    return table


def work(arguments: argparse.Namespace, stack: ExitStack) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the measurements and yield their figures."""
    common = {"max_model_len": 4096, "enable_prefix_caching": False, "max_num_seqs": 32}
    drafts = {"speculative": "auto"} if arguments.force else {}
    variants = {"plain": {"speculative": "off"}, "auto": drafts}
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens)
    tokenizer = AutoTokenizer.from_pretrained(Demo.source())
    if "demo" in arguments.part:
        engines = {
            name: stack.enter_context(LLM("demo", **{**common, "max_model_len": 2048}, **more))
            for name, more in variants.items()
        }
        for kind, category in DEMO.items():
            prompts = [
                {"prompt": tokenizer.apply_chat_template(
                    [dict(message) for message in example.messages[:-1]],
                    add_generation_prompt=True, tokenize=False,
                )}
                for example in heldout(7, category, 4 * arguments.prompts)
            ]  # fmt: skip
            figures = compare(engines, prompts, params, arguments.streams, arguments.rounds)
            yield f"demo, {kind}", figures
    if {"replay", "grammar"} & set(arguments.part):
        folder = arguments.folder / "replayed"
        if not (folder / "config.json").exists():
            make_tiny(folder, "Qwen3ForCausalLM", dtype="bfloat16", **SHAPE)
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copyfile(Path(Demo.source()) / name, folder / name)
        engines = {
            name: stack.enter_context(LLM(str(folder), **common, **more))
            for name, more in variants.items()
        }
        replay = {name: Replay(llm) for name, llm in engines.items()}
        params = params.with_(ignore_eos=True)
        kinds: list[tuple[str, list[Pair], SamplingParams]] = []
        if "grammar" in arguments.part:
            constraint = StructuredOutputs(json=RECORD, disable_any_whitespace=True)
            limited = params.with_(structured_outputs=constraint, ignore_eos=False)
            kinds.append(("grammar", records(tokenizer.encode, 8 * arguments.prompts), limited))
        if "replay" in arguments.part:
            found = replays(tokenizer.encode, arguments.prompts, arguments.tokens)
            named = arguments.kind
            kinds += [
                (f"replay, {kind}", pairs, params)
                for kind, pairs in found
                if named is None or kind in named
            ]
        for kind, pairs, each in kinds:
            for one in replay.values():
                one.answers = {tuple(prompt): answer for prompt, answer in pairs}
            prompts = [{"prompt_token_ids": prompt} for prompt, _ in pairs]
            yield kind, compare(engines, prompts, each, arguments.streams, arguments.rounds)


def line(kind: str, figures: Mapping[str, Any]) -> str:
    """Return a line of the table."""
    keys = ("cpu", "seconds", "decoding")
    ratios = ["{1:.2f} ({0:.2f} to {2:.2f})".format(*figures[key]) for key in keys]
    return (
        f"| {kind} | {figures['tokens']} | {figures['steps']} | {figures['steps_auto']} | "
        f"{figures['accepted']} / {figures['drafted']} | {' | '.join(ratios)} | "
        f"{figures['first']:.2f} | {'yes' if figures['same'] else 'NO'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--part", nargs="+", default=["demo", "grammar", "replay"])
    parser.add_argument("--kind", nargs="+")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/modulm-speculation-auto"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--force", action="store_true")
    arguments = parser.parse_args()
    if arguments.part == ["steps"]:
        steps = print_steps(arguments)
        if arguments.json:
            arguments.json.write_text(json.dumps(steps, indent=1))
        return
    table = {}
    print(
        "| work | tokens | steps | with drafts | accepted / drafted | CPU | seconds "
        "| after the first token | first | same |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    with ExitStack() as stack:
        for kind, figures in work(arguments, stack):
            table[kind] = figures
            print(line(kind, figures), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
