"""Extends the vocabulary of a checkpoint: `python -m modulm_demo.recipe.grow --out FOLDER`.

The tokenizer continues to learn merges on text of the second mixture; existing tokens keep their
ids. A new token's embedding starts as the mean of its two parts' embeddings, so training can
continue from the existing weights.
"""

import argparse
import itertools
import json
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from .generator import training
from .tokenizer import render, store

TOKENS = 6144
_COUNT = 60_000
_LEAST = 12

Word = tuple[str, ...]
Pair = tuple[str, str]


def words(tokenizer: PreTrainedTokenizerFast, seed: int, count: int) -> Counter[str]:
    """Count the pieces that bound merges, in the tokenizer's byte letters."""
    cut, counts = tokenizer.backend_tokenizer.pre_tokenizer, Counter[str]()
    for example in itertools.islice(training(seed), count):
        counts.update(piece for piece, _ in cut.pre_tokenize_str(render(tokenizer, example)))
    return counts


def _joined(word: Word, pair: Pair) -> Word:
    merged: list[str] = []
    for part in word:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return tuple(merged)


def merges(split: dict[Word, int], known: set[str], count: int) -> list[Pair]:
    """Find the most frequent pairs one by one, merging each before the next search."""
    pairs: Counter[Pair] = Counter()
    at: dict[Pair, set[Word]] = {}
    for word, often in split.items():
        for pair in itertools.pairwise(word):
            pairs[pair] += often
            at.setdefault(pair, set()).add(word)
    learned: list[Pair] = []
    while len(learned) < count:
        pair, often = max(pairs.items(), key=lambda each: (each[1], each[0]))
        if often < _LEAST:
            break
        for word in at.pop(pair):
            times = split.pop(word, 0)
            for old in itertools.pairwise(word):
                pairs[old] -= times
            new = _joined(word, pair)
            split[new] = split.get(new, 0) + times
            for fresh in itertools.pairwise(new):
                pairs[fresh] += times
                at.setdefault(fresh, set()).add(new)
        del pairs[pair]
        if "".join(pair) not in known:
            learned.append(pair)
            known.add("".join(pair))
    return learned


def grown(tokenizer: PreTrainedTokenizerFast, seed: int, count: int, tokens: int) -> list[Pair]:
    """The merges that extend the vocabulary to `tokens`."""
    model = tokenizer.backend_tokenizer
    split: dict[Word, int] = {}
    bare = Tokenizer.from_str(model.to_str())
    bare.pre_tokenizer = None
    names = {number: token for token, number in bare.get_vocab().items()}
    core = json.loads(model.to_str())["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(core["merges"])}
    for word, often in words(tokenizer, seed, count).items():
        parts: Word = tuple(word)
        while candidates := [p for p in itertools.pairwise(parts) if p in ranks]:
            parts = _joined(parts, min(candidates, key=ranks.__getitem__))
        split[parts] = split.get(parts, 0) + often
    return merges(split, set(names.values()), tokens - len(tokenizer))


def with_merges(tokenizer: PreTrainedTokenizerFast, new: list[Pair]) -> PreTrainedTokenizerFast:
    """Add merges to the tokenizer; new tokens are numbered after all others."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    # Tokens added besides the merges keep their ids only if the model's vocabulary has them too.
    state["model"]["vocab"].update({each["content"]: each["id"] for each in state["added_tokens"]})
    for number, pair in enumerate(new, len(tokenizer)):
        state["model"]["vocab"]["".join(pair)] = number
        state["model"]["merges"].append(list(pair))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token, chat_template=tokenizer.chat_template,
        model_max_length=tokenizer.model_max_length, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def main() -> None:
    """Parse the options, extend the vocabulary, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint that grows")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--count", type=int, default=_COUNT, help="conversations to learn from")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    new = grown(tokenizer, args.seed, args.count, args.tokens)
    larger = with_merges(tokenizer, new)
    model = Qwen3ForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.resize_token_embeddings(len(larger), mean_resizing=False)
    table, numbers = model.get_input_embeddings().weight.data, larger.get_vocab()
    for pair in new:
        table[numbers["".join(pair)]] = (table[numbers[pair[0]]] + table[numbers[pair[1]]]) / 2
    model.to(torch.bfloat16).save_pretrained(args.out)
    store(larger, args.out)
    print(f"{len(tokenizer)} -> {len(larger)} tokens")


if __name__ == "__main__":
    main()
