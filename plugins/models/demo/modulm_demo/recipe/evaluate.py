"""Scores the checkpoint on held-out prompts: `python -m modulm_demo.recipe.evaluate`.

Prompts come from another seed than training and from the held-out side of the hash; the training
text is generated again to verify that it contains none of them.
"""

import argparse
import itertools
import json
import re
import time
from collections.abc import Iterable
from pathlib import Path

from .backends import Answer, http_backend, modulm_backend, transformers_backend
from .example import Example, Message, normalized, prompts
from .generator import CATEGORIES, heldout, training

_CHECKPOINT = Path(__file__).parents[1] / "checkpoint"


def _object(text: str) -> dict | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _calls(message: Message) -> list[str]:
    """Normalize calls, independent of their order."""
    functions = (call.get("function", call) for call in message.get("tool_calls") or ())
    return sorted(json.dumps([f["name"], f["arguments"]], sort_keys=True) for f in functions)


def is_right(example: Example, reply: Message) -> bool:
    """Compare calls and JSON objects by value, and look for the expected words in the rest."""
    wanted = example.messages[-1]
    if _calls(reply) != _calls(wanted):
        return False
    if _calls(wanted):
        return True
    if (filled := _object(wanted["content"])) is not None:
        return _object(reply["content"]) == filled
    return all(
        re.search(rf"(?<!\w){re.escape(text)}(?!\w)", reply["content"]) for text in example.expect
    )


def unseen(chosen: list[Example], seeds: Iterable[int], count: int) -> list[Example]:
    """Drop examples that the first `count` training conversations of each seed ask after all.

    The hash is of a question as first written; a typo or a greeting added to another question can
    still lead to the same words.
    """
    last_prompts = {normalized(prompts(example)[-1]) for example in chosen}
    written = (e for seed in seeds for e in itertools.islice(training(seed), count))
    seen = last_prompts.intersection(normalized(prompt) for e in written for prompt in prompts(e))
    remaining = [example for example in chosen if normalized(prompts(example)[-1]) not in seen]
    print(
        f"{len(chosen) - len(remaining)} of {len(chosen)} prompts dropped: in the training text\n"
    )
    return remaining


def grouped(chosen: Iterable[Example]) -> dict[str, list[Example]]:
    """Group by category; sums without a thought are a harder task with a line of their own."""
    groups: dict[str, list[Example]] = {}
    for example in chosen:
        direct = example.category == "arithmetic" and not example.thinking
        name = "arithmetic, no thinking" if direct else example.category
        groups.setdefault(name, []).append(example)
    return groups


def score(answer: Answer, chosen: list[Example], show: bool) -> int:
    """Count right answers; print wrong ones if `show`."""
    right = 0
    for example in chosen:
        reply = answer(example.messages[:-1], example.tools, enable_thinking=example.thinking)
        passed = is_right(example, reply)
        right += passed
        if show and not passed:
            print(json.dumps({"asked": prompts(example)[-1], "wanted": example.messages[-1],
                              "given": reply}, ensure_ascii=False))  # fmt: skip
    return right


def evaluate(answer: Answer, sets: dict[str, list[Example]], show: bool) -> None:
    """Print a table with one line per category."""
    print("| category | prompts | right | share |\n|---|---:|---:|---:|")
    for name, chosen in sets.items():
        right = score(answer, chosen, show)
        print(f"| {name} | {len(chosen)} | {right} | {right / len(chosen):.1%} |", flush=True)


def main() -> None:
    """Parse the options and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the checkpoint; over HTTP the name demo")
    parser.add_argument("--backend", choices=("transformers", "modulm", "http"),
                        default="transformers")  # fmt: skip
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=100, help="prompts per category")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--training-seeds", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--training-count", type=int, default=80_000, help="conversations")
    parser.add_argument("--only", choices=CATEGORIES, nargs="+", default=list(CATEGORIES))
    parser.add_argument("--show", action="store_true", help="print the wrong answers")
    args = parser.parse_args()
    chosen = [example for name in args.only for example in heldout(args.seed, name, args.count)]
    sets = grouped(unseen(chosen, args.training_seeds, args.training_count))
    if args.backend == "http":
        answer = http_backend(args.model or "demo", args.url)
    else:
        make = modulm_backend if args.backend == "modulm" else transformers_backend
        answer = make(args.model or str(_CHECKPOINT))
    began = time.monotonic()
    evaluate(answer, sets, args.show)
    print(f"\n{args.backend}, {time.monotonic() - began:.0f} seconds")


if __name__ == "__main__":
    main()
