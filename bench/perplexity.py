"""Perplexity of the embedded model under quantization at load, relative to bf16.

    python bench/perplexity.py [--conversations N] [--seed S] [--only TEXT] [--json FILE]

The texts are held-out conversations of the model's own recipe, from a separate seed, rendered by
its template. Log probabilities come from the engine's `prompt_logprobs`, which uses the prompt
kernels. `written` counts the tokens that the model has to write (answers), `all` includes the
questions.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer

import modulm_demo
from modulm import LLM, SamplingParams
from modulm_demo.recipe.batches import Document, pieces
from modulm_demo.recipe.generator import CATEGORIES, heldout
from modulm_demo.recipe.tokenizer import render

#: Name of a line -> --quantization and its settings.
FORMS: Mapping[str, tuple[str | None, Mapping[str, object]]] = {
    "bf16": (None, {}),
    "int8, activations bf16": ("int8", {"activations": "bf16"}),
    "int8, activations int8": ("int8", {"activations": "int8"}),
    "fp8, activations bf16": ("fp8", {}),
    **{
        f"int4, groups of {size}, activations {activations}": (
            "int4",
            {"group_size": size, "activations": activations},
        )
        for size in (32, 64, 128)
        for activations in ("bf16", "int8")
    },
}


def conversations(tokenizer, seed: int, count: int) -> list[Document]:
    """Generate `count` held-out conversations, the same number of each category."""
    chosen = [e for name in CATEGORIES for e in heldout(seed, name, -(-count // len(CATEGORIES)))]
    made = []
    for example in chosen[:count]:
        ids: list[int] = []
        learned: list[bool] = []
        for text, written in pieces(render(tokenizer, example), bool(example.thinking)):
            piece = tokenizer(text)["input_ids"]
            ids += piece
            learned += [written] * len(piece)
        made.append(Document(ids, learned))
    return made


def perplexities(form: str, documents: list[Document]) -> dict[str, float]:
    """Perplexity over written tokens and over all, for one of FORMS."""
    quantization, settings = FORMS[form]
    engine = LLM(model="demo", quantization=quantization, quantization_config=dict(settings))
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": document.ids} for document in documents]
    losses: dict[str, list[float]] = {"written": [], "all": []}
    outputs = engine.generate(prompts, params, use_tqdm=False)
    for document, output in zip(documents, outputs, strict=True):
        places = zip(document.ids, document.learned, output.prompt_logprobs, strict=True)
        for token, written, found in list(places)[1:]:
            loss = -found[token].logprob
            losses["all"].append(loss)
            if written:
                losses["written"].append(loss)
    return {name: math.exp(sum(each) / len(each)) for name, each in losses.items()}


def main() -> None:
    """Measure and print a table; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--seed", type=int, default=2026, help="of the text; training used 1 and 3")
    parser.add_argument("--only", default="", help="forms whose name contains this, and bf16")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    checkpoint = Path(modulm_demo.__file__).parent / "checkpoint"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    documents = conversations(tokenizer, options.seed, options.conversations)
    print(f"{len(documents)} conversations, {sum(len(d.ids) for d in documents)} tokens\n")
    print("| weights | written | to bf16 | all | to bf16 |\n|---|---:|---:|---:|---:|")
    results: dict[str, dict[str, float]] = {}
    for form in FORMS:
        if form != "bf16" and options.only not in form:
            continue
        found = results[form] = perplexities(form, documents)
        cells = (f"{v:.4f} | {v / results['bf16'][name]:.4f}" for name, v in found.items())
        print(f"| {form} | {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
